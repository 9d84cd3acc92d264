"""`paged_attention` in plain PyTorch, and how keys are split."""

import torch

# Keys of a split while MAX_SPLITS of them suffice; longer rows double it.
MIN_SPLIT = 128
MAX_SPLITS = 16


def paged_attention_reference(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `moss_kernels.paged_attention`."""
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    rows = row_map.long()
    key = torch.arange(page_table.shape[1] * page_size, device=q.device)
    visible = (key <= positions[rows][:, None]) & active[:, None]  # [B, N*Z]
    pages = page_table[rows].long()

    def gathered(store: torch.Tensor) -> torch.Tensor:
        tokens = store[pages].transpose(2, 3).flatten(1, 2)  # [B, N*Z, H, D]
        # Selected, not multiplied: 0 x NaN is NaN, so weights of zero alone would let stale values through.
        return torch.where(visible[..., None, None], tokens, 0).float()

    keys, values = gathered(key_pages), gathered(value_pages)
    grouped = q.unflatten(1, (kv_heads, -1, head_dim)).float()
    grouped = torch.where(active[:, None, None, None], grouped, 0)
    scores = torch.einsum("bhgd,bnhd->bhgn", grouped, keys) * head_dim**-0.5
    # An inactive row sees nothing; its softmax must not be NaN.
    scores = torch.where(visible[:, None, None], scores, torch.finfo(torch.float32).min)
    weights = torch.where(visible[:, None, None], scores.softmax(-1), 0)
    out.copy_(torch.einsum("bhgn,bnhd->bhgd", weights, values).flatten(1))

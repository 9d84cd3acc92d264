"""`paged_attention` in plain PyTorch, and how keys are split."""

import torch

from moss_kernels.kv_append import kv_append_reference

# Keys of a split while MAX_SPLITS of them suffice; longer rows double it.
MIN_SPLIT = 128
MAX_SPLITS = 16


def paged_attention_reference(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `moss_kernels.paged_attention`."""
    pages = (key_pages, value_pages, page_table, positions, row_map, active)
    q = torch.zeros_like(out)
    kv_append_reference(qkv, q_norm, k_norm, eps, cos_sin, *pages, q)
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    rows = row_map.long()
    key = torch.arange(page_table.shape[1] * page_size, device=q.device)
    visible = (key <= positions[rows][:, None]) & active[:, None]  # [B, N*Z]

    def gathered(store: torch.Tensor) -> torch.Tensor:
        tokens = store[page_table[rows].long()].transpose(2, 3).flatten(1, 2)  # [B, N*Z, H, D]
        # Selected, not multiplied: 0 x NaN is NaN, so weights of zero alone would let stale values through.
        return torch.where(visible[..., None, None], tokens, 0).float()

    keys, values = gathered(key_pages), gathered(value_pages)
    scores = torch.einsum("bhgd,bnhd->bhgn", q.unflatten(1, (kv_heads, -1, head_dim)).float(), keys) * head_dim**-0.5
    # An inactive row sees nothing; its softmax must not be NaN.
    scores = torch.where(visible[:, None, None], scores, torch.finfo(torch.float32).min)
    weights = torch.where(visible[:, None, None], scores.softmax(-1), 0)
    out.copy_(torch.einsum("bhgn,bnhd->bhgd", weights, values).flatten(1))

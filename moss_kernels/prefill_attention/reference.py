"""`prefill_attention` in plain PyTorch."""

import torch

from moss_kernels.ring_attention import masked_attention


def prefill_attention_reference(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    counts: torch.Tensor,
    start: int,
    out: torch.Tensor,
) -> None:
    """See `moss_kernels.prefill_attention`."""
    batch = len(counts)
    if batch == 0:
        return
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    length, group = len(q) // batch, q.shape[1] // (kv_heads * head_dim)
    step = torch.arange(length, device=q.device)
    # Padding may reach beyond the table, a prompt never does.
    key = torch.arange(min(start + length, page_tables.shape[1] * page_size), device=q.device)
    visible = (step < counts[:, None])[..., None] & (key <= (start + step)[:, None])  # [B, L, start + L]
    pages, place = page_tables[:, key // page_size].long(), key % page_size
    queries, results = q.view(batch, length, -1, head_dim), out.view(batch, length, -1)
    # Prompt by prompt: a library's sums may depend on how many matrices it multiplies.
    for prompt in range(batch):
        keys, values = (
            store[pages[prompt], :, place].repeat_interleave(group, 1)[None]  # [1, start + L, Hq, D]
            for store in (key_pages, value_pages)
        )
        part = slice(prompt, prompt + 1)
        results[part] = masked_attention(queries[part], keys, values, visible[part]).flatten(2)

"""`prefill_attention` in plain PyTorch."""

import torch

from moss_kernels.ring_attention import masked_attention

# Queries of a tile: with four query heads for each key head they fill a tile of the tensor cores.
TILE = 16


def prefill_attention_reference(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `moss_kernels.prefill_attention`."""
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    group = q.shape[1] // (kv_heads * head_dim)
    queries, results = q.view(-1, TILE, kv_heads * group, head_dim), out.view(-1, TILE, q.shape[1])
    step = torch.arange(TILE, device=q.device)
    # Tile by tile: a library's sums may depend on how many matrices it multiplies.
    for index in range(len(tiles)):
        part = slice(index, index + 1)
        first, count = tiles[part].long().unbind(1)
        # Whatever the others see. A GPU is not waited for, and reads as far as the table goes.
        last = page_tables.shape[1] * page_size if q.is_cuda else max(int(first + count), 1)
        key = torch.arange(last, device=q.device)
        visible = (step < count)[:, None] & (key <= (first + step)[:, None])  # [TILE, last]
        pages, place = page_tables[index, key // page_size].long(), key % page_size
        keys, values = (
            store[pages, :, place].repeat_interleave(group, 1)[None]  # [1, last, Hq, D]
            for store in (key_pages, value_pages)
        )
        results[part] = masked_attention(queries[part], keys, values, visible[None]).flatten(2)

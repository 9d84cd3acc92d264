"""`kv_append` in plain PyTorch, and what addresses pages.

B rows of a step, S pool rows (row S is the null row), Hq query heads, H key and value heads, D head_dim, P pages of Z
tokens (page P is the null page).
"""

import torch

from moss_kernels.rms_norm import rms_norm_reference


def rotate_half_split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split (NeoX) RoPE: rotate the pairs (i, i + D/2) of x [..., D] by cos and sin [..., D/2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def kv_append_reference(
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
    q_out: torch.Tensor,
) -> None:
    """See `moss_kernels.kv_append`."""
    null_page, kv_heads, page_size, head_dim = key_pages.shape[0] - 1, *key_pages.shape[1:]
    rows = row_map.long()
    position = torch.where(active, positions[rows], 0).long()
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((query_heads, kv_heads, kv_heads), 1)
    cos, sin = cos_sin[position][:, None].chunk(2, -1)
    q = rotate_half_split(rms_norm_reference(q, q_norm, eps), cos, sin).flatten(1)
    k = rotate_half_split(rms_norm_reference(k, k_norm, eps), cos, sin)
    q_out.copy_(torch.where(active[:, None], q, q_out))
    # An inactive row puts back what the null page holds.
    page = torch.where(active, page_table[rows, position // page_size], null_page).long()
    place = position % page_size
    for pages, new in ((key_pages, k), (value_pages, v)):
        pages[page, :, place] = torch.where(active[:, None, None], new, pages[page, :, place])

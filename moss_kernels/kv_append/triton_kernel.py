"""`kv_append` in Triton: one program per (key head, row), with the query heads that share the key head."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moss_kernels._launch import dependent_launch

WARPS = 1


@triton.jit
def kv_append_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    cos_sin_ptr,
    key_ptr,
    value_ptr,
    page_table_ptr,
    positions_ptr,
    row_map_ptr,
    active_ptr,
    q_out_ptr,
    table_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    kv_head = tl.program_id(0)
    batch_row = tl.program_id(1).to(tl.int64)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(row_map_ptr + batch_row).to(tl.int64)
    active = tl.load(active_ptr + batch_row) != 0
    position = tl.load(positions_ptr + row, mask=active, other=0)
    page = tl.load(page_table_ptr + row * table_pages + position // PAGE_SIZE, mask=active, other=0).to(tl.int64)

    # Heads of the tile: the group's queries, then the key; the other half of each head is a tile of its own.
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head <= GROUP) & (pair < HALF) & active
    qkv_ptr += batch_row * (KV_HEADS * (GROUP + 2) * HEAD_DIM)
    cos_sin_ptr += position.to(tl.int64) * HEAD_DIM
    norms = (q_norm_ptr, k_norm_ptr, eps)
    low, high = rotated_heads(qkv_ptr, norms, cos_sin_ptr, kv_head, head, pair, inside, KV_HEADS, GROUP, HEAD_DIM)
    dim = tl.arange(0, 2 * BLOCK_HALF)
    value_column = (KV_HEADS * (GROUP + 1) + kv_head) * HEAD_DIM + dim
    value = tl.load(qkv_ptr + value_column, mask=(dim < HEAD_DIM) & active, other=0.0)

    q_ptrs = q_out_ptr + batch_row * (KV_HEADS * GROUP * HEAD_DIM) + (kv_head * GROUP + head) * HEAD_DIM + pair
    is_query = inside & (head < GROUP)
    tl.store(q_ptrs, low, mask=is_query)
    tl.store(q_ptrs + HALF, high, mask=is_query)
    place = ((page * KV_HEADS + kv_head) * PAGE_SIZE + position % PAGE_SIZE) * HEAD_DIM
    key_ptrs = key_ptr + place + pair + tl.zeros_like(head)
    is_key = inside & (head == GROUP)
    tl.store(key_ptrs, low, mask=is_key)
    tl.store(key_ptrs + HALF, high, mask=is_key)
    tl.store(value_ptr + place + dim, value, mask=(dim < HEAD_DIM) & active)


@triton.jit
def rotated_heads(
    qkv_ptr,
    norms,
    cos_sin_ptr,
    kv_head,
    head,
    pair,
    inside,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Both halves [heads, pairs] of the normalised and rotated queries of a key head, and of its key (head GROUP).

    `qkv_ptr` and `cos_sin_ptr` are those of the row and its position, `norms` the weights of both norms and eps; `head`
    is [heads, 1] and `pair` [1, pairs].
    """
    q_norm_ptr, k_norm_ptr, eps = norms
    HALF: tl.constexpr = HEAD_DIM // 2
    is_query = head < GROUP
    pair_inside = pair < HALF
    column = tl.where(is_query, kv_head * GROUP + head, KV_HEADS * GROUP + kv_head) * HEAD_DIM + pair
    low = tl.load(qkv_ptr + column, mask=inside, other=0.0)
    high = tl.load(qkv_ptr + column + HALF, mask=inside, other=0.0)
    cos = tl.load(cos_sin_ptr + pair, mask=pair_inside, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + HALF + pair, mask=pair_inside, other=0.0).to(tl.float32)
    norm_low = _norm_weight(q_norm_ptr, k_norm_ptr, pair, is_query, pair_inside)
    norm_high = _norm_weight(q_norm_ptr + HALF, k_norm_ptr + HALF, pair, is_query, pair_inside)

    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)
    scale = tl.math.rsqrt(squares / HEAD_DIM + eps)[:, None]
    # Rounded where the eager norm rounds.
    wide_low = ((wide_low * scale).to(low.dtype).to(tl.float32) * norm_low).to(low.dtype).to(tl.float32)
    wide_high = ((wide_high * scale).to(low.dtype).to(tl.float32) * norm_high).to(low.dtype).to(tl.float32)
    rotated_low = (wide_low * cos - wide_high * sin).to(low.dtype)
    rotated_high = (wide_high * cos + wide_low * sin).to(low.dtype)
    return rotated_low, rotated_high


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, pair, is_query, inside):
    q_norm = tl.load(q_norm_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    k_norm = tl.load(k_norm_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, q_norm, k_norm)


def kv_append_triton(
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
    """Triton implementation of `moss_kernels.kv_append`, which documents and checks the arguments."""
    batch = qkv.shape[0]
    if batch == 0:
        return
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    group = q_out.shape[1] // (kv_heads * head_dim)
    dependent = dependent_launch(qkv.device)
    kv_append_kernel[(kv_heads, batch)](
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        key_pages,
        value_pages,
        page_table,
        positions,
        row_map,
        active,
        q_out,
        page_table.shape[1],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=triton.next_power_of_2(group + 1),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        DEPENDENT=dependent,
        num_warps=WARPS,
        launch_pdl=dependent,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype in ("bf16", "fp32"):
        tensors = ("qkv", "q_norm", "k_norm", "cos_sin", "key", "value", "q_out")
        signature = {f"{name}_ptr": f"*{dtype}" for name in tensors}
        signature |= {f"{name}_ptr": "*i32" for name in ("page_table", "positions", "row_map")}
        signature |= {"active_ptr": "*i1", "eps": "fp32", "table_pages": "i32"}
        constexprs = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE_SIZE": 64, "BLOCK_HEADS": 8, "BLOCK_HALF": 64}
        constexprs["DEPENDENT"] = True
        signature = {name: signature.get(name, "constexpr") for name in kv_append_kernel.arg_names}
        specs.append((kv_append_kernel, signature, constexprs, {"num_warps": WARPS, "launch_pdl": True}))
    return specs

"""`local_rope_attention` in Triton: one program per (batch row, head)."""

import torch
import triton
import triton.language as tl

NUM_WARPS = 1
# One compiled kernel serves all positions.
_NOT_SPECIALIZED = ("position",)


@triton.jit
def _attend(
    q,
    k,
    v,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    row,
    head,
    position,
    positions,
    scale,
    heads,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    POSITIONS_PADDED: tl.constexpr,
):
    # Stores k and v at `position` and attends; the new position comes from registers, not from the cache.
    dims = tl.arange(0, DIM_PADDED)
    inside = dims < HEAD_DIM
    base = (row * positions * heads + head) * HEAD_DIM
    tl.store(k_cache_ptr + base + position * heads * HEAD_DIM + dims, k, mask=inside)
    tl.store(v_cache_ptr + base + position * heads * HEAD_DIM + dims, v, mask=inside)
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)

    index = tl.arange(0, POSITIONS_PADDED)
    tile = base + index[:, None] * heads * HEAD_DIM + dims[None, :]
    earlier = (index < position)[:, None] & inside[None, :]
    keys = tl.load(k_cache_ptr + tile, mask=earlier, other=0.0).to(tl.float32)
    values = tl.load(v_cache_ptr + tile, mask=earlier, other=0.0).to(tl.float32)

    scores = tl.where(index < position, tl.sum(keys * q[None, :], 1), tl.sum(q * k, 0)) * scale
    scores = tl.where(index <= position, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))
    own = tl.sum(tl.where(index == position, weights, 0.0), 0)
    total = tl.sum(weights, 0)
    result = (tl.sum(weights[:, None] * values, 0) + own * v) / total
    tl.store(out_ptr + (row * heads + head) * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_pairs(ptr, inside):
    pairs = 2 * tl.arange(0, inside.shape[0])
    even = tl.load(ptr + pairs, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(ptr + pairs + 1, mask=inside, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _load_rotated(ptr, cos, sin, inside):
    even, odd = _load_pairs(ptr, inside)
    return tl.interleave(even * cos - odd * sin, odd * cos + even * sin).to(ptr.dtype.element_ty)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def local_rope_attention_kernel(
    qkv_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    position,
    positions,
    scale,
    heads,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    POSITIONS_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    half = tl.arange(0, DIM_PADDED // 2)
    inside = half < HEAD_DIM // 2
    table = position.to(tl.int64) * (HEAD_DIM // 2) + half
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    width = heads * HEAD_DIM
    q_ptr = qkv_ptr + row * 3 * width + head * HEAD_DIM
    q = _load_rotated(q_ptr, cos, sin, inside)
    k = _load_rotated(q_ptr + width, cos, sin, inside)
    dims = tl.arange(0, DIM_PADDED)
    v = tl.load(q_ptr + 2 * width + dims, mask=dims < HEAD_DIM, other=0.0)
    _attend(
        q,
        k,
        v,
        k_cache_ptr,
        v_cache_ptr,
        out_ptr,
        row,
        head,
        position,
        positions,
        scale,
        heads,
        HEAD_DIM,
        DIM_PADDED,
        POSITIONS_PADDED,
    )


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def local_rope_attention_lookup_kernel(
    codes_ptr,
    table_ptr,
    embeddings_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    residual_ptr,
    codes_stride,
    vocab,
    position,
    positions,
    scale,
    heads,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    POSITIONS_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, DIM_PADDED)
    inside = dims < HEAD_DIM
    width = heads * HEAD_DIM
    own = row * width + head * HEAD_DIM + dims
    code = tl.load(codes_ptr + row * codes_stride)
    if (code >= 0) & (code < vocab):
        entry = (position.to(tl.int64) - 1) * vocab + code
        embedding = tl.load(embeddings_ptr + entry * width + head * HEAD_DIM + dims, mask=inside, other=0.0)
        tl.store(residual_ptr + own, embedding, mask=inside)
        q_ptr = table_ptr + entry * 3 * width + head * HEAD_DIM + dims
        q = tl.load(q_ptr, mask=inside, other=0.0)
        k = tl.load(q_ptr + width, mask=inside, other=0.0)
        v = tl.load(q_ptr + 2 * width, mask=inside, other=0.0)
        _attend(
            q,
            k,
            v,
            k_cache_ptr,
            v_cache_ptr,
            out_ptr,
            row,
            head,
            position,
            positions,
            scale,
            heads,
            HEAD_DIM,
            DIM_PADDED,
            POSITIONS_PADDED,
        )
    else:
        zeros = tl.zeros((DIM_PADDED,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + own, zeros, mask=inside)
        tl.store(residual_ptr + own, zeros, mask=inside)


def _shape_arguments(k_cache: torch.Tensor, position: int) -> dict[str, object]:
    positions, heads, head_dim = k_cache.shape[1:]
    return {
        "position": position,
        "positions": positions,
        "scale": head_dim**-0.5,
        "heads": heads,
        "HEAD_DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "POSITIONS_PADDED": triton.next_power_of_2(positions),
        "num_warps": NUM_WARPS,
    }


def local_rope_attention_triton(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.local_rope_attention`, which documents and checks the arguments."""
    batch, _, heads, _ = k_cache.shape
    if batch == 0:
        return
    local_rope_attention_kernel[(batch, heads)](
        qkv, k_cache, v_cache, cos, sin, out, **_shape_arguments(k_cache, position)
    )


def local_rope_attention_lookup_triton(
    codes: torch.Tensor,
    table: torch.Tensor,
    audio_embeddings: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    out: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.local_rope_attention_lookup`, which documents and checks the arguments."""
    batch, _, heads, _ = k_cache.shape
    if batch == 0:
        return
    local_rope_attention_lookup_kernel[(batch, heads)](
        codes,
        table,
        audio_embeddings,
        k_cache,
        v_cache,
        out,
        residual,
        codes.stride(0),
        table.shape[1],
        **_shape_arguments(k_cache, position),
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    kernels = {
        local_rope_attention_kernel: ("qkv_ptr", "k_cache_ptr", "v_cache_ptr", "cos_ptr", "sin_ptr", "out_ptr"),
        local_rope_attention_lookup_kernel: (
            "table_ptr",
            "embeddings_ptr",
            "k_cache_ptr",
            "v_cache_ptr",
            "out_ptr",
            "residual_ptr",
        ),
    }
    specs = []
    for kernel, pointers in kernels.items():
        for dtype, head_dim, dim_padded, positions in (
            ("bf16", 80, 128, 16),
            ("fp16", 128, 128, 16),
            ("fp32", 16, 16, 32),
        ):
            signature = dict.fromkeys(pointers, f"*{dtype}")
            if "table_ptr" in signature:
                signature = {"codes_ptr": "*i64"} | signature | {"codes_stride": "i32", "vocab": "i32"}
            signature |= {"position": "i32", "positions": "i32", "scale": "fp32", "heads": "i32"}
            constexprs = {"HEAD_DIM": head_dim, "DIM_PADDED": dim_padded, "POSITIONS_PADDED": positions}
            signature |= dict.fromkeys(constexprs, "constexpr")
            specs.append((kernel, signature, constexprs, {"num_warps": NUM_WARPS}))
    return specs

"""What surrounds a product in kernels of its own: LayerNorm before it, GELU or layer scale and residual after it."""

import torch
import triton
import triton.language as tl

from moss_kernels._launch import dependent_launch

from .epilogue import gelu
from .reference import NORM_EPS

EPS = tl.constexpr(NORM_EPS)
# Warps of a program, which take rows in turn; weight and bias come from L2 once for all, and from L1 after that.
NORM_ROWS = 4
# So many rows of 768 values are under way at once on the 132 multiprocessors of an H200, 8 programs on each. Of more a
# warp takes two: fewer programs begin, and both are loaded at once.
NORM_WAVE = 132 * 8 * NORM_ROWS
# Columns at a time: 16 bytes of bfloat16 for each thread of a warp.
NORM_BLOCK = 256
# The same of a row with partial sums, which are more to load: warps, and columns at a time, 8 bytes of the stream.
ADDING_WARPS, ADDING_BLOCK = 4, 512
EPILOGUE_BLOCK = 2048
EPILOGUE_WARPS = 4


@triton.jit
def _load(ptr, offset, inside, start: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from `start` on of BLOCK_M rows of K; bfloat16 in words of two, which fewer instructions widen."""
    word: tl.constexpr = 2 if ptr.dtype.element_ty == tl.bfloat16 and K % 2 == 0 else 1
    if word == 2:
        ptr = ptr.to(tl.pointer_type(tl.int32))
    # In the shape of all rows also where they have the same: each thread then loads what it needs.
    column = tl.broadcast_to(tl.arange(0, BLOCK_K // word)[None, :], (BLOCK_M, BLOCK_K // word))
    inside = inside & (column < (K - start) // word)
    return tl.load(ptr + offset // word + start // word + column, mask=inside, other=0)


@triton.jit
def _widen(part):
    if part.dtype == tl.int32:
        low = (part << 16).to(tl.float32, bitcast=True)
        high = (part & -65536).to(tl.float32, bitcast=True)
        wide = tl.join(low, high).reshape(part.shape[0], 2 * part.shape[1])
    else:
        wide = part.to(tl.float32)
    return wide


@triton.jit
def _norm(x, weight, bias, out_ptr, row, m, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Norm of rows that have been loaded, one a warp."""
    column = tl.arange(0, BLOCK_K)[None, :]
    total = _widen(x[0])
    for part in tl.static_range(1, len(x)):
        total += _widen(x[part])
    mean = (tl.sum(total, 1) / K)[:, None]
    squares = tl.zeros_like(total)
    for part in tl.static_range(len(x)):
        distance = tl.where(column < K - part * BLOCK_K, _widen(x[part]) - mean, 0.0)
        squares += distance * distance
    factor = tl.math.rsqrt(tl.sum(squares, 1) / K + EPS)[:, None]
    for part in tl.static_range(len(x)):
        y = (_widen(x[part]) - mean) * factor * _widen(weight[part]) + _widen(bias[part])
        inside = (row < m) & (column < K - part * BLOCK_K)
        tl.store(out_ptr + row * K + part * BLOCK_K + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add(x, sums, scale, x_ptr, row, m, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Adds partial sums, one slice behind the other, to rows of the stream that have been loaded, and stores them."""
    column = tl.arange(0, BLOCK_K)[None, :]
    stream = ()
    for part in tl.static_range(len(x)):
        total = sums[part]
        for index in tl.static_range(part + len(x), len(sums), len(x)):
            total += sums[index]
        y = (_widen(x[part]) + _widen(scale[part]) * total).to(x_ptr.dtype.element_ty)
        inside = (row < m) & (column < K - part * BLOCK_K)
        tl.store(x_ptr + row * K + part * BLOCK_K + column, y, mask=inside)
        stream += (y,)
    return stream


@triton.jit(do_not_specialize=["m"])
def layer_norm_kernel(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    partials_ptr,
    scale_ptr,
    out_ptr,
    m,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A warp has a row in each round, so that sums stay in it; with partial sums all warps have one.
    first = tl.program_id(0).to(tl.int64) * (ROUNDS * BLOCK_M) + tl.arange(0, BLOCK_M)[:, None]
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    x, weight, bias, scale = (), (), (), ()
    for start in tl.static_range(0, K, BLOCK_K):
        weight += (_load(norm_weight_ptr, 0, True, start, K, BLOCK_M, BLOCK_K),)
        bias += (_load(norm_bias_ptr, 0, True, start, K, BLOCK_M, BLOCK_K),)
        if SPLITS > 0:
            scale += (_load(scale_ptr, 0, True, start, K, BLOCK_M, BLOCK_K),)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    # All rows are on their way before the first is used.
    for part in tl.static_range(ROUNDS * len(weight)):
        row = first + part // len(weight) * BLOCK_M
        x += (_load(x_ptr, row * K, row < m, part % len(weight) * BLOCK_K, K, BLOCK_M, BLOCK_K),)
    if SPLITS > 0:
        sums = ()
        for index in tl.static_range(SPLITS * len(weight)):
            row = (index // len(weight) * m.to(tl.int64) + first) * K
            sums += (_load(partials_ptr, row, first < m, index % len(weight) * BLOCK_K, K, BLOCK_M, BLOCK_K),)
        if DEPENDENT:
            # Only because no load crosses it: else the compiler loads and adds one slice after the other.
            tl.extra.cuda.gdc_launch_dependents()
        x = _add(x, sums, scale, x_ptr, first, m, K, BLOCK_K)
    for turn in tl.static_range(ROUNDS):
        own = x[turn * len(weight) : (turn + 1) * len(weight)]
        _norm(own, weight, bias, out_ptr, first + turn * BLOCK_M, m, K, BLOCK_K)


@triton.jit(do_not_specialize=["size"])
def epilogue_kernel(
    product_ptr, scale_ptr, out_ptr, size, n, GELU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    y = tl.load(product_ptr + index, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        y = gelu(y)
    if RESIDUAL:
        scale = tl.load(scale_ptr + index % n, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(out_ptr + index, mask=inside, other=0.0).to(tl.float32) + scale * y
    tl.store(out_ptr + index, y.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """LayerNorm of rows: x [M, K] floating -> out [M, K] of another or the same dtype.

    Args:
        x: [M, K]. With `partials` `scale` times their sum is added first.
        norm_weight, norm_bias: [K].
        out: [M, K], written.
        partials: [P, M, K] float32, or None.
        scale: [K]; given with `partials`.

    Raises:
        ValueError: An input is not aligned to 4 bytes, as words of two bfloat16 have to be.
    """
    m, k = x.shape
    for name, tensor in (("x", x), ("norm_weight", norm_weight), ("norm_bias", norm_bias), ("partials_scale", scale)):
        if tensor is not None and tensor.data_ptr() % 4:
            raise ValueError(f"`codec_linear`: `{name}` must be aligned to 4 bytes, got address {tensor.data_ptr():#x}")
    dependent = dependent_launch(x.device, default=True)
    rounds, rows, warps, block = 1 if m <= NORM_WAVE else 2, NORM_ROWS, NORM_ROWS, NORM_BLOCK
    if partials is not None:
        rounds, rows, warps, block = 1, 1, ADDING_WARPS, ADDING_BLOCK
    layer_norm_kernel[(triton.cdiv(m, rounds * rows),)](
        x,
        norm_weight,
        norm_bias,
        partials,
        scale,
        out,
        m,
        K=k,
        SPLITS=0 if partials is None else partials.shape[0],
        DEPENDENT=dependent,
        ROUNDS=rounds,
        BLOCK_M=rows,
        BLOCK_K=min(block, triton.next_power_of_2(k)),
        num_warps=warps,
        launch_pdl=dependent,
    )


def finish_product(product: torch.Tensor, gelu: bool, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """GELU of `product` [M, N] into `out`; or `scale` times it added to `out`."""
    m, n = product.shape
    epilogue_kernel[(triton.cdiv(m * n, EPILOGUE_BLOCK),)](
        product,
        scale,
        out,
        m * n,
        n,
        GELU=gelu,
        RESIDUAL=scale is not None,
        BLOCK=EPILOGUE_BLOCK,
        num_warps=EPILOGUE_WARPS,
    )

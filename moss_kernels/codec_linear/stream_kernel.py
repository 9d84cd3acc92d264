"""`codec_linear` for few rows, where the time is that of streaming the weights: LayerNorm is part of the kernel.

The warps of a program share K, not the tile: each multiplies its own slice of every step, and the slices are summed at
the end. So the chains of dependent tensor-core operations are short, and no warp repeats the work of another.
"""

import torch
import triton
import triton.language as tl

from moss_kernels._launch import dependent_launch

from . import prefetch
from .epilogue import finish_tile
from .prefetch import prefetch_weights
from .reference import NORM_EPS
from .tiles import Tile

EPS = tl.constexpr(NORM_EPS)


@triton.jit(do_not_specialize=["m"])
def codec_linear_stream_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    norm_sums_ptr,
    scale_ptr,
    out_ptr,
    m,
    n,
    k,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PREFETCH: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    first_row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M
    first_column = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    row_inside = (row < m - first_row)[None, :, None]
    column_inside = column < n - first_column
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            prefetch_weights(weight_ptr, n, k)
        tl.extra.cuda.gdc_wait()

    x_ptrs = x_ptr + first_row * k + row[None, :, None] * k + inner[:, None, :]
    weight_ptrs = weight_ptr + first_column * k + column[None, None, :] * k + inner[:, :, None]
    product = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
    # Sums of a row over the 16 bytes that one thread loads; threads are summed once, after the loop.
    OWN: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    total = tl.zeros((SLICES, BLOCK_M, BLOCK_K // OWN), tl.float32)
    squares = tl.zeros((SLICES, BLOCK_M, BLOCK_K // OWN), tl.float32)
    for start in range(0, k, SLICES * BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=row_inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=column_inside[None, None, :], other=0.0)
        else:
            inside = inner < k - start
            x = tl.load(x_ptrs + start, mask=row_inside & inside[:, None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=column_inside[None, None, :] & inside[:, :, None], other=0.0)
        if NORM:
            x = x.to(tl.float32)
            parts = tl.reshape(x, (SLICES, BLOCK_M, BLOCK_K // OWN, OWN))
            total += tl.sum(parts, 3)
            squares += tl.sum(parts * parts, 3)
            norm_weight = tl.load(norm_weight_ptr + start + inner, mask=inner < k - start, other=0.0)
            x *= norm_weight.to(tl.float32)[:, None, :]
        product = tl.dot(x.to(weight.dtype), weight, product, input_precision="ieee")

    product = tl.sum(product, 0)
    if NORM:
        columns = first_column + column
        mean = tl.sum(tl.sum(total, 2), 0) / k
        variance = tl.sum(tl.sum(squares, 2), 0) / k - mean * mean
        deviation = tl.sqrt(tl.maximum(variance, 0.0) + EPS)
        weight_sum = tl.load(norm_sums_ptr + columns, mask=column_inside, other=0.0)
        bias_sum = tl.load(norm_sums_ptr + n + columns, mask=column_inside, other=0.0)
        product = (product - mean[:, None] * weight_sum[None, :]) / deviation[:, None] + bias_sum[None, :]
    finish_tile(
        product, first_row + row, first_column, scale_ptr, out_ptr, m, n, GELU, RESIDUAL, BLOCK_M, BLOCK_N, BLOCK_N
    )


def codec_linear_stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """All of `codec_linear`; a warp takes `tile.block_k` of each step over K."""
    (m, k), n = x.shape, weight.shape[0]
    dependent = dependent_launch(x.device, default=True)
    codec_linear_stream_kernel[(tile.count(m, n),)](
        x,
        weight,
        norm_weight,
        norm_sums,
        scale,
        out,
        m,
        n,
        k,
        NORM=norm_weight is not None,
        GELU=gelu,
        RESIDUAL=scale is not None,
        EVEN_K=k % (tile.warps * tile.block_k) == 0,
        DEPENDENT=dependent,
        PREFETCH=prefetch.enabled,
        SLICES=tile.warps,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=dependent,
    )

"""`codec_linear` with one program per tile of the output; LayerNorm may be part of it."""

import torch
import triton
import triton.language as tl

from moss_kernels.ring_attention.triton_kernel import supports_dependent_launch

from .epilogue import finish_tile
from .reference import NORM_EPS
from .tiles import Tile

EPS = tl.constexpr(NORM_EPS)
# Columns of a tile that the epilogue holds at once.
PART = 64
# Larger tiles belong to products that wait for the tensor cores, not for the weights.
PREFETCH_ROWS = 64


@triton.jit
def _prefetch(ptr, rows, k, BLOCK_ROWS: tl.constexpr):
    # Asks for the 128-byte lines of bf16 rows [BLOCK_ROWS, k] to be brought into L2.
    row = tl.minimum(tl.arange(0, BLOCK_ROWS), rows - 1)
    for start in range(0, k, 1024):
        element = tl.minimum(start + 64 * tl.arange(0, 16), k - 1)
        address = (ptr + row[:, None] * k + element[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["m"])
def codec_linear_kernel(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
):
    # Columns vary fastest: the weights fit in L2, so that the rows are read from memory once.
    tiles_n = tl.cdiv(n, BLOCK_N)
    first_row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M
    first_column = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_inside = row < m - first_row
    column_inside = column < n - first_column
    weight_ptr += first_column * k
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            _prefetch(weight_ptr, n - first_column, k, BLOCK_N)
        tl.extra.cuda.gdc_wait()

    x_ptrs = x_ptr + first_row * k + row[:, None] * k + inner[None, :]
    weight_ptrs = weight_ptr + column[None, :] * k + inner[:, None]
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=row_inside[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=column_inside[None, :], other=0.0)
        else:
            inside = inner < k - start
            x = tl.load(x_ptrs + start, mask=row_inside[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=column_inside[None, :] & inside[:, None], other=0.0)
        if NORM:
            x = x.to(tl.float32)
            total += tl.sum(x, 1)
            squares += tl.sum(x * x, 1)
            x *= tl.load(norm_weight_ptr + start + inner, mask=inner < k - start, other=0.0).to(tl.float32)[None, :]
        product = tl.dot(x.to(weight.dtype), weight, product, input_precision="ieee")

    columns = first_column + column
    if NORM:
        mean = total / k
        deviation = tl.sqrt(tl.maximum(squares / k - mean * mean, 0.0) + EPS)
        weight_sum = tl.load(norm_sums_ptr + columns, mask=column_inside, other=0.0)
        bias_sum = tl.load(norm_sums_ptr + n + columns, mask=column_inside, other=0.0)
        product = (product - mean[:, None] * weight_sum[None, :]) / deviation[:, None] + bias_sum[None, :]
    finish_tile(
        product, first_row + row, first_column, scale_ptr, out_ptr, m, n, GELU, RESIDUAL, BLOCK_M, BLOCK_N, PART
    )


def codec_linear_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """`codec_linear` without scratch: x [M, K] float32 or bfloat16."""
    (m, k), n = x.shape, weight.shape[0]
    dependent = supports_dependent_launch(x.device)
    codec_linear_kernel[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)](
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
        EVEN_K=k % tile.block_k == 0,
        DEPENDENT=dependent,
        PREFETCH=tile.block_m <= PREFETCH_ROWS,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PART=min(PART, tile.block_n),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=dependent,
    )

"""`codec_linear` for more rows, where the time is that of the tensor cores: one program per tile, LayerNorm outside."""

import torch
import triton
import triton.language as tl

from moss_kernels._launch import dependent_launch

from . import prefetch
from .epilogue import finish_tile
from .prefetch import prefetch_weights
from .tiles import Tile

# Columns of a tile that the epilogue holds at once.
PART = 64


@triton.jit(do_not_specialize=["m"])
def codec_linear_tile_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    m,
    n,
    k,
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
    row_inside = (row < m - first_row)[:, None]
    column_inside = (column < n - first_column)[None, :]
    x_ptrs = x_ptr + first_row * k + row[:, None] * k + inner[None, :]
    weight_ptrs = weight_ptr + first_column * k + column[None, :] * k + inner[:, None]
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            prefetch_weights(weight_ptr, n, k)
        tl.extra.cuda.gdc_wait()
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=row_inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=column_inside, other=0.0)
        else:
            inside = inner < k - start
            x = tl.load(x_ptrs + start, mask=row_inside & inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=column_inside & inside[:, None], other=0.0)
        product = tl.dot(x.to(weight.dtype), weight, product, input_precision="ieee")
    finish_tile(
        product, first_row + row, first_column, scale_ptr, out_ptr, m, n, GELU, RESIDUAL, BLOCK_M, BLOCK_N, PART
    )


def codec_linear_tiles(
    x: torch.Tensor, weight: torch.Tensor, gelu: bool, scale: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> None:
    """The part of `codec_linear` after the norm; x [M, K] float32 or bfloat16."""
    (m, k), n = x.shape, weight.shape[0]
    dependent = dependent_launch(x.device, default=True)
    codec_linear_tile_kernel[(tile.count(m, n),)](
        x,
        weight,
        scale,
        out,
        m,
        n,
        k,
        GELU=gelu,
        RESIDUAL=scale is not None,
        EVEN_K=k % tile.block_k == 0,
        DEPENDENT=dependent,
        PREFETCH=prefetch.enabled,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PART=min(PART, tile.block_n),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=dependent,
    )

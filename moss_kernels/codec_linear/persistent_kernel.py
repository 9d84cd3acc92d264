"""`codec_linear` for many rows: programs that stay on their multiprocessor and load tiles with the copy engine (TMA).

The loads of a program's next tile run while it stores the one before. LayerNorm is not part of it.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moss_kernels._launch import dependent_launch

from . import prefetch
from .epilogue import finish_tile
from .prefetch import prefetch_weights
from .tiles import Tile

# Columns of a tile that the epilogue holds at once.
PART = 32


@triton.jit(do_not_specialize=["m"])
def codec_linear_persistent_kernel(
    x_desc,
    weight_desc,
    weight_ptr,
    scale_ptr,
    out_ptr,
    m,
    n,
    k,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            prefetch_weights(weight_ptr, n, k)
        tl.extra.cuda.gdc_wait()
    # Columns vary fastest: the weights fit in L2, so that the rows are read from memory once.
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first_row = (tile // tiles_n) * BLOCK_M
        first_column = (tile % tiles_n) * BLOCK_N
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            x = x_desc.load([first_row, start])
            weight = weight_desc.load([first_column, start])
            product = tl.dot(x, weight.T, product, input_precision="ieee")
        row = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        finish_tile(
            product, row, first_column.to(tl.int64), scale_ptr, out_ptr, m, n, GELU, RESIDUAL, BLOCK_M, BLOCK_N, PART
        )


def codec_linear_persistent(
    x: torch.Tensor, weight: torch.Tensor, gelu: bool, scale: torch.Tensor | None, out: torch.Tensor, tile: Tile
) -> None:
    """The part of `codec_linear` after the norm; x [M, K] has the dtype of `weight`."""
    (m, k), n = x.shape, weight.shape[0]
    # The interpreter has no multiprocessors.
    places = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    dependent = dependent_launch(x.device, default=True)
    codec_linear_persistent_kernel[(min(tile.count(m, n), tile.resident * places),)](
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        weight,
        scale,
        out,
        m,
        n,
        k,
        GELU=gelu,
        RESIDUAL=scale is not None,
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

"""What surrounds a product in kernels of its own: LayerNorm before it, GELU or layer scale and residual after it."""

import torch
import triton
import triton.language as tl

from moss_kernels._launch import dependent_launch

from .epilogue import gelu
from .reference import NORM_EPS

EPS = tl.constexpr(NORM_EPS)
# Up to so many rows a program is one warp, which holds a row in registers: the time is that of one trip to memory.
NORM_SINGLE_ROWS = 4096
NORM_ROWS = 4
NORM_WARPS = 4
# Columns at a time: 16 bytes of bfloat16 for each thread of a warp.
NORM_BLOCK = 256
EPILOGUE_BLOCK = 2048
EPILOGUE_WARPS = 4


@triton.jit(do_not_specialize=["m"])
def layer_norm_kernel(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,
    m,
    K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A warp has a row, so that sums stay in it.
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = (row < m)[:, None]
    column = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * K + column[None, :]
    out_ptrs = out_ptr + row[:, None] * K + column[None, :]
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if BLOCK_K >= K:
        # Volatile, or the compiler moves them behind the sums of the row, where each waits for memory.
        weight = tl.load(norm_weight_ptr + column, mask=column < K, other=0.0, volatile=True)
        bias = tl.load(norm_bias_ptr + column, mask=column < K, other=0.0, volatile=True)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if BLOCK_K >= K:
        inside = row_inside & (column < K)[None, :]
        x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
        distance = tl.where(inside, x - (tl.sum(x, 1) / K)[:, None], 0.0)
        factor = tl.math.rsqrt(tl.sum(distance * distance, 1) / K + EPS)[:, None]
        y = distance * factor * weight.to(tl.float32)[None, :] + bias.to(tl.float32)[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # The row is read three times, from L1 but for the first.
        total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            inside = row_inside & (column < K - start)[None, :]
            total += tl.load(x_ptrs + start, mask=inside, other=0.0).to(tl.float32)
        mean = (tl.sum(total, 1) / K)[:, None]
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            inside = row_inside & (column < K - start)[None, :]
            x = tl.load(x_ptrs + start, mask=inside, other=0.0).to(tl.float32)
            squares += tl.where(inside, (x - mean) * (x - mean), 0.0)
        factor = tl.math.rsqrt(tl.sum(squares, 1) / K + EPS)[:, None]
        for start in tl.static_range(0, K, BLOCK_K):
            inside = row_inside & (column < K - start)[None, :]
            weight = tl.load(norm_weight_ptr + start + column, mask=column < K - start, other=0.0).to(tl.float32)
            bias = tl.load(norm_bias_ptr + start + column, mask=column < K - start, other=0.0).to(tl.float32)
            x = tl.load(x_ptrs + start, mask=inside, other=0.0).to(tl.float32)
            y = (x - mean) * factor * weight[None, :] + bias[None, :]
            tl.store(out_ptrs + start, y.to(out_ptr.dtype.element_ty), mask=inside)


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


def layer_norm(x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, out: torch.Tensor) -> None:
    """LayerNorm of rows: x [M, K] floating -> out [M, K] of another or the same dtype."""
    m, k = x.shape
    dependent = dependent_launch(x.device, default=True)
    rows, block, warps = norm_tile(m, k)
    layer_norm_kernel[(triton.cdiv(m, rows),)](
        x,
        norm_weight,
        norm_bias,
        out,
        m,
        K=k,
        DEPENDENT=dependent,
        BLOCK_M=rows,
        BLOCK_K=block,
        num_warps=warps,
        launch_pdl=dependent,
    )


def norm_tile(m: int, k: int) -> tuple[int, int, int]:
    """Rows and columns that a program takes at once, and its warps."""
    columns = triton.next_power_of_2(k)
    if m <= NORM_SINGLE_ROWS:
        return 1, columns, 1
    return NORM_ROWS, min(NORM_BLOCK, columns), NORM_WARPS


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

"""What surrounds a product in kernels of its own: LayerNorm before it, GELU or layer scale and residual after it."""

import torch
import triton
import triton.language as tl

from moss_kernels._launch import dependent_launch

from .epilogue import gelu
from .reference import NORM_EPS

EPS = tl.constexpr(NORM_EPS)
NORM_ROWS = 4
NORM_WARPS = 4
EPILOGUE_BLOCK = 2048
EPILOGUE_WARPS = 4


@triton.jit(do_not_specialize=["m"])
def layer_norm_kernel(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,
    m,
    k,
    DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    inner_inside = inner < k
    inside = (row < m)[:, None] & inner_inside[None, :]
    norm_weight = tl.load(norm_weight_ptr + inner, mask=inner_inside, other=0.0).to(tl.float32)
    norm_bias = tl.load(norm_bias_ptr + inner, mask=inner_inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row[:, None] * k + inner[None, :], mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, x - (tl.sum(x, 1) / k)[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(centered * centered, 1) / k + EPS)
    y = centered / deviation[:, None] * norm_weight[None, :] + norm_bias[None, :]
    tl.store(out_ptr + row[:, None] * k + inner[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


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
    dependent = dependent_launch(x.device)
    layer_norm_kernel[(triton.cdiv(m, NORM_ROWS),)](
        x,
        norm_weight,
        norm_bias,
        out,
        m,
        k,
        DEPENDENT=dependent,
        BLOCK_M=NORM_ROWS,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=NORM_WARPS,
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

"""What the Triton kernels of `codec_linear` do with a product: GELU, or layer scale and residual, and the store."""

import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """The exact GELU, x * (1 + erf(x / sqrt 2)) / 2, in float32 to 3e-7.

    By formula 7.1.26 of Abramowitz and Stegun, erfc(z) = exp(-z^2) * polynomial in 1 / (1 + 0.3275911 z) for z >= 0:
    half the instructions of a library erf, which would take almost as long as the product in front of it.
    """
    magnitude = tl.abs(x)
    root = tl.math.rsqrt(1.0 + 0.23164189 * magnitude)
    t = root * root
    polynomial = t * (0.12741479 + t * (-0.14224838 + t * (0.71070688 + t * (-0.72657601 + t * 0.53070271))))
    tail = polynomial * tl.exp2(-0.72134752 * x * x)
    return tl.maximum(x, 0.0) - magnitude * tail


@triton.jit
def finish_tile(
    product,
    row,
    first_column,
    scale_ptr,
    out_ptr,
    m,
    n,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    """Stores a product [ROWS, COLUMNS] at rows `row` [ROWS] int64 and columns from `first_column` int64 on.

    Halves it until PART columns remain: what the epilogue needs beside the product then fits in registers.
    """
    if COLUMNS > PART:
        halves = tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        half: tl.constexpr = COLUMNS // 2
        finish_tile(left, row, first_column, scale_ptr, out_ptr, m, n, GELU, RESIDUAL, ROWS, half, PART)
        finish_tile(right, row, first_column + half, scale_ptr, out_ptr, m, n, GELU, RESIDUAL, ROWS, half, PART)
    else:
        column = first_column + tl.arange(0, COLUMNS)
        column_inside = column < n
        inside = (row < m)[:, None] & column_inside[None, :]
        out_ptrs = out_ptr + row[:, None] * n + column[None, :]
        if GELU:
            product = gelu(product)
        if RESIDUAL:
            scale = tl.load(scale_ptr + column, mask=column_inside, other=0.0).to(tl.float32)
            product = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32) + scale[None, :] * product
        tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=inside)

"""`codec_linear` in Triton: one program per tile of the output, or a library product between two small kernels."""

import torch
import triton
import triton.language as tl

from moss_kernels.ring_attention.triton_kernel import supports_dependent_launch

from .reference import NORM_EPS
from .tiles import Tile, candidates, tile_for

EPS = tl.constexpr(NORM_EPS)
NORM_ROWS = 4
NORM_WARPS = 4
EPILOGUE_BLOCK = 2048
EPILOGUE_WARPS = 4
# Larger tiles belong to products that wait for the tensor cores, not for the weights.
PREFETCH_ROWS = 64


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


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
    if GELU:
        product = _gelu(product)
    out_ptrs = out_ptr + (first_row + row)[:, None] * n + columns[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if RESIDUAL:
        scale = tl.load(scale_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)
        product = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32) + scale[None, :] * product
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=inside)


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
        y = _gelu(y)
    if RESIDUAL:
        scale = tl.load(scale_ptr + index % n, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(out_ptr + index, mask=inside, other=0.0).to(tl.float32) + scale * y
    tl.store(out_ptr + index, y.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm_triton(x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, out: torch.Tensor) -> None:
    """LayerNorm of rows: x [M, K] floating -> out [M, K] of another or the same dtype."""
    m, k = x.shape
    dependent = supports_dependent_launch(x.device)
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


def codec_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Triton implementation of `moss_kernels.codec_linear`, which documents and checks the arguments.

    `tile` overrides the table, for measurements.
    """
    m, k = x.shape
    n = weight.shape[0]
    if m == 0:
        return
    tile = tile or tile_for(m, n, weight.dtype)
    if norm_weight is not None and not tile.norm_inside:
        normed = scratch[: m * k].view(m, k)
        layer_norm_triton(x, norm_weight, norm_bias, normed)
        x, norm_weight, norm_sums = normed, None, None
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
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=dependent,
    )


def codec_linear_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The same through the library's product (cuBLAS) with a kernel before it and one after it."""
    (m, k), n = x.shape, weight.shape[0]
    if m == 0:
        return
    if norm_weight is not None:
        normed = scratch[: m * k].view(m, k)
        layer_norm_triton(x, norm_weight, norm_bias, normed)
        x = normed
    elif x.dtype != weight.dtype:
        x = scratch[: m * k].view(m, k).copy_(x)
    product = out if scale is None else scratch[: m * n].view(m, n)
    torch.mm(x, weight.T, out=product)
    if gelu or scale is not None:
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


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use.

    A launch passes sizes at run time, known as multiples of 16; here one size stands for them.
    """
    specs = []

    def add(kernel: triton.JITFunction, pointers: dict[str, str], options: dict, **constexprs: object) -> None:
        kinds = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()} | dict.fromkeys(
            constexprs, "constexpr"
        )
        signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        specs.append((kernel, signature, constexprs, options))

    for dtype, stream in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")):
        names = {"weight": dtype, "norm_weight": dtype, "norm_sums": "fp32", "scale": dtype}
        for tile in candidates(torch.float32 if dtype == "fp32" else torch.bfloat16):
            sizes = {"n": 3072, "k": 1280, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
            flags = {"EVEN_K": True, "DEPENDENT": True, "PREFETCH": tile.block_m <= PREFETCH_ROWS}
            options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
            for norm, gelu, residual in ((tile.norm_inside, True, False), (False, False, True)):
                kinds = {"NORM": norm, "GELU": gelu, "RESIDUAL": residual}
                pointers = {"x": stream if norm else dtype} | names | {"out": stream if residual else dtype}
                add(codec_linear_kernel, pointers, options, **sizes, **kinds, **flags)
        pointers = {"x": stream, "norm_weight": dtype, "norm_bias": dtype, "out": dtype}
        for k, block_k in ((768, 1024), (1280, 2048)):
            sizes = {"k": k, "BLOCK_M": NORM_ROWS, "BLOCK_K": block_k}
            add(layer_norm_kernel, pointers, {"num_warps": NORM_WARPS, "launch_pdl": True}, DEPENDENT=True, **sizes)
        pointers, options = {"product": dtype, "scale": dtype, "out": stream}, {"num_warps": EPILOGUE_WARPS}
        for gelu in (True, False):
            add(epilogue_kernel, pointers, options, n=3072, GELU=gelu, RESIDUAL=not gelu, BLOCK=EPILOGUE_BLOCK)
    return specs

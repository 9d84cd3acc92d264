"""`codec_linear` in Triton: which kernels compute it."""

import torch
import triton

from .arguments import CodecLinearArguments
from .persistent_kernel import PART as PERSISTENT_PART
from .persistent_kernel import codec_linear_persistent, codec_linear_persistent_kernel
from .row_kernels import (
    ADDING_BLOCK,
    ADDING_WARPS,
    EPILOGUE_BLOCK,
    EPILOGUE_WARPS,
    NORM_BLOCK,
    NORM_ROWS,
    epilogue_kernel,
    finish_product,
    layer_norm,
    layer_norm_kernel,
)
from .stream_kernel import codec_linear_stream, codec_linear_stream_kernel
from .tile_kernel import PART, codec_linear_tile_kernel, codec_linear_tiles
from .tiles import ANY_DTYPE, Tile, candidates, partial_tiles, tile_for


def codec_linear_triton(*arguments: object, tile: Tile | None = None) -> None:
    """Triton implementation of `moss_kernels.codec_linear`, for `CodecLinearArguments` without `cos_sin` or slices.

    `tile` overrides the table, for measurements.
    """
    given = CodecLinearArguments(*arguments)
    x, weight, gelu, scale, scratch, out = given.x, given.weight, given.gelu, given.scale, given.scratch, given.out
    norm_weight, norm_bias, norm_sums = given.norm_weight, given.norm_bias, given.norm_sums
    if len(x) == 0:
        return
    m, k = x.shape
    tile = tile or tile_for(m, *weight.shape, weight.dtype)
    if norm_weight is not None and (given.partials is not None or tile.kind != "stream"):
        inputs = scratch[: m * k].view(m, k)
        layer_norm(x, norm_weight, norm_bias, inputs, given.partials, given.partials_scale)
        x, norm_weight, norm_bias, norm_sums = inputs, None, None, None
    # Neither cuBLAS nor the copy engine converts: a float32 stream into bfloat16 weights goes tile by tile.
    if tile.kind == "library" and (x.dtype != weight.dtype or (scale is None and out.dtype != weight.dtype)):
        tile = ANY_DTYPE
    if tile.kind == "library":
        codec_linear_library(x, weight, norm_weight, norm_bias, norm_sums, gelu, scale, scratch, out)
    elif tile.kind == "stream":
        codec_linear_stream(x, weight, norm_weight, norm_sums, gelu, scale, out, tile)
    elif tile.kind == "persistent" and x.dtype == weight.dtype:
        codec_linear_persistent(x, weight, gelu, scale, out, tile)
    else:
        codec_linear_tiles(x, weight, gelu, scale, out, tile)
    if given.normed is not None:
        layer_norm(out, given.next_norm_weight, given.next_norm_bias, given.normed)


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
        layer_norm(x, norm_weight, norm_bias, normed)
        x = normed
    product = out if scale is None else scratch[: m * n].view(m, n)
    torch.mm(x, weight.T, out=product)
    if gelu or scale is not None:
        finish_product(product, gelu, scale, out)


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use.

    A launch passes sizes at run time, known as multiples of 16; here one size stands for them.
    """
    specs = []

    def add(kernel: triton.JITFunction, arguments: dict[str, str], options: dict, **constexprs: object) -> None:
        kinds = arguments | dict.fromkeys(constexprs, "constexpr")
        signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        specs.append((kernel, signature, constexprs, options))

    for dtype, stream in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")):
        own, residual_stream = f"*{dtype}", f"*{stream}"
        weights = {"weight_ptr": own, "norm_weight_ptr": own, "norm_sums_ptr": "*fp32", "scale_ptr": own}
        for tile in candidates(torch.float32 if dtype == "fp32" else torch.bfloat16):
            sizes = {"n": 3072, "k": 1280, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
            options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
            for gelu in (True, False):
                kinds = {"GELU": gelu, "RESIDUAL": not gelu, "DEPENDENT": True}
                pointers = {"x_ptr": own} | weights | {"out_ptr": own if gelu else residual_stream}
                if tile.kind == "stream":
                    pointers |= {"x_ptr": residual_stream if gelu else own}
                    kinds |= {"NORM": gelu, "EVEN_K": True, "PREFETCH": True, "SLICES": tile.warps}
                    add(codec_linear_stream_kernel, pointers, options, **sizes, **kinds)
                elif tile.kind == "tile":
                    # Without GELU also for the 240 inputs of the encoder's first stage.
                    kinds |= {"EVEN_K": gelu, "PREFETCH": True, "PART": min(PART, tile.block_n)}
                    add(codec_linear_tile_kernel, pointers, options, **sizes, **kinds)
                else:
                    kinds |= {"PREFETCH": True, "PART": min(PERSISTENT_PART, tile.block_n)}
                    pointers |= {"x_desc": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>"}
                    pointers |= {"weight_desc": f"tensordesc<{dtype}[{tile.block_n}, {tile.block_k}]>"}
                    add(codec_linear_persistent_kernel, pointers, options, **sizes, **kinds)
        rows = {"x_ptr": residual_stream, "norm_weight_ptr": own, "norm_bias_ptr": own, "scale_ptr": own}
        rows |= {"partials_ptr": "*fp32", "out_ptr": own}
        for k in (768, 1280):
            options = {"num_warps": NORM_ROWS, "launch_pdl": True}
            kinds = {"K": k, "DEPENDENT": True, "BLOCK_M": NORM_ROWS, "BLOCK_K": NORM_BLOCK}
            for rounds in (1, 2):
                add(layer_norm_kernel, rows, options, SPLITS=0, ROUNDS=rounds, **kinds)
            kinds |= {"ROUNDS": 1, "BLOCK_M": 1, "BLOCK_K": ADDING_BLOCK}
            for slices in sorted({tile.slices for tile in partial_tiles()}):
                add(layer_norm_kernel, rows, options | {"num_warps": ADDING_WARPS}, SPLITS=slices, **kinds)
        product = {"product_ptr": own, "scale_ptr": own, "out_ptr": residual_stream}
        for gelu in (True, False):
            kinds = {"GELU": gelu, "RESIDUAL": not gelu, "BLOCK": EPILOGUE_BLOCK}
            add(epilogue_kernel, product, {"num_warps": EPILOGUE_WARPS}, n=3072, **kinds)
    return specs

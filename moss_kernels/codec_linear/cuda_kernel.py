"""`codec_linear` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch

from .arguments import CodecLinearArguments
from .tiles import (
    HEAD_DIM,
    WIDE_MOST_ROWS,
    CudaTile,
    cuda_tile_for,
    is_wide,
    normed_tile_for,
    partial_tile_for,
    wide_tile,
)

MAX_ROWS = 32
_INPUTS_MULTIPLE = 32


class CodecLinearParams(ctypes.Structure):
    """CodecLinearParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("x_dtype", ctypes.c_int),
        ("out_dtype", ctypes.c_int),
        ("gelu", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("norm_sums", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("next_norm_weight", ctypes.c_void_p),
        ("next_norm_bias", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("moments", ctypes.c_void_p),
        ("dependent_launch", ctypes.c_int32),
        ("tile_rows", ctypes.c_int32),
        ("tile_columns", ctypes.c_int32),
        ("slices", ctypes.c_int32),
        ("partial", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


def takes(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
) -> bool:
    """Whether there is a kernel for these sizes, dtypes and parts."""
    m, (n, k) = x.shape[0], weight.shape
    if out.dim() == 3:
        tile = _tile(x, weight, gelu, scale, out)
        return tile is not None and len(out) == tile.slices
    if cos_sin is not None:
        sizes = m <= WIDE_MOST_ROWS and k % 64 == 0 and 2 * cos_sin.shape[1] == HEAD_DIM
        normed = weight.dtype if norm_weight is not None else x.dtype
        return sizes and normed == weight.dtype == out.dtype == torch.bfloat16
    few = m <= MAX_ROWS and n % 2 == 0 and n > 0 and k % _INPUTS_MULTIPLE == 0 and k > 0
    few &= weight.dtype == torch.bfloat16 and (x.dtype == torch.bfloat16 or norm_weight is not None)
    return few or _tile(x, weight, gelu, scale, out) is not None


def _tile(
    x: torch.Tensor,
    weight: torch.Tensor,
    gelu: bool,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
) -> CudaTile | None:
    if cos_sin is not None:
        return wide_tile(x.shape[0], *weight.shape, rotated=True)
    both = x.dtype == weight.dtype == torch.bfloat16
    table = partial_tile_for if out.dim() == 3 else cuda_tile_for
    tile = table(x.shape[0], *weight.shape) if both else None
    if tile is None or not is_wide(tile):
        return tile
    return tile if out.dtype == torch.bfloat16 and not (gelu and scale is not None) else None


def _normed_tile(x: torch.Tensor, weight: torch.Tensor, gelu: bool, out: torch.Tensor) -> CudaTile | None:
    """The tile of a kernel that leaves the next norm's rows, too, if there is one."""
    fits = x.dtype == weight.dtype == out.dtype == torch.bfloat16 and not gelu
    return normed_tile_for(x.shape[0], *weight.shape) if fits else None


@cache
def _function():
    function = _library.load().moss_codec_linear
    function.argtypes = [ctypes.POINTER(CodecLinearParams)]
    function.restype = ctypes.c_int
    return function


def codec_linear_cuda(*arguments: object) -> None:
    """See `moss_kernels.codec_linear`; for `CodecLinearArguments` that `takes` allows.

    Kernels of tiles leave the norm to one before them, and the next norm to one behind them unless there is one that
    does both.

    With dependent launch the kernel loads weights at its start, and waits for the one before it ahead of everything
    that kernels write.
    """
    given = CodecLinearArguments(*arguments)
    weight, out = given.weight, given.out

    def pointer(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    m, (n, k) = given.x.shape[0], weight.shape
    both = None if given.normed is None else _normed_tile(given.x, weight, given.gelu, out)
    tile = both or _tile(given.x, weight, given.gelu, given.scale, out, given.cos_sin)
    tile_rows, tile_columns, slices = tile or (0, 0, 0)
    if given.norm_weight is not None and (tile or given.partials is not None):
        from .row_kernels import layer_norm

        inputs = given.scratch[: m * k].view(m, k)
        layer_norm(given.x, given.norm_weight, given.norm_bias, inputs, given.partials, given.partials_scale)
        given = given._replace(x=inputs, norm_weight=None, norm_sums=None)
    params = CodecLinearParams(
        struct_size=ctypes.sizeof(CodecLinearParams),
        abi_version=_library.ABI_VERSION,
        rows=m,
        outputs=n,
        inputs=k,
        x_dtype=_library.DTYPE_CODES[given.x.dtype],
        out_dtype=_library.DTYPE_CODES[out.dtype],
        gelu=given.gelu,
        x=given.x.data_ptr(),
        weight=weight.data_ptr(),
        norm_weight=pointer(given.norm_weight),
        norm_sums=pointer(given.norm_sums),
        scale=pointer(given.scale),
        next_norm_weight=pointer(given.next_norm_weight),
        next_norm_bias=pointer(given.next_norm_bias),
        cos_sin=pointer(given.cos_sin),
        out=out.data_ptr(),
        normed=pointer(given.normed) if both else None,
        moments=pointer(given.moments),
        dependent_launch=dependent_launch(out.device, default=True),
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        slices=slices,
        partial=out.dim() == 3,
        stream=torch.cuda.current_stream(out.device).cuda_stream,
    )
    with torch.cuda.device(out.device):
        _library.check_status(_function()(ctypes.byref(params)))
    if given.normed is not None and both is None:
        from .row_kernels import layer_norm

        layer_norm(out, given.next_norm_weight, given.next_norm_bias, given.normed)

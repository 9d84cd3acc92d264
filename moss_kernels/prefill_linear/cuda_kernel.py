"""`prefill_linear` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch
from moss_kernels.backbone_linear import split_count

# LinearMode.
_WHOLE, _GATE_UP, _PARTIAL, _ADD = range(4)
_STEP = 64


class PrefillLinearParams(ctypes.Structure):
    """PrefillLinearParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("mode", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("slices", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("dependent_launch", ctypes.c_int32),
        ("tile_rows", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is a kernel for these sizes and this dtype."""
    n, k = weight.shape
    return x.dtype == torch.bfloat16 and n % 16 == 0 and k % (_STEP * split_count(n, k)) == 0


@cache
def _function():
    function = _library.load().moss_prefill_linear
    function.argtypes = [ctypes.POINTER(PrefillLinearParams)]
    function.restype = ctypes.c_int
    return function


def prefill_linear_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate_up: bool,
    add: bool,
    out: torch.Tensor,
    *,
    columns: int = 0,
    tile_rows: int = 0,
) -> None:
    """See `moss_kernels.prefill_linear`; for what `takes` allows.

    Args:
        x, weight, gate_up, add, out: of the op.
        columns, tile_rows: of a tile that the mode has, all with the same results; 0: the fastest.
    """
    sliced = add or out.dim() == 3
    params = PrefillLinearParams(
        struct_size=ctypes.sizeof(PrefillLinearParams),
        abi_version=_library.ABI_VERSION,
        mode=_GATE_UP if gate_up else _ADD if add else _PARTIAL if sliced else _WHOLE,
        rows=len(x),
        outputs=len(weight),
        inputs=x.shape[1],
        slices=split_count(*weight.shape) if sliced else 1,
        columns=columns,
        tile_rows=tile_rows,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        dependent_launch=dependent_launch(x.device),
        stream=torch.cuda.current_stream(x.device).cuda_stream,
    )
    with torch.cuda.device(x.device):
        _library.check_status(_function()(ctypes.byref(params)))

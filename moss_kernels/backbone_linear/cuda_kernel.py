"""`backbone_linear` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch

# LinearMode.
_WHOLE, _GATE_UP, _PARTIAL = range(3)
_STEP, _MAX_SLICES, MAX_ROWS = 64, 64, 128


class BackboneLinearParams(ctypes.Structure):
    """BackboneLinearParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("mode", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("slices", ctypes.c_int32),
        ("dependent_launch", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


def takes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether there is a kernel for these sizes and this dtype."""
    (n, k), slices = weight.shape, _slices(out)
    fits = len(x) <= MAX_ROWS and slices <= _MAX_SLICES and n % 16 == 0 and k % (_STEP * slices) == 0
    return fits and x.dtype == torch.bfloat16 and min(n, k) > 0


def _slices(out: torch.Tensor) -> int:
    return len(out) if out.dim() == 3 else 1


@cache
def _function():
    function = _library.load().moss_backbone_linear
    function.argtypes = [ctypes.POINTER(BackboneLinearParams)]
    function.restype = ctypes.c_int
    return function


def backbone_linear_cuda(x: torch.Tensor, weight: torch.Tensor, gate_up: bool, out: torch.Tensor) -> None:
    """See `moss_kernels.backbone_linear`; for what `takes` allows."""
    params = BackboneLinearParams(
        struct_size=ctypes.sizeof(BackboneLinearParams),
        abi_version=_library.ABI_VERSION,
        mode=_GATE_UP if gate_up else _PARTIAL if out.dim() == 3 else _WHOLE,
        rows=len(x),
        outputs=len(weight),
        inputs=x.shape[1],
        slices=_slices(out),
        dependent_launch=dependent_launch(x.device, default=True),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        stream=torch.cuda.current_stream(x.device).cuda_stream,
    )
    with torch.cuda.device(x.device):
        _library.check_status(_function()(ctypes.byref(params)))

"""`sample_head` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels.sample_codebook.cuda_kernel import SampleCodebookParams, draw_params

MAX_ROWS = 128
# [V, K]
WEIGHT_SHAPE = (1024, 2560)


class SampleHeadParams(ctypes.Structure):
    """SampleHeadParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("inputs", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("hidden", ctypes.c_void_p),
        ("hidden_row_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("draw", SampleCodebookParams),
    )


def takes(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is a kernel for these sizes."""
    return hidden.shape[0] <= MAX_ROWS and weight.shape == WEIGHT_SHAPE


@cache
def _function():
    function = _library.load().moss_sample_head
    function.argtypes = [ctypes.POINTER(SampleHeadParams)]
    function.restype = ctypes.c_int
    return function


def sample_head_cuda(hidden: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, *draw: object) -> None:
    """See `moss_kernels.sample_head`; for what `takes` allows. 128 blocks make the logits; one for each row draws.

    Where `dependent_launch` says so it starts early: weights are loaded ahead of the wait for the kernel before; what
    else is read there is read again after it.
    """
    params = SampleHeadParams(
        struct_size=ctypes.sizeof(SampleHeadParams),
        abi_version=_library.ABI_VERSION,
        inputs=hidden.shape[1],
        hidden=hidden.data_ptr(),
        hidden_row_stride=hidden.stride(0),
        weight=weight.data_ptr(),
        workspace=workspace.data_ptr(),
        draw=draw_params(weight.shape[0], *draw),
    )
    with torch.cuda.device(hidden.device):
        _library.check_status(_function()(ctypes.byref(params)))

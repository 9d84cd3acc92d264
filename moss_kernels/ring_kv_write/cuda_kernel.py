"""`ring_kv_write` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch


class RingKvWriteParams(ctypes.Structure):
    """RingKvWriteParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("batch", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("dtype", ctypes.c_int),
        ("qkv", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("ring_k", ctypes.c_void_p),
        ("ring_v", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("dependent_launch", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


@cache
def _function():
    function = _library.load().moss_ring_kv_write
    function.argtypes = [ctypes.POINTER(RingKvWriteParams)]
    function.restype = ctypes.c_int
    return function


def ring_kv_write_cuda(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """See `moss_kernels.ring_kv_write`. Each thread moves 16 bytes of a key and of its value.

    With dependent launch the kernel waits for the one before it ahead of its first read.
    """
    heads, capacity, head_dim = ring_k.shape[1:]
    params = RingKvWriteParams(
        struct_size=ctypes.sizeof(RingKvWriteParams),
        abi_version=_library.ABI_VERSION,
        batch=qkv.shape[0],
        tokens=qkv.shape[1],
        heads=heads,
        head_dim=head_dim,
        capacity=capacity,
        dtype=_library.DTYPE_CODES[qkv.dtype],
        qkv=qkv.data_ptr(),
        cos_sin=None if cos_sin is None else cos_sin.data_ptr(),
        ring_k=ring_k.data_ptr(),
        ring_v=ring_v.data_ptr(),
        slots=slots.data_ptr(),
        valid=valid.data_ptr(),
        offset=offset.data_ptr(),
        dependent_launch=dependent_launch(qkv.device, default=True),
        stream=torch.cuda.current_stream(qkv.device).cuda_stream,
    )
    with torch.cuda.device(qkv.device):
        _library.check_status(_function()(ctypes.byref(params)))

"""`local_rope_attention` in CUDA C++: the calls into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch


class LocalRopeAttentionParams(ctypes.Structure):
    """LocalRopeAttentionParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("positions", ctypes.c_int32),
        ("position", ctypes.c_int32),
        ("dtype", ctypes.c_int),
        ("qkv", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("codes_stride", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("audio_embeddings", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("dependent_launch", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


@cache
def _function():
    function = _library.load().moss_local_rope_attention
    function.argtypes = [ctypes.POINTER(LocalRopeAttentionParams)]
    function.restype = ctypes.c_int
    return function


def _launch(k_cache: torch.Tensor, v_cache: torch.Tensor, position: int, out: torch.Tensor, **form: int) -> None:
    batch, positions, heads, head_dim = k_cache.shape
    params = LocalRopeAttentionParams(
        struct_size=ctypes.sizeof(LocalRopeAttentionParams),
        abi_version=_library.ABI_VERSION,
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        positions=positions,
        position=position,
        dtype=_library.DTYPE_CODES[k_cache.dtype],
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        out=out.data_ptr(),
        dependent_launch=dependent_launch(k_cache.device, default=True),
        stream=torch.cuda.current_stream(k_cache.device).cuda_stream,
        **form,
    )
    with torch.cuda.device(k_cache.device):
        _library.check_status(_function()(ctypes.byref(params)))


def local_rope_attention_cuda(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `moss_kernels.local_rope_attention`. One warp per (batch row, head).

    Where `dependent_launch` says so it starts early: the kernel waits for the one before it ahead of its first read.
    """
    _launch(k_cache, v_cache, position, out, qkv=qkv.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr())


def local_rope_attention_lookup_cuda(
    codes: torch.Tensor,
    table: torch.Tensor,
    audio_embeddings: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    out: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """See `moss_kernels.local_rope_attention_lookup`; launched as `local_rope_attention_cuda`."""
    _launch(
        k_cache,
        v_cache,
        position,
        out,
        codes=codes.data_ptr(),
        codes_stride=codes.stride(0),
        vocab=table.shape[1],
        table=table.data_ptr(),
        audio_embeddings=audio_embeddings.data_ptr(),
        residual=residual.data_ptr(),
    )

"""`embed_codes` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch


class EmbedCodesParams(ctypes.Structure):
    """EmbedCodesParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("batch", ctypes.c_int32),
        ("codebooks", ctypes.c_int32),
        ("text_vocab", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("pad_id", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("dependent_launch", ctypes.c_int32),
        ("text_ids", ctypes.c_void_p),
        ("text_ids_stride", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("codes_row_stride", ctypes.c_int64),
        ("embed_tokens", ctypes.c_void_p),
        ("audio_embeddings", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


@cache
def _function():
    function = _library.load().moss_embed_codes
    function.argtypes = [ctypes.POINTER(EmbedCodesParams)]
    function.restype = ctypes.c_int
    return function


def embed_codes_cuda(
    text_ids: torch.Tensor,
    codes: torch.Tensor,
    embed_tokens: torch.Tensor,
    audio_embeddings: torch.Tensor,
    pad_id: int,
    out: torch.Tensor,
) -> None:
    """See `moss_kernels.embed_codes`. One thread per 16 bytes of `out` (per element where H does not divide so).

    Where `dependent_launch` says so it starts early: the kernel waits for the one before it ahead of its first read.
    """
    params = EmbedCodesParams(
        struct_size=ctypes.sizeof(EmbedCodesParams),
        abi_version=_library.ABI_VERSION,
        batch=codes.shape[0],
        codebooks=codes.shape[1],
        text_vocab=embed_tokens.shape[0],
        vocab=audio_embeddings.shape[1],
        width=out.shape[1],
        pad_id=pad_id,
        dtype=_library.DTYPE_CODES[out.dtype],
        dependent_launch=dependent_launch(out.device, default=True),
        text_ids=text_ids.data_ptr(),
        text_ids_stride=text_ids.stride(0),
        codes=codes.data_ptr(),
        codes_row_stride=codes.stride(0),
        embed_tokens=embed_tokens.data_ptr(),
        audio_embeddings=audio_embeddings.data_ptr(),
        out=out.data_ptr(),
        stream=torch.cuda.current_stream(out.device).cuda_stream,
    )
    with torch.cuda.device(out.device):
        _library.check_status(_function()(ctypes.byref(params)))

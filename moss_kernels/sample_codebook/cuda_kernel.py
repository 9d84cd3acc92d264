"""`sample_codebook` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch


class SampleCodebookParams(ctypes.Structure):
    """SampleCodebookParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("batch", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("pool_rows", ctypes.c_int32),
        ("codebooks", ctypes.c_int32),
        ("channel", ctypes.c_int32),
        ("codebook", ctypes.c_int32),
        ("pad_id", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("logits_dtype", ctypes.c_int),
        ("dependent_launch", ctypes.c_int32),
        ("logits_row_stride", ctypes.c_int64),
        ("row_map", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("repetition_penalty", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("frame", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("code_stride", ctypes.c_int64),
        ("status", ctypes.c_void_p),
        ("random_words", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


@cache
def _function():
    function = _library.load().moss_sample_codebook
    function.argtypes = [ctypes.POINTER(SampleCodebookParams)]
    function.restype = ctypes.c_int
    return function


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def draw_params(
    vocab: int,
    row_map: torch.Tensor,
    active: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    seed: torch.Tensor,
    frame: torch.Tensor,
    seen: torch.Tensor | None,
    channel: int,
    codebook: int,
    pad_id: int,
    code: torch.Tensor,
    status: torch.Tensor,
    random_words: torch.Tensor | None = None,
) -> SampleCodebookParams:
    """The struct of a draw from V logits, without the logits."""
    return SampleCodebookParams(
        struct_size=ctypes.sizeof(SampleCodebookParams),
        abi_version=_library.ABI_VERSION,
        batch=row_map.shape[0],
        vocab=vocab,
        pool_rows=temperature.shape[0],
        codebooks=1 if seen is None else seen.shape[1],
        channel=channel,
        codebook=codebook,
        pad_id=pad_id,
        dependent_launch=dependent_launch(row_map.device, default=True),
        row_map=row_map.data_ptr(),
        active=active.data_ptr(),
        temperature=temperature.data_ptr(),
        top_k=top_k.data_ptr(),
        top_p=top_p.data_ptr(),
        repetition_penalty=_pointer(repetition_penalty),
        seed=seed.data_ptr(),
        frame=frame.data_ptr(),
        seen=_pointer(seen),
        code=code.data_ptr(),
        code_stride=code.stride(0),
        status=status.data_ptr(),
        random_words=_pointer(random_words),
        stream=torch.cuda.current_stream(row_map.device).cuda_stream,
    )


def sample_codebook_cuda(logits: torch.Tensor, *draw: object) -> None:
    """See `moss_kernels.sample_codebook`. One thread block per batch row.

    Where `dependent_launch` says so it starts early: the kernel reads ahead of its wait for the one before it, and
    again after the wait.
    """
    params = draw_params(logits.shape[1], *draw)
    params.logits = logits.data_ptr()
    params.logits_dtype = _library.DTYPE_CODES[logits.dtype]
    params.logits_row_stride = logits.stride(0)
    with torch.cuda.device(logits.device):
        _library.check_status(_function()(ctypes.byref(params)))

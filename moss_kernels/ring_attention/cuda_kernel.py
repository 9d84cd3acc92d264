"""`ring_attention` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
import math
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch

HEAD_DIM = 64
# Of chunks that clusters share: blocks that run at once, those of a cluster, and keys that a block sees.
_MAX_BLOCKS, _MAX_CLUSTER, _MAX_KEYS = 264, 16, 433
# Up to so many tokens of many rows are faster in Triton.
_FEW_TOKENS = 48
# Where q, k and v of one token may be sums over slices: how many, and heads of all rows.
_MOST_SLICES, _SLICED_HEADS = 4, range(397, 1321)
_DEPENDENT_EARLY = 2  # MOSS_DEPENDENT_EARLY


class RingAttentionParams(ctypes.Structure):
    """RingAttentionParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("batch", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("ring_slots", ctypes.c_int32),
        ("write", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("dependent_launch", ctypes.c_int32),
        ("qkv_slices", ctypes.c_int32),
        ("qkv", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("ring_k", ctypes.c_void_p),
        ("ring_v", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


def takes(
    qkv: torch.Tensor, cos_sin: torch.Tensor | None, ring_k: torch.Tensor, window: int, chunk_in_ring: bool
) -> bool:
    """Whether there is a kernel for these sizes and dtypes; with `cos_sin` not for long chunks of many rows."""
    batch, tokens, heads = *qkv.shape[-3:-1], ring_k.shape[1]
    if qkv.dim() == 4:
        few = len(qkv) <= _MOST_SLICES and takes_slices(batch, tokens, ring_k)
        return few and cos_sin is not None and not chunk_in_ring
    sized = cos_sin is None or tokens <= 32 or _takes_clusters(batch, tokens, heads, window)
    return sized and _fits(ring_k) and not chunk_in_ring


def wants_rotated(batch: int, tokens: int, ring_k: torch.Tensor, window: int) -> bool:
    """Whether the kernel for chunks that are rotated already is the fastest of all for this one."""
    return tokens > _FEW_TOKENS and _fits(ring_k) and not _takes_clusters(batch, tokens, ring_k.shape[1], window)


def takes_slices(batch: int, tokens: int, ring_k: torch.Tensor) -> bool:
    """Whether there is a kernel for these sizes that adds up the slices of a chunk that is not rotated yet."""
    return tokens == 1 and batch * ring_k.shape[1] in _SLICED_HEADS and _fits(ring_k)


def _fits(ring_k: torch.Tensor) -> bool:
    return ring_k.shape[3] == HEAD_DIM and ring_k.dtype == torch.bfloat16


def _takes_clusters(batch: int, tokens: int, heads: int, window: int) -> bool:
    block = 16 if tokens <= 16 * _MAX_CLUSTER else 32
    cluster = -(-tokens // block)
    return cluster <= _MAX_CLUSTER and batch * heads * cluster <= _MAX_BLOCKS and window + block <= _MAX_KEYS


@cache
def _function():
    function = _library.load().moss_ring_attention
    function.argtypes = [ctypes.POINTER(RingAttentionParams)]
    function.restype = ctypes.c_int
    return function


def ring_attention_cuda(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    window: int,
    chunk_in_ring: bool,
    out: torch.Tensor,
    write: bool = False,
    settled: bool = False,
) -> None:
    """See `moss_kernels.ring_attention`; for what `takes` allows.

    With dependent launch the kernel waits for the one before it ahead of its first read of anything that this one could
    have written; of what is settled, not at all.
    """
    dependent = dependent_launch(qkv.device, default=True)
    ring_slots, heads, capacity, head_dim = ring_k.shape
    params = RingAttentionParams(
        struct_size=ctypes.sizeof(RingAttentionParams),
        abi_version=_library.ABI_VERSION,
        batch=qkv.shape[-3],
        tokens=qkv.shape[-2],
        heads=heads,
        head_dim=head_dim,
        capacity=capacity,
        window=window,
        ring_slots=ring_slots,
        write=write,
        scale=head_dim**-0.5 * math.log2(math.e),
        dependent_launch=_DEPENDENT_EARLY if dependent and settled else dependent,
        qkv_slices=len(qkv) if qkv.dim() == 4 else 0,
        qkv=qkv.data_ptr(),
        cos_sin=None if cos_sin is None else cos_sin.data_ptr(),
        ring_k=ring_k.data_ptr(),
        ring_v=ring_v.data_ptr(),
        slots=slots.data_ptr(),
        valid=valid.data_ptr(),
        offset=offset.data_ptr(),
        out=out.data_ptr(),
        stream=torch.cuda.current_stream(qkv.device).cuda_stream,
    )
    with torch.cuda.device(qkv.device):
        _library.check_status(_function()(ctypes.byref(params)))

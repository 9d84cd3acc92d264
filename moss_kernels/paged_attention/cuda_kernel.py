"""`paged_attention` in CUDA C++: the call into libmoss_kernels.so."""

import ctypes
import math
from functools import cache

import torch

from moss_kernels import _library
from moss_kernels._launch import dependent_launch

HEAD_DIM = 128
MIN_PAGE_SIZE = 16
MAX_GROUP = 4
# MOSS_DEPENDENT_EARLY of csrc/include/moss_kernels.h.
_DEPENDENT_EARLY = 2


class PagedAttentionParams(ctypes.Structure):
    """PagedAttentionParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("batch", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("pages", ctypes.c_int32),
        ("table_pages", ctypes.c_int32),
        ("pool_rows", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("dependent_launch", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("qkv", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("key_pages", ctypes.c_void_p),
        ("value_pages", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("row_map", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


def takes(qkv: torch.Tensor, key_pages: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether there is a kernel for these sizes and dtypes."""
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    fits = head_dim == HEAD_DIM and out.shape[1] <= MAX_GROUP * kv_heads * head_dim
    return fits and qkv.dtype == torch.bfloat16 and page_size >= MIN_PAGE_SIZE and page_size.bit_count() == 1


@cache
def _function():
    function = _library.load().moss_paged_attention
    function.argtypes = [ctypes.POINTER(PagedAttentionParams)]
    function.restype = ctypes.c_int
    return function


def make_params(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    arrived: torch.Tensor,
    *,
    parts: int = 0,
) -> PagedAttentionParams:
    """Everything but the launch: `dependent_launch` and `stream` are 0."""
    pages, kv_heads, page_size, head_dim = key_pages.shape
    pool_rows, table_pages = page_table.shape
    return PagedAttentionParams(
        struct_size=ctypes.sizeof(PagedAttentionParams),
        abi_version=_library.ABI_VERSION,
        batch=qkv.shape[0],
        kv_heads=kv_heads,
        group=out.shape[1] // (kv_heads * head_dim),
        head_dim=head_dim,
        page_size=page_size,
        pages=pages,
        table_pages=table_pages,
        pool_rows=pool_rows,
        parts=parts,
        eps=eps,
        scale=head_dim**-0.5 * math.log2(math.e),
        qkv=qkv.data_ptr(),
        q_norm=q_norm.data_ptr(),
        k_norm=k_norm.data_ptr(),
        cos_sin=cos_sin.data_ptr(),
        key_pages=key_pages.data_ptr(),
        value_pages=value_pages.data_ptr(),
        page_table=page_table.data_ptr(),
        positions=positions.data_ptr(),
        row_map=row_map.data_ptr(),
        active=active.data_ptr(),
        out=out.data_ptr(),
        partials=partials.data_ptr(),
        arrived=arrived.data_ptr(),
    )


def paged_attention_cuda(*arguments: object, settled: bool = False, parts: int = 0) -> None:
    """See `moss_kernels.paged_attention`; for what `takes` allows.

    With dependent launch the kernel waits for those ahead of it before its first read of anything that they may write.

    Args:
        arguments: of the op, in its order, but for the last.
        settled: of the op; then dependent launch is the default.
        parts: blocks for each row and key head, 1, 2, 4, 8 or 16, with the same results; 0: by the batch.
    """
    params = make_params(*arguments, parts=parts)
    device = arguments[0].device
    if dependent_launch(device, default=settled):
        params.dependent_launch = _DEPENDENT_EARLY if settled else 1
    params.stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):
        _library.check_status(_function()(ctypes.byref(params)))

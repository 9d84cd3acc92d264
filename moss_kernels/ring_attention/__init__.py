"""`ring_attention`: windowed causal attention of a chunk over the ring of its slot, read in place, and over itself."""

from collections.abc import Callable

import torch

from moss_kernels import _checks, _library

from . import cuda_kernel
from .reference import (
    masked_attention,
    ring_attention_reference,
    ring_visibility,
    rope_frequencies,
    rope_tables,
    rotate_interleaved,
    whole_qkv,
)

__all__ = [
    "check_ring_step",
    "masked_attention",
    "ring_attention",
    "ring_attention_reference",
    "ring_visibility",
    "rope_frequencies",
    "rope_tables",
    "rotate_interleaved",
    "takes_slices",
    "wants_rotated",
    "whole_qkv",
]

_OP = "ring_attention"
# Backends that take any chunk, and those of them that take one which has been rotated.
_ANY_SIZE, _ROTATED_TOO = ("triton", "reference"), ("reference",)
# Arguments that `ring_kv_write` has too, and the place of `write`, which the dispatcher may leave out.
_SHARED, _WRITE = 7, 10


def check_ring_step(
    op: str,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    *,
    sliced: bool = False,
) -> dict[str, int]:
    """Check the arguments that `ring_attention` and `ring_kv_write` share; returns the sizes by name.

    `sliced`: `qkv` holds sums over slices.
    """
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(op, name, tensor, layout, sizes)
        _checks.require_dtype(op, name, tensor, *dtypes)
        _checks.require_device(op, name, tensor, qkv.device)
        _checks.require_contiguous(op, name, tensor)

    _checks.require_dtype(op, "qkv", qkv, *((torch.float32,) if sliced else (torch.float32, torch.bfloat16)))
    check("ring_k", ring_k, "[S+1, H, C, D]", *((torch.float32, torch.bfloat16) if sliced else (qkv.dtype,)))
    check("ring_v", ring_v, "[S+1, H, C, D]", ring_k.dtype)
    heads, head_dim = sizes["H"], sizes["D"]
    if head_dim % 2:
        raise ValueError(f"`{op}`: `ring_k` must have an even head_dim, got {head_dim}")
    sizes |= {"3*H*D": 3 * heads * head_dim, "H*D": heads * head_dim, "D/2": head_dim // 2}
    check("qkv", qkv, "[P, B, T, 3*H*D]" if sliced else "[B, T, 3*H*D]", qkv.dtype)
    if cos_sin is not None:
        check("cos_sin", cos_sin, "[B, T, D/2, 2]", torch.float32)
    check("slots", slots, "[B]", torch.int32)
    check("valid", valid, "[B]", torch.int32)
    check("offset", offset, "[S+1]", torch.int64)
    return sizes


def _check(
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
    sliced = qkv.dim() == 4
    sizes = check_ring_step(_OP, qkv, cos_sin, ring_k, ring_v, slots, valid, offset, sliced=sliced)
    if sliced and sizes["P"] == 0:
        raise ValueError(f"`{_OP}`: `qkv` must have slices, got {tuple(qkv.shape)}")
    if not 1 <= window <= sizes["C"]:
        raise ValueError(f"`{_OP}`: `window` must be in 1 .. C = {sizes['C']}, got {window}")
    if write and chunk_in_ring:
        raise ValueError(f"`{_OP}`: `write` must be False for a chunk that is in the ring already, got True")
    _checks.require_shape(_OP, "out", out, "[B, T, H*D]", sizes)
    _checks.require_dtype(_OP, "out", out, ring_k.dtype)
    _checks.require_device(_OP, "out", out, qkv.device)
    _checks.require_contiguous(_OP, "out", out)


def wants_rotated(batch: int, tokens: int, ring_k: torch.Tensor, window: int) -> bool:
    """Whether the op had better get q and k of chunks rotated: of `batch` rows of `tokens`, in no ring yet."""
    if ring_k.device.type != "cuda" or not cuda_kernel.wants_rotated(batch, tokens, ring_k, window):
        return False
    return _library.backend_for(_OP, ("cuda", *_ANY_SIZE), ring_k.device) == "cuda"


def takes_slices(batch: int, tokens: int, ring_k: torch.Tensor) -> bool:
    """Whether the op adds up q, k and v that come as sums over slices where it loads them, for these sizes."""
    if ring_k.device.type != "cuda" or not cuda_kernel.takes_slices(batch, tokens, ring_k):
        return False
    return _library.backend_for(_OP, ("cuda", *_ANY_SIZE), ring_k.device) == "cuda"


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    _attend_and_write(ring_attention_reference, *arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    qkv, cos_sin, ring_k = arguments[:3]
    backends = _ROTATED_TOO if cos_sin is None else _ANY_SIZE
    if qkv.dim() == 4 and not cuda_kernel.takes(qkv, cos_sin, ring_k, *arguments[7:9]):
        qkv = whole_qkv(qkv, ring_k.dtype)
        arguments = qkv, *arguments[1:]
    if cuda_kernel.takes(qkv, cos_sin, ring_k, *arguments[7:9]):
        backends = ("cuda", *backends)
    backend = _library.backend_for(_OP, backends, qkv.device)
    if backend == "cuda":
        return cuda_kernel.ring_attention_cuda(*arguments)
    if backend == "triton":
        from .triton_kernel import ring_attention_triton as implementation
    else:
        implementation = ring_attention_reference
    return _attend_and_write(implementation, *arguments)


def _attend_and_write(attention: Callable[..., None], *arguments: object) -> None:
    qkv, cos_sin, ring_k, *rest = arguments[:_WRITE]
    step = whole_qkv(qkv, ring_k.dtype), cos_sin, ring_k, *rest
    attention(*step)
    if any(arguments[_WRITE : _WRITE + 1]):
        torch.ops.moss.ring_kv_write(*step[:_SHARED])


_library.OPS.define(
    "ring_attention(Tensor qkv, Tensor? cos_sin, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor slots, Tensor valid, "
    "Tensor offset, int window, bool chunk_in_ring, Tensor(c!) out, bool write=False, bool settled=False) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::ring_attention", _check, lib=_library.OPS)


def ring_attention(
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
    """Attention of one layer of the codec over a chunk of tokens of each row's stream.

    Queries and the chunk's own keys are rotated here (interleaved pairs, in float32, rounded once), or, without
    `cos_sin`, have been by `codec_linear`. The query at position p sees the keys max(0, p - window + 1) .. p; scores,
    softmax and the weighted sum accumulate in float32.

    With `chunk_in_ring` False the ring is the one from before the chunk, and `ring_kv_write` follows, or is part of
    this op (`write`): streaming then equals full-length attention with the same window for every way of cutting a
    stream into chunks, and a capacity of `window` is enough. With True the chunk was written before and only `q` of
    `qkv` is read: the released streaming decoder, whose chunks evict keys that their own queries still need.

    The result of a row depends on the number of rows in its last bits. What the offset says was never written, or was
    overwritten, may hold anything, NaN included, and so may tokens at or beyond `valid`.

    Args:
        qkv: [B, T, 3*H*D] float32 or bfloat16. All q, all k, all v of the chunk. Or [P, B, T, 3*H*D] float32: sums over
            P slices that `codec_linear` has left, which are added in their order and rounded to the dtype of the rings
            first; for sizes of which `takes_slices` says so where they are loaded.
        cos_sin: [B, T, D/2, 2] float32. `rope_tables` of the positions offset[slots[b]] + t; None: q and k of `qkv`
            are rotated already, as `wants_rotated` says is best.
        ring_k: [S+1, H, C, D], the dtype of `qkv`; float32 or bfloat16 if that has slices. Rotated keys; token n of a
            stream lies at n mod C. Row S is the null slot of padding. Read, and with `write` written after that.
        ring_v: [S+1, H, C, D], likewise. Values.
        slots: [B] int32, 0 .. S (not checked). No two rows with valid tokens name the same slot.
        valid: [B] int32, 0 .. T (not checked). Valid tokens of each row.
        offset: [S+1] int64. Tokens that each slot had consumed before this chunk.
        window: 1 .. C. Keys that a query sees, itself included.
        chunk_in_ring: whether the rings hold this chunk already.
        out: [B, T, H*D], the dtype of the rings, written; 0 for tokens at or beyond `valid`, and for a query that sees
            no key (an oversized chunk, T > C, with `chunk_in_ring`).
        write: whether the chunk's keys and values are stored in the rings after the attention, as `ring_kv_write`
            does; not with `chunk_in_ring`.
        settled: whether no kernel that may still run writes rings, `slots`, `valid`, `offset` or `cos_sin`. Then CUDA
            C++ may read them while the kernel ahead in the stream still runs.

    Raises:
        ValueError: A shape, range, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here, or a kernel lacks this D.

    Graph-safe: yes.
    """
    step = qkv, cos_sin, ring_k, ring_v, slots, valid, offset
    torch.ops.moss.ring_attention(*step, window, chunk_in_ring, out, write, settled)

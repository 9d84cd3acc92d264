"""`ring_kv_write`: stores the keys and values of a chunk in the rings of its slots."""

import torch

from moss_kernels import _library
from moss_kernels.ring_attention import check_ring_step

from .reference import RingTarget, ring_kv_write_reference, ring_target

__all__ = ["RingTarget", "ring_kv_write", "ring_kv_write_reference", "ring_target"]

_OP = "ring_kv_write"


def _check(*arguments: torch.Tensor | None) -> None:
    check_ring_step(_OP, *arguments)


def _run_cpu(*arguments: torch.Tensor | None) -> None:
    _check(*arguments)
    ring_kv_write_reference(*arguments)


def _run_cuda(*arguments: torch.Tensor | None) -> None:
    _check(*arguments)
    backends = ("cuda", "reference") if arguments[1] is None else ("cuda", "triton", "reference")
    backend = _library.backend_for(_OP, backends, arguments[0].device)
    if backend == "cuda":
        from .cuda_kernel import ring_kv_write_cuda as implementation
    elif backend == "triton":
        from .triton_kernel import ring_kv_write_triton as implementation
    else:
        implementation = ring_kv_write_reference
    implementation(*arguments)


_library.OPS.define(
    "ring_kv_write(Tensor qkv, Tensor? cos_sin, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor slots, Tensor valid, "
    "Tensor offset) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::ring_kv_write", _check, lib=_library.OPS)


def ring_kv_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Stores the keys (rotated here) and values of a chunk in the rings; every other bit of the rings stays.

    Token n of a stream goes to ring position n mod C; of more than C valid tokens the last C are kept. The rotation is
    that of `rotate_interleaved`, bitwise. The offset does not advance here: once per step, it does for a whole stage.

    Args:
        qkv: [B, T, 3*H*D] float32 or bfloat16. All q (not read), all k, all v of the chunk.
        cos_sin: [B, T, D/2, 2] float32. `rope_tables` of the positions offset[slots[b]] + t; None: the keys are
            rotated already.
        ring_k: [S+1, H, C, D], the dtype of `qkv`, written. Row S is the null slot of padding: all zero, never
            changed.
        ring_v: [S+1, H, C, D], likewise.
        slots: [B] int32, 0 .. S (not checked). No two rows with valid tokens name the same slot.
        valid: [B] int32, 0 .. T (not checked). A row with 0 writes nothing, whatever slot it names.
        offset: [S+1] int64. Tokens that each slot had consumed before this chunk.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here, or a kernel lacks this D.

    Graph-safe: yes.
    """
    torch.ops.moss.ring_kv_write(qkv, cos_sin, ring_k, ring_v, slots, valid, offset)

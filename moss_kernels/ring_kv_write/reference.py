"""`ring_kv_write` in plain PyTorch. B rows, T tokens, H heads, D head_dim, S slots (slot S is null), C capacity."""

from typing import NamedTuple

import torch

from moss_kernels.ring_attention.reference import rotate_interleaved


class RingTarget(NamedTuple):
    """Where the tokens of a step go.

    Attributes:
        slot: [B, T] int64. The null slot where nothing is written.
        position: [B, T] int64. Ring position; 0 where nothing is written.
        written: [B, T] bool.
    """

    slot: torch.Tensor
    position: torch.Tensor
    written: torch.Tensor


def ring_target(
    slots: torch.Tensor, valid: torch.Tensor, offset: torch.Tensor, *, tokens: int, capacity: int
) -> RingTarget:
    """Ring positions of a step's tokens: token n goes to n mod C; of an oversized chunk the last C valid ones stay.

    Args:
        slots: [B] int. No two rows with valid tokens name the same slot.
        valid: [B] int. Valid tokens of each row, 0 .. tokens.
        offset: [S+1] int64. Tokens that each slot had consumed before this step.
        tokens: T.
        capacity: C.
    """
    slots, valid = slots.long()[:, None], valid.long()[:, None]
    step = torch.arange(tokens, device=offset.device)
    written = (step < valid) & (step >= valid - capacity)
    slot = torch.where(written, slots, offset.shape[0] - 1)
    position = torch.where(written, (offset[slots] + step) % capacity, 0)
    return RingTarget(slot, position, written)


def ring_kv_write_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    *,
    target: RingTarget | None = None,
) -> None:
    """See `moss_kernels.ring_kv_write`.

    Args:
        target: what `ring_target` gives, for a caller that shares it between the layers of a stage; None computes it.
    """
    heads, capacity = ring_k.shape[1:3]
    if target is None:
        target = ring_target(slots, valid, offset, tokens=qkv.shape[1], capacity=capacity)
    slot, position, written = target
    _, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    if cos_sin is not None:
        k = rotate_interleaved(k, cos_sin)
    head = torch.arange(heads, device=qkv.device)
    # What is not to be written goes to the null slot as zeros: shapes stay static, and no row can race with another.
    for ring, fresh in ((ring_k, k), (ring_v, v)):
        ring[slot[..., None], head, position[..., None]] = torch.where(written[..., None, None], fresh, 0)

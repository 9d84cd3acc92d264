"""`ring_kv_write` in plain PyTorch. B rows, T tokens, H heads, D head_dim, S slots (slot S is null), C capacity."""

from typing import NamedTuple

import torch


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
    k: torch.Tensor,
    v: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    *,
    target: RingTarget | None = None,
) -> None:
    """Write the valid tokens of a chunk into the rings; every other bit of the rings stays. Offsets do not advance.

    Args:
        k, v: [B, T, H, D] floating. Rotated keys, and values.
        ring_k, ring_v: [S+1, H, C, D], the dtype of `k`. Changed in place; the null slot S is all zero and stays so.
        slots: [B] int. No two rows with valid tokens name the same slot.
        valid: [B] int. Valid tokens of each row, 0 .. T; a row with 0 writes nothing, whatever slot it names.
        offset: [S+1] int64. Tokens that each slot had consumed before this step.
        target: what `ring_target` gives, for a caller that shares it between the layers of a stage; None computes it.
    """
    if target is None:
        target = ring_target(slots, valid, offset, tokens=k.shape[1], capacity=ring_k.shape[2])
    slot, position, written = target
    heads = torch.arange(k.shape[2], device=k.device)
    # What is not to be written goes to the null slot as zeros: shapes stay static, and no row can race with another.
    for ring, fresh in ((ring_k, k), (ring_v, v)):
        ring[slot[..., None], heads, position[..., None]] = torch.where(written[..., None, None], fresh, 0)

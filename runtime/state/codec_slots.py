"""Streaming state of the codec decoder: rings of keys and values per slot, one offset per stage, and who holds which.

A slot is the state of one stream. Slot number `slots` (the last) is the null slot: padding rows of a step point at it,
it is never leased and stays all zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moss_runtime.model.codec.config import TransformerConfig


@dataclass(frozen=True)
class Lease:
    """The right to use a slot until it is released; `generation` tells it from earlier and later holders."""

    slot: int
    generation: int


@dataclass(frozen=True)
class StageRings:
    """Rings of one stage.

    Attributes:
        keys, values: [L, slots + 1, H, C, D]. Rotated keys, and values, of each layer; token n at position n mod C.
        offset: [slots + 1] int64. Tokens consumed; all layers of the stage share it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    offset: torch.Tensor


class CodecSlots:
    """State of `slots` streams plus the null slot. Steps, resets and releases of a slot belong on one stream."""

    def __init__(
        self, stages: Sequence["TransformerConfig"], slots: int, *, dtype: torch.dtype, device: torch.device | str
    ):
        """Args: stages: of the decoder, in order; a ring holds exactly the stage's attention window."""
        if slots < 1:
            raise ValueError(f"`slots` must be at least 1, got {slots}")
        self.null_slot = slots
        self.offsets = torch.zeros(len(stages), slots + 1, dtype=torch.int64, device=device)
        self.stages = [
            StageRings(
                *(torch.zeros(2, *_ring_shape(stage, slots), dtype=dtype, device=device).unbind(0)), self.offsets[index]
            )
            for index, stage in enumerate(stages)
        ]
        self._free = list(reversed(range(slots)))
        self._generation = [0] * slots

    @staticmethod
    def size_in_bytes(stages: Sequence["TransformerConfig"], slots: int, dtype: torch.dtype) -> int:
        """Bytes of device memory that `CodecSlots` with the same arguments allocates."""
        values = sum(2 * math.prod(_ring_shape(stage, slots)) for stage in stages)
        return values * dtype.itemsize + len(stages) * (slots + 1) * torch.int64.itemsize

    @property
    def free(self) -> int:
        """Number of slots that can be leased now."""
        return len(self._free)

    def lease(self) -> Lease:
        """Take a free slot; its stream starts at token 0.

        Raises:
            RuntimeError: all slots are leased.
        """
        if not self._free:
            raise RuntimeError(f"all {self.null_slot} codec slots are leased")
        slot = self._free.pop()
        self._generation[slot] += 1
        self.reset(slot)
        return Lease(slot, self._generation[slot])

    def release(self, lease: Lease) -> None:
        """Give a slot back; from now on the lease is stale.

        Raises:
            ValueError: the lease was released before.
        """
        (slot,) = self.resolve([lease])
        self._generation[slot] += 1
        self._free.append(slot)

    def resolve(self, leases: Iterable[Lease]) -> list[int]:
        """Slot ids of leases that are still held.

        Raises:
            ValueError: a lease was released; its slot may belong to another stream by now.
        """
        slots = []
        for lease in leases:
            if self._generation[lease.slot] != lease.generation:
                raise ValueError(f"lease {lease.generation} of codec slot {lease.slot} was released")
            slots.append(lease.slot)
        return slots

    def reset(self, slot: int) -> None:
        """Start the slot's stream again at token 0; its old ring contents stay where they are and do not matter."""
        if not 0 <= slot < self.null_slot:
            raise ValueError(f"`slot` must be in 0..{self.null_slot - 1}, got {slot}")
        self.offsets[:, slot] = 0


def _ring_shape(stage: "TransformerConfig", slots: int) -> tuple[int, ...]:
    return stage.layers, slots + 1, stage.heads, stage.context, stage.head_dim

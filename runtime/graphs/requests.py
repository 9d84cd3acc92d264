"""A request as the host sees it, and what it is told of one."""

import dataclasses
from collections import deque
from collections.abc import Hashable

import torch
from torch import Tensor

from moss_runtime.graphs.prefill import Piece
from moss_runtime.state.decode_pool import RowLease


@dataclasses.dataclass(frozen=True)
class FrameDelta:
    """Frames of a request that are known to be valid, and not told of before.

    Attributes:
        request_id: of the request.
        generation: of the lease of its row.
        first_frame: number of the first of these frames.
        codes: [n, n_vq] int16, a view of the pool's history that holds until the row is released; n may be 0 if final.
        ready_event: after it the codes may be read on another stream; None on a CPU.
        final: no frame will follow.
        finish_reason: of a final delta "stop", "length" or "error", as in `Generation`.
    """

    request_id: Hashable
    generation: int
    first_frame: int
    codes: Tensor
    ready_event: torch.cuda.Event | None
    final: bool
    finish_reason: str | None


@dataclasses.dataclass
class Request:
    """A request as the host sees it; `pieces` wait for prefill, `launched` frames were asked for, `known` are valid."""

    lease: RowLease
    tokens: int
    max_frames: int
    seed: int
    pieces: deque[Piece]
    prefilled: torch.cuda.Event | None = None
    launched: int = 0
    known: int = 0
    paused: bool = False
    ended: bool = False


@dataclasses.dataclass
class Flight:
    """A launch whose report the host has not read. report: [3, B] int32 in pinned memory."""

    requests: list[Request]
    report: Tensor
    event: torch.cuda.Event | None

    @property
    def landed(self) -> bool:
        return self.event is None or self.event.query()

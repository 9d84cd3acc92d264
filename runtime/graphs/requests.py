"""Requests as the host sees them, and what it learns of them."""

import dataclasses
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from moss_runtime.graphs.frame import FINISHED, STOPPED
from moss_runtime.graphs.prefill import Piece
from moss_runtime.state.decode_pool import DecodePool, RowLease


class FrameDelta(NamedTuple):
    """Frames of a request that are known to be valid, and not told of before.

    Attributes:
        request_id: of the request.
        generation: of the lease of its row.
        first_frame: number of the first of these frames.
        frames: how many there are; may be 0 if final.
        history: [max_frames, n_vq] int16. All frames of its row, in the pool; it holds until the row is released.
        ready_event: after it the codes may be read on another stream; None on a CPU.
        final: no frame will follow.
        finish_reason: of a final delta "stop", "length" or "error", as in `Generation`.
    """

    request_id: Hashable
    generation: int
    first_frame: int
    frames: int
    history: Tensor
    ready_event: torch.cuda.Event | None
    final: bool
    finish_reason: str | None

    @property
    def codes(self) -> Tensor:
        """[n, n_vq] int16. These frames, a view of the history."""
        # There is a delta for each row and launch, and most are never looked at by themselves.
        return self.history[self.first_frame : self.first_frame + self.frames]


@dataclasses.dataclass
class Request:
    """A request as the host sees it.

    Attributes:
        tokens, max_frames, seed: of the prompt but for its last row; limit and seed in force.
        pieces: of the prompt, that wait for prefill.
        covered: tokens for which it holds KV pages.
        launched, known: frames that were asked for, and those that are valid.
        paused, ended: it is left out of the launches; no frame will follow.
    """

    lease: RowLease
    tokens: int
    max_frames: int
    seed: int
    pieces: deque[Piece]
    covered: int
    launched: int = 0
    known: int = 0
    paused: bool = False
    ended: bool = False


@dataclasses.dataclass
class _Flight:
    """A launch whose report the host has not read. report: [3, B] int32 in pinned memory."""

    requests: list[Request]
    report: Tensor
    event: torch.cuda.Event | None


class Flights:
    """Launches that the host knows nothing of yet, oldest first: it reads their reports when the device is through."""

    def __init__(self, pool: DecodePool):
        self._pool, self._history = pool, pool.history.unbind()
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def landed(self) -> bool:
        """The oldest launch is over."""
        return bool(self._flights) and (self._flights[0].event is None or self._flights[0].event.query())

    def add(self, requests: list[Request], report: Tensor) -> None:
        """Take the report of a launch, [3, B] on the device with a column for each request, on the current stream."""
        host, event = torch.empty(report.shape, dtype=report.dtype, pin_memory=report.is_cuda), None
        host.copy_(report, non_blocking=True)
        if report.is_cuda:
            event = torch.cuda.current_stream(report.device).record_event()
        self._flights.append(_Flight(requests, host, event))

    def read(self) -> list[FrameDelta]:
        """What the launches that are over have made; requests whose last frame is among it end."""
        deltas = []
        while self.landed:
            flight = self._flights.popleft()
            for request, frames, flags, status in zip(flight.requests, *flight.report.tolist(), strict=False):
                if not request.ended and (flags & FINISHED or frames > request.known):
                    deltas.append(self._learn(request, frames, flags, status, flight.event))
        return deltas

    def wait(self) -> None:
        """Wait for the oldest launch."""
        if self._flights and self._flights[0].event is not None:
            self._flights[0].event.synchronize()

    def _learn(
        self, request: Request, frames: int, flags: int, status: int, event: torch.cuda.Event | None
    ) -> FrameDelta:
        """One column of a report that says something new; see `FrameBuffers.report`."""
        lease, final, reason = request.lease, bool(flags & FINISHED), None
        if final:
            reason = "error" if status else "stop" if flags & STOPPED else "length"
            request.ended = True
            self._pool.finish(lease)
        first, request.known = request.known, frames
        history = self._history[lease.row]
        return FrameDelta(lease.request_id, lease.generation, first, frames - first, history, event, final, reason)

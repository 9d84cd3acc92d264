"""A request inside the engine, from `submit` to its result."""

import dataclasses
import itertools

import numpy as np
from torch import Tensor

from moss_runtime.engine.chunking import Stream
from moss_runtime.engine.handle import Channel
from moss_runtime.engine.request import FIRST_AUDIO_STAGES, Request
from moss_runtime.state.codec_slots import Lease
from moss_runtime.state.decode_pool import RowLease


@dataclasses.dataclass(eq=False)
class Job:
    """A request with all that it holds. Times are seconds on the clock of `time.perf_counter`.

    The engine thread owns it, but for `prompt` and `failure`, which whoever makes the prompt or hands out audio sets
    once, and `delivered`, which is the output thread's.

    Attributes:
        id: unique in the engine.
        request: as submitted.
        channel: to its reader.
        prompt: [T, 1+n_vq] int64; None while references are encoded.
        failure: why it must end, found by another thread.
        row: its row of the decode pool.
        slot: its codec slot.
        found_no_slot: it was its turn when all codec slots were taken.
        seed: in force.
        reason: finish reason, once the last frame is known.
        error: of the reason "error".
        paused: its row is left out of the launches.
        deadline: when it must have ended; None: never.
        stream: its frames on their way to the codec.
        delivered: its audio on its way to the caller.
        ready, admitted, first_frame, enqueued: when the prompt was there, the row taken, the first frame known, the
            first codec call enqueued.
    """

    id: int
    request: Request
    channel: Channel
    prompt: Tensor | None = None
    failure: Exception | None = None
    row: RowLease | None = None
    slot: Lease | None = None
    found_no_slot: bool = False
    seed: int | None = None
    reason: str | None = None
    error: Exception | None = None
    paused: bool = False
    deadline: float | None = dataclasses.field(init=False)
    stream: Stream = dataclasses.field(default_factory=Stream)
    delivered: "Delivered" = dataclasses.field(default_factory=lambda: Delivered())
    ready: float = 0.0
    admitted: float = 0.0
    first_frame: float = 0.0
    enqueued: float = 0.0

    def __post_init__(self):
        seconds = self.request.deadline_s
        self.deadline = None if seconds is None else self.channel.submitted + seconds

    def first_audio_stages(self) -> dict[str, float]:
        """Seconds of each of FIRST_AUDIO_STAGES; empty without audio."""
        if self.delivered.first is None:
            return {}
        times = (self.channel.submitted, self.ready, self.admitted, self.first_frame, self.enqueued)
        times += (self.delivered.landed, self.delivered.first)
        spans = (end - start for start, end in itertools.pairwise(times))
        return dict(zip(FIRST_AUDIO_STAGES, spans, strict=True))


@dataclasses.dataclass
class Delivered:
    """What the caller was given.

    Attributes:
        codes: [n, Q] int16 of each chunk.
        audio: [C, n] of each chunk that is kept until the end.
        frames: in all chunks.
        chunks: number of codec calls.
        landed: when the first audio was in host memory.
        first: when the caller could take it.
        latest: likewise of the newest.
        horizon: when a caller that plays in real time has played everything.
        underruns: chunks that came after that.
    """

    codes: list[np.ndarray] = dataclasses.field(default_factory=list)
    audio: list[np.ndarray] = dataclasses.field(default_factory=list)
    frames: int = 0
    chunks: int = 0
    landed: float | None = None
    first: float | None = None
    latest: float | None = None
    horizon: float = 0.0
    underruns: int = 0

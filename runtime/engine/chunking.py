"""Which streams go into the next codec call, and with how many frames: decisions over plain numbers."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator

from moss_runtime.engine.config import CODEC_BATCHES, EngineConfig

# How long a later chunk waits at most while first ones keep coming, and a request without a slot while chunks do.
_PATIENCE_S = 1.0
# What a codec call costs besides its rows x frames, in frames of a row: for itself, for each row, for each frame of its
# length. From the times of calls of 1, 24 and 64 rows, 1 to 15 frames on an H200, where a frame of a row took 28 us;
# faster kernels since then (26 us) have the same proportions.
_CALL, _ROW, _FRAME = 61.0, 1.25, 1.8


@dataclasses.dataclass(eq=False)
class Stream:
    """A request between its frames and its audio.

    Attributes:
        known: frames that exist.
        taken: of these, frames that went to the codec.
        chunks: codec calls that it was in.
        final: no frame will follow.
        whole: it has no codec slot; all frames are decoded at the end.
        room: frames that its client can take now.
        ripe_since: when its next chunk became ready; None while it is not.
        horizon: when its client, playing in real time, will have played what has been taken; None before the first.
    """

    known: int = 0
    taken: int = 0
    chunks: int = 0
    final: bool = False
    whole: bool = False
    room: float = math.inf
    ripe_since: float | None = None
    horizon: float | None = None

    @property
    def pending(self) -> int:
        """Frames that wait for the codec."""
        return self.known - self.taken

    @property
    def flushed(self) -> bool:
        """All frames that it will ever have went to the codec."""
        return self.final and not self.pending


class Chunking:
    """The policy of `EngineConfig`: ramp, waiting bounds, who joins a call made for others.

    A call serves first chunks alone, unless a later one has been ready for long; or, once somebody's wait is over, all
    who are due. Its rows and its length are those that make the most frames for what it costs: its further rows go to
    the last frames of requests, then to the streams with the most frames.
    """

    def __init__(self, config: EngineConfig, frame_rate: float):
        """Args: frame_rate: frames of a second of audio."""
        self._config, self._frame_rate, self._lengths = config, frame_rate, config.chunk_lengths
        self._crowd = 0.0  # part of a crowd that is there, at most 1

    def update(self, streams: Collection[Stream], now: float, *, pressed: bool = False) -> None:
        """Note which chunks have become ready. pressed: frames must leave, so that whatever is pending is."""
        self._crowd = min(1.0, len(streams) / self._config.crowd)
        for stream in streams:
            if not self._is_ripe(stream, pressed):
                stream.ripe_since = None
            elif stream.ripe_since is None:
                stream.ripe_since = now

    def select(
        self, streams: Collection[Stream], now: float, *, idle: bool, pressed: bool = False
    ) -> list[tuple[Stream, int]]:
        """Streams of the next call and the frames of each, or an empty list.

        Args:
            streams: after `update`.
            now: seconds on the clock of `update`.
            idle: no call is under way; otherwise only first chunks are served.
            pressed: nobody waits.
        """
        ripe = [stream for stream in streams if stream.ripe_since is not None]
        if not ripe:
            return []
        ended = [stream for stream in ripe if stream.whole]
        whole = min(ended, key=lambda stream: stream.ripe_since, default=None) if idle else None
        if whole is None or not self._is_late(whole, now):
            ripe = [stream for stream in ripe if not stream.whole] if ended else ripe
            chosen = self._chunks(ripe, streams, now, idle=idle, pressed=pressed)
            if chosen or whole is None:
                return chosen
        return [(whole, whole.pending)]

    def _chunks(
        self, ripe: list[Stream], streams: Collection[Stream], now: float, *, idle: bool, pressed: bool
    ) -> list[tuple[Stream, int]]:
        """The next call for streams with codec slots, of which these are ripe."""
        if not idle:
            ripe = [stream for stream in ripe if self._is_first(stream) or self._is_late(stream, now)]
        due = [stream for stream in ripe if pressed or self.deadline(stream) <= now]
        first = [stream for stream in due if self._is_first(stream)]
        # Requests of a single chunk may come for ever.
        if first and not any(self._is_late(stream, now) for stream in due if not self._is_first(stream)):
            return self._cut(first, self._ramp(0))
        if not idle or not (due or self._most_are_full(streams)):
            return []
        return self._fullest(sorted(due, key=self.deadline), streams)

    def _fullest(self, due: list[Stream], streams: Collection[Stream]) -> list[tuple[Stream, int]]:
        """The call for whoever is due that makes the most frames for what it costs."""
        must = set(due)
        others = [stream for stream in streams if stream not in must and self._may_join(stream)]
        others.sort(key=lambda stream: (not stream.final, -self._frames(stream)))
        waiting = [(stream, self._frames(stream)) for stream in due + others]
        last = max((frames for stream, frames in waiting[: len(due)] if stream.final), default=1)
        lengths = [length for length in self._lengths if length >= last]
        calls = [call for length in lengths for call in self._calls(waiting, len(due), length)]
        return max(calls, key=lambda call: call[0])[1]

    def _calls(
        self, waiting: list[tuple[Stream, int]], due: int, length: int
    ) -> Iterator[tuple[float, list[tuple[Stream, int]]]]:
        """Calls of a length for the first of those who wait, who are due, and more of them: worth and parts of each."""
        parts = [
            (stream, min(frames, length))
            for index, (stream, frames) in enumerate(waiting)
            if index < due or 2 * frames >= length or stream.final
        ][: self._config.batch]
        sums = list(itertools.accumulate(count for _, count in parts))
        for batch in CODEC_BATCHES:
            rows = min(batch, len(parts))
            if batch >= min(due, len(parts)):
                cost = _CALL + _ROW * batch + _FRAME * length + batch * length
                yield sums[rows - 1] / cost, parts[:rows]
            if batch >= len(parts):
                return

    def is_stalled(self, stream: Stream) -> bool:
        """Its client has to read before it goes on."""
        # No chunk is larger; asked several times for each stream and step, so the common answer comes first.
        if stream.room >= self._config.largest_chunk:
            return False
        return stream.room < min(stream.pending, self._ramp(stream.chunks))

    def deadline(self, stream: Stream) -> float:
        """When the ripe chunk of a stream is to be enqueued at the latest."""
        config = self._config
        if self._is_first(stream):
            return stream.ripe_since
        wait = config.final_wait_ms * self._crowd if stream.final else config.chunk_wait_ms
        deadline = stream.ripe_since + wait / 1e3
        if config.stream and stream.horizon is not None:
            deadline = min(deadline, stream.horizon - config.chunk_lead_ms / 1e3)
        return deadline

    def take(self, stream: Stream, count: int, now: float) -> None:
        """Account for a chunk that has been enqueued."""
        stream.taken += count
        stream.chunks += 1
        stream.room -= count
        stream.ripe_since = None
        start = now if stream.horizon is None else max(now, stream.horizon)
        stream.horizon = start + count / self._frame_rate

    def _is_first(self, stream: Stream) -> bool:
        return self._config.stream and stream.chunks == 0

    def _ramp(self, chunks: int) -> int:
        """Frames that make the chunk after so many ready."""
        ramp, number = self._config.chunk_ramp, chunks + (self._crowd >= 1)
        return ramp[number] if number < len(ramp) else ramp[-1]

    def _is_late(self, stream: Stream, now: float) -> bool:
        return now > stream.ripe_since + _PATIENCE_S

    def _is_ripe(self, stream: Stream, pressed: bool) -> bool:
        pending = stream.known - stream.taken
        if not pending:
            return False
        if stream.whole:
            return stream.final
        if self.is_stalled(stream):
            return False
        return stream.final or pressed or pending >= self._ramp(stream.chunks)

    def _frames(self, stream: Stream) -> int:
        return min(stream.pending, self._config.largest_chunk, stream.room)

    def _most_are_full(self, streams: Collection[Stream]) -> bool:
        """Waiting would gain little: at least half of the streams that make frames fill the largest chunk."""
        running = full = 0
        for stream in streams:
            if not (stream.final or stream.whole or self.is_stalled(stream)):
                running += 1
                full += self._frames(stream) == self._config.largest_chunk
        return full > 0 and 2 * full >= running

    def _may_join(self, stream: Stream) -> bool:
        return stream.pending > 0 and not (stream.whole or self._is_first(stream) or self.is_stalled(stream))

    def _cut(self, streams: list[Stream], length: int) -> list[tuple[Stream, int]]:
        """At most a batch of them, from the front."""
        return [(stream, min(self._frames(stream), length)) for stream in streams[: self._config.batch]]

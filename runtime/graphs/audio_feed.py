"""From frames to sound: cuts each request's frames into chunks and decodes them on a stream of their own."""

import dataclasses
from collections import Counter, deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from moss_runtime.graphs.capture import free_memory
from moss_runtime.graphs.codec_chunk import CodecChunk
from moss_runtime.graphs.requests import FrameDelta
from moss_runtime.model.codec import Codec
from moss_runtime.observe import Metrics, Range, annotate
from moss_runtime.state.codec_slots import Lease

# Frames of the first, second ... chunk of a request; the last size goes on. Sound comes early, then in fewer launches.
CHUNKS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class AudioDelta:
    """The next samples of a request.

    Attributes:
        request_id: of the request.
        audio: [C, n] float32 on the CPU; n may be 0 if final.
        final: no sample will follow.
    """

    request_id: Hashable
    audio: Tensor
    final: bool


@dataclasses.dataclass
class _Stream:
    """A request's codec slot and what waits for it. waiting: [n, Q] int16 each, on the device."""

    request_id: Hashable
    lease: Lease
    waiting: list[Tensor] = dataclasses.field(default_factory=list)
    chunks: int = 0
    final: bool = False

    @property
    def frames(self) -> int:
        return sum(map(len, self.waiting))

    def take(self, count: int) -> Tensor:
        """The next `count` frames [count, Q]."""
        codes = torch.cat(self.waiting)
        self.waiting = [codes[count:]] if len(codes) > count else []
        return codes[:count]


class AudioFeed:
    """Decodes the frames of several requests, each in a codec slot of its own.

    `push` takes frames, `step` enqueues the chunks that are due and returns the audio that has reached the host. Only
    `wait` waits for the device.

    Attributes:
        chunk: the codec's step.
        stream: where it runs; None on a CPU.
        event: recorded after the newest chunk; None before the first, and on a CPU.
        bytes: device memory that warming up and capturing took, the kernels' code included.
    """

    def __init__(self, codec: Codec, *, streams: int, chunks: Sequence[int] = CHUNKS, metrics: Metrics | None = None):
        """Allocates the codec's state.

        Args:
            codec: on the device of the frames.
            streams: requests at a time.
            chunks: frames of the first, second, ... chunk of a request; all later ones have the size of the last.
            metrics: for replays and eager steps of `codec_chunk`, slots in use, and seconds of audio.
        """
        self.chunk = CodecChunk(codec, streams, max_batch=streams, frames=chunks)
        self.stream = torch.cuda.Stream(codec.device) if codec.device.type == "cuda" else None
        self.event: torch.cuda.Event | None = None
        self.bytes = 0
        self._sizes, self._metrics = tuple(chunks), metrics
        if metrics is not None:
            slots = self.chunk.slots
            metrics.watch(slots=lambda: slots.null_slot - slots.free)
        self._streams: dict[Hashable, _Stream] = {}
        self._landing: deque[tuple[list[AudioDelta], torch.cuda.Event | None]] = deque()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(codec.device))

    @property
    def busy(self) -> bool:
        """Audio is on its way to the host."""
        return bool(self._landing)

    def warm_up(self) -> None:
        """Capture the codec's graphs, for one stream and for all."""
        if self.stream is None:
            return
        free = free_memory(self.stream.device)
        with torch.cuda.stream(self.stream):
            self.chunk.capture({1, self.chunk.max_batch})
        self.bytes += free - free_memory(self.stream.device)

    @torch.no_grad()
    def push(self, delta: FrameDelta) -> None:
        """Take frames of a request; its first ones start a stream."""
        with torch.cuda.stream(self.stream):
            if delta.request_id not in self._streams:
                lease = self.chunk.slots.lease()
                self._streams[delta.request_id] = _Stream(delta.request_id, lease)
            if delta.ready_event is not None:
                self.stream.wait_event(delta.ready_event)
        stream = self._streams[delta.request_id]
        if delta.frames:
            stream.waiting.append(delta.codes)
        stream.final = delta.final

    @torch.no_grad()
    def step(self) -> list[AudioDelta]:
        """Enqueue all chunks that are due; returns what has reached the host.

        After it, nothing of a final delta waits any more: its last codes are read before `event`.
        """
        with torch.cuda.stream(self.stream):
            while due := [stream for stream in self._streams.values() if stream.final or self._full(stream)]:
                self._decode(due)
        landed = []
        while self._landing and (self._landing[0][1] is None or self._landing[0][1].query()):
            landed += self._landing.popleft()[0]
        return landed

    def wait(self) -> None:
        """Wait until the oldest chunk has reached the host."""
        if self._landing and self._landing[0][1] is not None:
            self._landing[0][1].synchronize()

    def abort(self, request_id: Hashable) -> None:
        """Forget a request, if it is known: its slot comes back, and audio on its way to the host is dropped."""
        self._end(request_id)
        for deltas, _ in self._landing:
            deltas[:] = [delta for delta in deltas if delta.request_id != request_id]

    def _end(self, request_id: Hashable) -> None:
        """Give the slot of a request back, if it has one."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.chunk.slots.release(stream.lease)

    def _size(self, stream: _Stream) -> int:
        return self._sizes[min(stream.chunks, len(self._sizes) - 1)]

    def _full(self, stream: _Stream) -> bool:
        return stream.frames >= self._size(stream)

    def _decode(self, due: list[_Stream]) -> None:
        """One chunk of each stream, and its copy to the host."""
        config, device = self.chunk.codec.config, self.chunk.codec.device
        counts = [min(stream.frames, self._size(stream)) for stream in due]
        ended = [stream.final and stream.frames == count for stream, count in zip(due, counts, strict=True)]
        samples = config.samples_per_frame
        audio = torch.empty(len(due), config.channels, max(counts) * samples, pin_memory=self.stream is not None)
        if max(counts):
            codes = torch.zeros(len(due), max(counts), config.codebooks, dtype=torch.int16, device=device)
            for row, (stream, count) in enumerate(zip(due, counts, strict=True)):
                if count:
                    codes[row, :count] = stream.take(count)
                    stream.chunks += 1
            slots = self.chunk.slots.resolve([stream.lease for stream in due])
            with annotate(Range.CODEC_CHUNK):
                audio.copy_(self._run(codes, slots, counts), non_blocking=True)
        deltas = [
            AudioDelta(stream.request_id, audio[row, :, : count * samples], end)
            for row, (stream, count, end) in enumerate(zip(due, counts, ended, strict=True))
        ]
        if self.stream is not None:
            self.event = self.stream.record_event()
        self._landing.append((deltas, self.event))
        for stream, end in zip(due, ended, strict=True):
            if end:
                self._end(stream.request_id)

    def _run(self, codes: Tensor, slots: list[int], counts: list[int]) -> Tensor:
        """A step of the codec, counted."""
        chunk, metrics = self.chunk, self._metrics
        replays, fallbacks = chunk.replays, Counter(chunk.fallbacks)
        audio = chunk(codes, slots, counts)
        if metrics is not None:
            metrics.replayed("codec_chunk", chunk.replays - replays)
            for reason, count in (chunk.fallbacks - fallbacks).items():
                metrics.fell_back("codec_chunk", reason, count)
            metrics.generated(audio_seconds=sum(counts) / chunk.codec.config.frame_rate)
        return audio

"""The codec at work for many requests: chunks of frames in, audio in host memory out, on a stream of its own."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from moss_runtime.engine.config import CODEC_BATCHES
from moss_runtime.engine.transport import Transport
from moss_runtime.graphs.codec_chunk import CodecChunk
from moss_runtime.graphs.requests import FrameDelta
from moss_runtime.model.codec import Codec
from moss_runtime.observe import Lap, Range, annotate
from moss_runtime.state.codec_slots import Lease

# Times of a call on the device: from the gather of its frames to its audio in host memory.
STAGES = ("transfer", "codec", "output")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Frames of one request in a call. lease: its codec slot; None: the request's only call, without a slot."""

    request_id: Hashable
    first_frame: int
    frames: int
    lease: Lease | None


@dataclasses.dataclass(frozen=True)
class Call:
    """A codec call that has been enqueued.

    Attributes:
        pieces: what it decodes.
        audio: [B, C, T * samples_per_frame] float32 or int16 in host memory, valid until `CodecStage.collected`.
        codes: [B, T, Q] int16 in host memory, likewise.
        enqueued: seconds, clock of the caller.
        event: after it audio and codes are there; None on a CPU, where they are.
        lap: times of STAGES.
        staging: the buffers behind both.
    """

    pieces: Sequence[Piece]
    audio: Tensor
    codes: Tensor
    enqueued: float
    event: torch.cuda.Event | None
    lap: Lap
    staging: tuple[Tensor, Tensor]


class CodecStage:
    """Enqueues codec calls without waiting, as many at a time as there are staging buffers in host memory.

    Attributes:
        chunk: the codec's step.
        stream: where it runs; None on a CPU.
        audio: [batch * channels * most frames * samples_per_frame] float32. What the newest call decoded with slots;
            each call is copied out on the stream before the next overwrites it.
        event: recorded after the newest call; None before the first, and on a CPU.
    """

    def __init__(
        self,
        codec: Codec,
        transport: Transport,
        *,
        slots: int,
        batch: int,
        lengths: Sequence[int],
        calls: int = 2,
        pcm: torch.dtype = torch.float32,
    ):
        """Allocates the codec's state and the staging buffers.

        Args:
            codec: on the device of the frames.
            transport: where the frames come from.
            slots: streams at a time.
            batch: most streams of a call.
            lengths: frames of a call, to which shorter ones are padded.
            calls: calls under way at a time.
            pcm: float32 (full scale 1) or int16.
        """
        self.codec, self.transport, self.pcm = codec, transport, pcm
        self.chunk = CodecChunk(codec, slots, max_batch=batch, frames=lengths)
        on_gpu = codec.device.type == "cuda"
        self.stream = torch.cuda.Stream(codec.device) if on_gpu else None
        self.event: torch.cuda.Event | None = None
        rows = batch * max(lengths)
        config = codec.config
        self.audio = torch.empty(rows * config.channels * config.samples_per_frame, device=codec.device)
        # What arrives is copied out before a buffer is used again, so the memory that is locked is bounded.
        self._staging = deque(
            (
                torch.empty(rows * config.channels * config.samples_per_frame, dtype=pcm, pin_memory=on_gpu),
                torch.empty(rows * config.codebooks, dtype=torch.int16, pin_memory=on_gpu),
            )
            for _ in range(calls)
        )
        self._calls = calls
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(codec.device))

    @property
    def free(self) -> int:
        """Calls that can be enqueued now."""
        return len(self._staging)

    @property
    def idle(self) -> bool:
        """No call is under way."""
        return len(self._staging) == self._calls

    @torch.no_grad()
    def warm_up(self, batches: Iterable[int] = CODEC_BATCHES) -> None:
        """Capture the codec's graphs, for these batch sizes up to the largest."""
        with annotate(Range.WARM_UP), torch.cuda.stream(self.stream):
            self.chunk.capture({min(batch, self.chunk.max_batch) for batch in batches})

    def lease(self) -> Lease:
        """Take a codec slot; RuntimeError if there is none."""
        with torch.cuda.stream(self.stream):
            return self.chunk.slots.lease()

    def release(self, lease: Lease) -> None:
        """Give a codec slot back; calls under way finish first, since whoever leases it next is behind them."""
        self.chunk.slots.release(lease)

    def receive(self, deltas: Sequence[FrameDelta]) -> None:
        """Take frames, in order for each request."""
        with torch.cuda.stream(self.stream):
            for event in {delta.ready_event for delta in deltas}:
                if self.stream is not None and event is not None:
                    self.stream.wait_event(event)
            for delta in deltas:
                self.transport.send(delta)

    @torch.no_grad()
    def decode(self, pieces: Sequence[Piece], now: float) -> Call:
        """Enqueue the next chunk of each request; `free` must not be 0.

        Args:
            pieces: of different requests, with codec slots.
            now: for `Call.enqueued`.

        Raises:
            Exception: whatever gathering or decoding raised; the state of these streams is undefined then.
        """
        length = max(piece.frames for piece in pieces)
        slots = self.chunk.slots.resolve([piece.lease for piece in pieces])
        counts = [piece.frames for piece in pieces]
        shape = torch.Size((len(pieces), self.codec.config.channels, length * self.codec.config.samples_per_frame))
        out = self.audio[: shape.numel()].view(shape)
        return self._enqueue(pieces, length, now, lambda codes: self.chunk(codes, slots, counts, out))

    @torch.no_grad()
    def decode_whole(self, piece: Piece, now: float) -> Call:
        """Enqueue all audio of a request at once, without a slot; `free` must not be 0.

        The memory that it takes grows with the frames; it comes from the allocators.
        """

        def decode(codes: Tensor) -> Tensor:
            # `Codec.decode` would wait for the device to check the codes.
            features = self.codec.embed(codes.to(self.codec.device))
            for module in self.codec.decoder:
                features = module(features)
            return self.codec.waveform(features)

        return self._enqueue([piece], piece.frames, now, decode)

    def collected(self, call: Call) -> None:
        """The audio of a call has been copied out, or is not wanted. Any thread may say so."""
        self._staging.append(call.staging)

    def _enqueue(self, pieces: Sequence[Piece], length: int, now: float, decode: Callable[[Tensor], Tensor]) -> Call:
        staging, lap = self._staging.popleft(), Lap(STAGES, self.codec.device)
        try:
            with annotate(Range.CODEC_CHUNK), torch.cuda.stream(self.stream):
                lap.begin()
                parts = [(piece.request_id, piece.first_frame, piece.frames) for piece in pieces]
                codes = self.transport.gather(parts, length)
                lap.end("transfer")
                audio = decode(codes)
                lap.end("codec")
                landed = tuple(map(_landing, staging, (self._samples(audio), codes)))
                lap.end("output")
                if self.stream is not None:
                    self.event = self.stream.record_event()
        except BaseException:
            self._staging.append(staging)
            raise
        return Call(pieces, *landed, now, self.event, lap, staging)

    def _samples(self, audio: Tensor) -> Tensor:
        if self.pcm == torch.float32:
            return audio
        return (audio * 32768).round_().clamp_(-32768, 32767).to(torch.int16)


def _landing(buffer: Tensor, values: Tensor) -> Tensor:
    """Values on their way into a flat buffer, or into memory of their own if they are too many."""
    if values.numel() > buffer.numel():
        buffer = torch.empty(values.numel(), dtype=buffer.dtype, pin_memory=buffer.is_pinned())
    return buffer[: values.numel()].view(values.shape).copy_(values, non_blocking=True)

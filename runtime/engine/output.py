"""From the codec's audio in host memory to the callers: copies it out, hands it on and ends requests, in order."""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from moss_runtime.engine.codec_stage import STAGES, Call, CodecStage
from moss_runtime.engine.handle import Waiter, tell
from moss_runtime.engine.jobs import Job
from moss_runtime.engine.request import AudioChunk, Result, no_codes
from moss_runtime.engine.stats import Stats
from moss_runtime.model.codec import CodecConfig

_log = logging.getLogger("moss_runtime.engine")


class Output:
    """A thread that waits for codec calls, so that the engine's own never does.

    `call` and `end` are handled in the order in which they are given; the result of a request follows its last audio.
    """

    def __init__(
        self, stage: CodecStage, stats: Stats, *, stream: bool, wake: Callable[[], None], ended: Callable[[Job], None]
    ):
        """Starts the thread.

        Args:
            stage: whose calls it collects.
            stats: what it counts in.
            stream: hand audio on as it comes; False: when its request ends.
            wake: called after each call has been collected.
            ended: called after each request's result.
        """
        self._stage, self._stats, self._stream = stage, stats, stream
        self._wake, self._ended = wake, ended
        self._config: CodecConfig = stage.codec.config
        # Each call holds a staging buffer, each end a request: neither is more than the engine allows.
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moss-output", daemon=True)
        self._thread.start()

    def call(self, call: Call, jobs: Sequence[Job]) -> None:
        """Hand out the audio of a call; jobs: of its pieces."""
        self._items.put(lambda: self._collect(call, jobs))

    def end(self, job: Job) -> None:
        """Give a request its result, once; `job.reason` and `job.error` are set."""
        self._items.put(lambda: self._finish(job))

    def close(self) -> None:
        """Handle what has been given, then stop."""
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                item()
            except Exception:
                _log.exception("a request could not be told of its audio or its end")

    def _collect(self, call: Call, jobs: Sequence[Job]) -> None:
        waiters: list[Waiter | None] = []
        try:
            if call.event is not None:
                call.event.synchronize()
            landed, audio, codes = time.perf_counter(), call.audio.numpy(), call.codes.numpy()
            for stage, milliseconds in zip(STAGES, call.lap.read() or (), strict=False):
                self._stats.count("stage_seconds", milliseconds / 1e3, stage)
            for row, (piece, job) in enumerate(zip(call.pieces, jobs, strict=True)):
                if not job.channel.aborted:
                    samples = piece.frames * self._config.samples_per_frame
                    part = audio[row, :, :samples].copy(), codes[row, : piece.frames].copy()
                    waiters.append(self._deliver(job, *part, landed))
            self._stats.count("stage_seconds", time.perf_counter() - landed, "delivery")
        except Exception as error:
            _log.exception("audio of a codec call could not be handed out")
            for job in jobs:
                job.failure = error
        finally:
            self._stage.collected(call)
            tell(waiters)
            self._wake()

    def _deliver(self, job: Job, audio: np.ndarray, codes: np.ndarray, landed: float) -> Waiter | None:
        """The next audio of a request; returns who has to be told of it."""
        delivered, first_frame = job.delivered, job.delivered.frames
        delivered.codes.append(codes)
        delivered.frames += len(codes)
        delivered.chunks += 1
        if delivered.landed is None:
            delivered.landed = landed
        if self._stream:
            return self._put(job, audio, first_frame, len(codes))
        delivered.audio.append(audio)
        return None

    def _put(self, job: Job, audio: np.ndarray, first_frame: int, frames: int) -> Waiter | None:
        delivered, channel, now = job.delivered, job.channel, time.perf_counter()
        gap = None
        if delivered.first is None:
            delivered.first = delivered.horizon = now
            self._stats.add("first_audio_seconds", now - channel.submitted)
            self._stats.first_audio(job.first_audio_stages())
        else:
            gap = now - delivered.latest
            # Who has audio left unread is not kept waiting.
            if now > delivered.horizon:
                late = not channel.chunks
                delivered.underruns += late
                self._stats.count("underruns", late)
                delivered.horizon = now
        delivered.latest = now
        delivered.horizon += frames / self._config.frame_rate
        self._stats.delivered(frames, audio.shape[1], gap)
        return channel.put(AudioChunk(audio, first_frame, frames, now - channel.submitted))

    def _finish(self, job: Job) -> None:
        delivered, channel = job.delivered, job.channel
        if job.failure is not None and job.reason in ("stop", "length"):
            job.reason, job.error = "error", job.failure
        codes = no_codes(self._config.codebooks)
        try:
            if delivered.codes:
                codes = torch.from_numpy(np.vstack(delivered.codes))
            if delivered.audio and not channel.aborted:
                tell([self._put(job, np.hstack(delivered.audio), 0, delivered.frames)])
        except Exception as error:  # too much for the memory
            job.reason, job.error = "error", error
        seconds, latency = len(codes) / self._config.frame_rate, time.perf_counter() - channel.submitted
        result = Result(
            codes=codes,
            seed=job.seed,
            finish_reason=job.reason,
            error=job.error,
            frames=len(codes),
            seconds=seconds,
            chunks=delivered.chunks if self._stream else int(delivered.first is not None),
            first_audio=None if delivered.first is None else delivered.first - channel.submitted,
            latency=latency,
            stages=job.first_audio_stages(),
        )
        self._stats.count("requests_finished", label=job.reason)
        if job.reason in ("stop", "length"):
            self._stats.add("latency_seconds", latency)
            if seconds:
                self._stats.add("rtf", latency / seconds)
        tell([channel.finish(result)])
        self._ended(job)
        _log.info("%s", json.dumps(self._record(job, result)))

    def _record(self, job: Job, result: Result) -> dict[str, object]:
        """The log line of a finished request."""
        return {
            "event": "request_finished",
            "id": job.id,
            "reason": result.finish_reason,
            "error": None if result.error is None else f"{type(result.error).__name__}: {result.error}",
            "seed": result.seed,
            "frames": result.frames,
            "seconds": round(result.seconds, 4),
            "sampling_rate": self._config.sampling_rate,
            "channels": self._config.channels,
            "chunks": result.chunks,
            "underruns": job.delivered.underruns,
            "latency_s": round(result.latency, 4),
            "first_audio_s": None if result.first_audio is None else round(result.first_audio, 4),
            "rtf": round(result.latency / result.seconds, 4) if result.seconds else None,
            "stages_s": {stage: round(seconds, 4) for stage, seconds in result.stages.items()},
        }

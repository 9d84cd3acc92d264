"""What the engine's thread does: admits requests, makes frames, feeds the codec, holds back, ends requests."""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence

from moss_runtime.engine.chunking import Chunking, Stream
from moss_runtime.engine.codec_stage import Call, CodecStage, Piece
from moss_runtime.engine.config import EngineConfig
from moss_runtime.engine.jobs import Job
from moss_runtime.engine.output import Output
from moss_runtime.engine.request import DeadlineExceeded, NoCodecSlot
from moss_runtime.engine.stats import Stats
from moss_runtime.errors import CheckpointError, PromptError
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model.tts import NOT_FINITE
from moss_runtime.state.decode_pool import PoolFull, StaleLeaseError
from moss_runtime.state.kv_cache import OutOfPages

_log = logging.getLogger("moss_runtime.engine")
# Most requests that get a row between two launches: each takes the host half a millisecond, and the device must not
# run out of frames meanwhile.
_ADMISSIONS = 8


class Scheduler:
    """All decisions over requests, on one thread; nothing here waits for the device.

    Attributes:
        waiting: requests without a row, first come first served.
        live: requests with a row, by id.
    """

    def __init__(self, config: EngineConfig, runtime: Runtime, stage: CodecStage, output: Output, stats: Stats):
        self._config, self._runtime, self._stage = config, runtime, stage
        self._output, self._stats = output, stats
        self._chunking = Chunking(config, stage.codec.config.frame_rate)
        self.waiting: list[Job] = []
        self.live: dict[int, Job] = {}
        self._admissible_since: float | None = None
        self._pressed = False
        stats.watch(
            requests_waiting=lambda: len(self.waiting),
            requests_live=lambda: len(self.live),
            rows_in_use=lambda: runtime.pool.in_use,
            codec_slots_in_use=lambda: stage.chunk.slots.null_slot - stage.chunk.slots.free,
            frames_pending=lambda: sum(job.stream.pending for job in list(self.live.values())),
        )

    @property
    def empty(self) -> bool:
        return not (self.waiting or self.live)

    def step(self) -> bool:
        """Do whatever can be done now; whether anything was."""
        ended = self._end_unwanted(time.perf_counter())
        admitted = self._admit(time.perf_counter())
        self._hold_back()
        learnt = self._make_frames()
        enqueued = self._feed_codec(time.perf_counter())
        return ended or admitted or learnt or enqueued

    def next_time(self) -> float | None:
        """When there may be something to do without a sign from elsewhere; None: never."""
        times = [job.deadline for job in self._jobs() if job.deadline is not None]
        if self._admissible_since is not None:
            times.append(self._admissible_since + self._config.prefill_wait_ms / 1e3)
        if self._stage.idle:
            streams = [job.stream for job in self.live.values() if job.stream.ripe_since is not None]
            times += map(self._chunking.deadline, streams)
        return min(times, default=None)

    def end_all(self, reason: str, error: Exception | None = None) -> None:
        """End every request, even if the device takes no orders any more."""
        for job in list(self._jobs()):
            try:
                self._end(job, reason, error)
            except Exception:
                _log.exception("what request %d holds could not be given back", job.id)

    def _jobs(self) -> Iterator[Job]:
        return itertools.chain(self.waiting, self.live.values())

    def _end_unwanted(self, now: float) -> bool:
        unwanted = [
            job
            for job in self._jobs()
            if job.channel.aborted or job.failure is not None or (job.deadline is not None and job.deadline <= now)
        ]
        for job in unwanted:
            if job.channel.aborted:
                self._end(job, "abort")
            elif job.failure is not None:
                self._end(job, "error", job.failure)
            else:
                self._end(job, "error", DeadlineExceeded(f"not finished within {job.request.deadline_s} s"))
        return bool(unwanted)

    def _end(self, job: Job, reason: str, error: Exception | None = None) -> None:
        """Give everything back that a request holds, whatever it was doing, and tell its caller."""
        try:
            if job.row is not None:
                with contextlib.suppress(StaleLeaseError):  # a launch that failed has ended it
                    self._runtime.abort(job.row, self._stage.event if job.stream.taken else None)
        finally:
            self._leave(job, reason, error)

    def _leave(self, job: Job, reason: str, error: Exception | None) -> None:
        """After the row: codec slot, and frames on their way."""
        if job.slot is not None:
            self._stage.release(job.slot)
        self._stage.transport.forget(job.id)
        job.row, job.slot = None, None
        if self.live.pop(job.id, None) is None:
            self.waiting.remove(job)
        job.reason, job.error = reason, error
        self._output.end(job)

    def _admit(self, now: float) -> bool:
        """Give rows to those who wait, several at a time if that is worth a short wait."""
        free = self._runtime.pool.free
        ready = [job for job in self.waiting if job.prompt is not None] if free and not self._pressed else []
        if not ready:
            self._admissible_since = None
            return False
        if self._admissible_since is None:
            self._admissible_since = now
        waited = 1e3 * (now - self._admissible_since)
        few = min(free, len(ready)) < self._config.prefill_batch
        if self.live and few and waited < self._config.prefill_wait_ms:
            return False
        chosen = ready[: min(free, _ADMISSIONS)]
        admitted = sum(1 for _ in itertools.takewhile(self._admit_one, chosen))
        # The rest of a group waits for nobody.
        self._admissible_since = -math.inf if admitted == len(chosen) < len(ready) else None
        return bool(admitted)

    def _admit_one(self, job: Job) -> bool:
        """Whether the next one can be tried: this one has a row now, or cannot have any."""
        config, kv = self._config, self._runtime.kv
        limit = min(config.max_frames, job.request.max_frames or config.max_frames)
        context = self._runtime.model.config.backbone.max_position_embeddings
        pages = kv.pages_for(min(len(job.prompt) - 1 + limit, kv.max_tokens, context))
        # A request gets pages for all frames from the start, so none ever has to wait half-way.
        if pages > kv.pages:
            self._end(job, "error", PromptError(f"prompt: needs {pages} KV pages, there are {kv.pages}"))
            return True
        if pages > kv.free_pages:
            return False
        if not self._stage.chunk.slots.free:
            if not job.found_no_slot:
                self._stats.count("slots_exhausted", label=config.slot_policy)
            job.found_no_slot = True
            if config.slot_policy == "queue":
                return False
            if config.slot_policy == "reject":
                self._end(job, "error", NoCodecSlot(f"all {config.slots} codec slots are taken"))
                return True
            job.stream.whole = True
        try:
            job.row = self._runtime.add(job.id, job.prompt, job.request.params, max_frames=limit, whole=True)
        except (PoolFull, OutOfPages):
            return False
        except Exception as error:
            self._end(job, "error", error)
            return True
        if not job.stream.whole:
            job.slot = self._stage.lease()
        job.seed, job.admitted = self._runtime.seed(job.row), time.perf_counter()
        job.prompt = None
        self.waiting.remove(job)
        self.live[job.id] = job
        return True

    def _hold_back(self) -> None:
        """Pause rows whose frames would wait too long for the codec; all of them, if too many wait in all."""
        config, unlearnt = self._config, self._config.unlearnt_frames
        pending, running = 0, []
        for job in self.live.values():
            if job.reason is None:
                running.append(job)
            if not self._make_room(job) and not job.stream.whole:
                pending += job.stream.pending
        pressed = pending + (1 + unlearnt) * len(running) > config.max_pending_total
        if pressed and not self._pressed:
            self._stats.count("admission_waits")
        self._pressed = pressed
        for job in running:
            stream = job.stream
            full = stream.known - stream.taken + unlearnt > config.max_pending_frames and not stream.whole
            if (full or pressed) != job.paused:
                job.paused = not job.paused
                self._runtime.pause(job.row, job.paused)
                if job.paused:
                    self._stats.count("rows_paused", label="request" if full else "total")

    def _make_room(self, job: Job) -> bool:
        """Learn what a client has read; whether it has to read before its request goes on."""
        job.channel.awaited = False
        job.stream.room = self._room(job)
        if not self._chunking.is_stalled(job.stream):
            return False
        job.channel.awaited = True
        # What was read before it could know that somebody waits.
        job.stream.room = self._room(job)
        return self._chunking.is_stalled(job.stream)

    def _room(self, job: Job) -> float:
        if not self._config.stream or job.channel.unbounded:
            return math.inf
        return self._config.max_output_frames - (job.stream.taken - job.channel.read_frames)

    def _make_frames(self) -> bool:
        """Enqueue the next launch, and take what earlier ones have made."""
        in_flight = self._runtime.in_flight
        # A launch may outlive its requests, and must be read all the same: the engine does not sleep before that.
        if not in_flight and all(job.reason is not None for job in self.live.values()):
            return False
        try:
            deltas = self._runtime.step()
        except Exception as error:
            _log.exception("a step of the runtime failed")
            if not self._end_lost(error):
                raise  # whatever it was, it would come again
            return True
        # Who was aborted may still be told of.
        deltas = [delta for delta in deltas if delta.request_id in self.live]
        if deltas:
            self._stage.receive(deltas)
        for delta in deltas:
            job = self.live[delta.request_id]
            if delta.frames and not job.stream.known:
                job.first_frame = time.perf_counter()
            job.stream.known += delta.frames
            if delta.final:
                job.stream.final, job.reason = True, delta.finish_reason
        return bool(deltas) or self._runtime.in_flight > in_flight

    def _end_lost(self, error: Exception) -> bool:
        """End the requests that a failed step has aborted; whether there are any."""
        lost = []
        for job in self.live.values():
            try:
                self._runtime.pool.check(job.row)
            except StaleLeaseError:
                lost.append(job)
        for job in lost:
            self._end(job, "error", error)
        return bool(lost)

    def _feed_codec(self, now: float) -> bool:
        """Enqueue the codec calls that are due, and let those go that are through."""
        jobs = {job.stream: job for job in self.live.values()}
        self._chunking.update(jobs, now, pressed=self._pressed)
        enqueued = False
        while self._stage.free:
            chosen = self._chunking.select(jobs, now, idle=self._stage.idle, pressed=self._pressed)
            if not chosen:
                break
            self._decode([jobs[stream] for stream, _ in chosen], chosen, now)
            enqueued = True
            jobs = {job.stream: job for job in self.live.values()}
            self._chunking.update(jobs, now, pressed=self._pressed)
        flushed = [job for job in jobs.values() if job.stream.flushed]
        for job in flushed:
            self._finish(job)
        return enqueued or bool(flushed)

    def _decode(self, jobs: Sequence[Job], chosen: Sequence[tuple[Stream, int]], now: float) -> None:
        counts = [count for _, count in chosen]
        pieces = [Piece(job.id, job.stream.taken, count, job.slot) for job, count in zip(jobs, counts, strict=True)]
        try:
            call = self._call(pieces, now, whole=jobs[0].stream.whole)
        except Exception as error:
            _log.exception("a codec call failed")
            for job in jobs:
                self._end(job, "error", error)
            return
        self._stats.count("codec_calls")
        self._stats.count("codec_rows", len(jobs))
        self._stats.count("codec_padding_frames", len(counts) * max(counts) - sum(counts))
        for job, count in zip(jobs, counts, strict=True):
            if not job.stream.taken:
                job.enqueued = now
            self._chunking.take(job.stream, count, now)
        self._output.call(call, jobs)

    def _call(self, pieces: Sequence[Piece], now: float, *, whole: bool) -> Call:
        frames = self._runtime.frame.graphs.stream
        taking_turns = frames is not None and not self._config.overlap
        if taking_turns:
            self._stage.stream.wait_stream(frames)
        call = self._stage.decode_whole(pieces[0], now) if whole else self._stage.decode(pieces, now)
        if taking_turns:
            frames.wait_event(call.event)
        return call

    def _finish(self, job: Job) -> None:
        """All its frames went to the codec; its last audio is under way."""
        self._runtime.release(job.row, self._stage.event if job.stream.taken else None)
        error = None
        if job.reason == "error":
            error = CheckpointError(NOT_FINITE.format(self._runtime.model.dtype))
        self._leave(job, job.reason, error)

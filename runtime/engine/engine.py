"""`Engine`: many requests at once in one process, their audio as early as possible, nothing without a bound."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from moss_runtime.engine.codec_stage import CodecStage
from moss_runtime.engine.config import EngineConfig
from moss_runtime.engine.handle import Channel, Handle, check_timeout
from moss_runtime.engine.jobs import Job
from moss_runtime.engine.output import Output
from moss_runtime.engine.references import ReferenceCache, codec_identity
from moss_runtime.engine.request import EngineBusy, EngineClosed, Request
from moss_runtime.engine.scheduler import Scheduler
from moss_runtime.engine.stats import Stats
from moss_runtime.engine.transport import InProcess, Transport
from moss_runtime.errors import UserError
from moss_runtime.graphs.clip_encoder import ClipEncoder
from moss_runtime.graphs.frame import STAGES
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model.codec import Codec
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import Metrics, StageTimer

_log = logging.getLogger("moss_runtime.engine")
# How long the engine's thread sleeps between two looks at the device while frames are being made, while requests wait
# for what the device gives back, and at most.
_POLL_S, _WAIT_S, _IDLE_S = 0.0002, 0.002, 0.1


class Engine:
    """Serves requests with a model and a codec on one device.

    One thread makes all decisions and enqueues all work; a second one waits for audio and hands it out; a third one
    encodes reference audio. The codes of a request are those of `MossTTS.generate` with the same seed, up to the
    rounding of the dtype, and its audio in pieces is the offline decoding of them, whatever else is served.

    Attributes:
        config: settings.
        runtime: frames.
        stage: codec.
        stats: what is counted.
        encoder: of reference audio, on a GPU; None elsewhere, and for a codec that only decodes.
        references: cache of reference audio.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: MossTTS,
        codec: Codec,
        prompts: PromptBuilder | None = None,
        *,
        metrics: Metrics | None = None,
        transport: Callable[[Tensor], Transport] = InProcess,
    ):
        """Allocates everything and starts the threads; call `warm_up` before the first request.

        Args:
            config: settings.
            model: its backbone's weights are packed in place.
            codec: on the model's device.
            prompts: makes prompts of texts; without it requests bring their own.
            metrics: gets the metrics of the runtime and of the engine.
            transport: made with the decode pool's history; keeps frames until the codec takes them.

        Raises:
            UserError: model and codec do not belong together, or are on different devices.
        """
        model.config.check_codec(codec.config)
        if codec.device != model.device:
            raise UserError(f"Engine: `codec` must be on the model's device, {model.device}, got {codec.device}")
        self.config, self._prompts = config, prompts
        self.stats, timer = Stats(), StageTimer(STAGES, model.device)
        self._timer = timer
        names = ("rows", "max_tokens", "max_frames", "pages", "frames_per_launch", "max_in_flight")
        options = {name: getattr(config, name) for name in (*names, "graphs")}
        self.runtime = Runtime(model, None, **options, metrics=metrics, timer=timer)
        self.stage = CodecStage(
            codec,
            transport(self.runtime.pool.history),
            slots=config.slots,
            batch=config.batch,
            lengths=config.chunk_lengths,
            calls=config.codec_calls,
            pcm=torch.int16 if config.pcm == "int16" else torch.float32,
        )
        if metrics is not None:
            slots = self.stage.chunk.slots
            metrics.watch(slots=lambda: slots.null_slot - slots.free)
            self.stats.register(metrics.registry)
        self._changed = threading.Condition()
        self._signal = self._draining = self._closing = False
        self._inbox: list[Job] = []
        self._open = 0
        self._ids = itertools.count()
        self._output = Output(self.stage, self.stats, stream=config.stream, wake=self._wake, ended=self._ended)
        self._scheduler = Scheduler(config, self.runtime, self.stage, self._output, self.stats)
        # On a CPU clips are no faster together, and padding is work.
        self.encoder = None
        if codec.device.type == "cuda" and len(codec.encoder):
            self.encoder = ClipEncoder(codec, config.reference_batch, metrics=metrics, graphs=config.graphs)
        self.references = ReferenceCache(
            self.encoder or codec.encode,
            codec_identity(codec),
            self.stats,
            capacity=config.reference_cache_bytes,
            batch=config.reference_batch,
            wait_s=config.reference_wait_ms / 1e3,
        )
        self.stats.watch(
            reference_cache_bytes=lambda: self.references.bytes, references_waiting=lambda: self.references.waiting
        )
        self._thread = threading.Thread(target=self._run, name="moss-engine", daemon=True)
        self._thread.start()

    def warm_up(self, progress: Callable[[], None] = lambda: None) -> None:
        """Compile, load and capture everything. progress: called for each graph of the runtime."""
        self.runtime.warm_up(progress)
        self.stage.warm_up()
        if self.encoder is not None:
            self.encoder.warm_up()

    def submit(self, request: Request) -> Handle:
        """Accept a request. Any thread may call this, and it does not wait.

        Raises:
            EngineBusy: `max_waiting` requests wait already.
            EngineClosed: the engine drains or is closed.
            PromptError: the text cannot be made a prompt. Errors found later are the handle's.
            TypeError: it is not a Request.
        """
        if not isinstance(request, Request):
            raise TypeError(f"Engine: `request` must be a Request, got {type(request).__name__}")
        job = Job(next(self._ids), request, Channel(self._wake))
        if request.text is not None and self._prompts is None:
            raise UserError("Engine: a request with `text` needs an engine with a PromptBuilder")
        if not request.references:
            job.prompt = self._own_prompt(request) if request.text is None else self._build(request, [])
            job.ready = job.channel.submitted
        with self._changed:
            self._refuse_if_full()
            self._open += 1
            self._inbox.append(job)
            self._signal = True
            self._changed.notify_all()
        self.stats.count("requests_submitted")
        if request.references:
            self._encode(job)
        return Handle(request, job.channel)

    def snapshot(self) -> dict[str, Any]:
        """All numbers, ready for JSON: see `Stats`, and graphs, frame times, settings."""
        graphs = {
            part.graphs.name: {
                "replays": part.graphs.replays,
                "fallbacks": {reason.value: count for reason, count in dict(part.graphs.fallbacks).items()},
                "hit_ratio": part.graphs.hit_ratio,
            }
            for part in (self.runtime.frame, self.runtime.prefill, self.runtime.mixed, self.encoder)
            if part is not None
        }
        chunk = self.stage.chunk
        calls = chunk.replays + chunk.fallbacks.total()
        graphs["codec"] = {
            "replays": chunk.replays,
            "fallbacks": dict(chunk.fallbacks),
            "hit_ratio": chunk.replays / calls if calls else 1.0,
        }
        frame_ms = {stage.value: times for stage, times in self._timer.percentiles().items()}
        format_ = {"sampling_rate": chunk.codec.config.sampling_rate, "channels": chunk.codec.config.channels}
        return self.stats.snapshot() | format_ | {"mode": self.config.mode, "graphs": graphs, "frame_ms": frame_ms}

    def drain(self, timeout: float | None = None) -> None:
        """Accept nothing more and wait until every accepted request has ended.

        Raises:
            TimeoutError: some have not ended by then; nothing is accepted all the same.
            ValueError: the timeout is no number of seconds; nothing has changed.
        """
        check_timeout(timeout)
        with self._changed:
            self._draining = True
            if not self._changed.wait_for(lambda: not self._open, timeout):
                raise TimeoutError(f"{self._open} requests have not ended within {timeout} s")

    def close(self) -> None:
        """Abort what has not ended, and stop. Closing again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._output.close()
        self.references.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_if_full(self) -> None:
        waiting = len(self._inbox) + len(self._scheduler.waiting)
        if self._closing or self._draining:
            self.stats.count("requests_refused", label="closed")
            raise EngineClosed("the engine takes no more requests")
        if waiting >= self.config.max_waiting:
            self.stats.count("requests_refused", label="busy")
            raise EngineBusy(f"{waiting} requests wait already")

    def _own_prompt(self, request: Request) -> Tensor:
        """A copy of a finished prompt: what the caller changes after `submit` must not reach the device unchecked."""
        prompt = request.prompt
        # One that is too long will be refused, and may be too much to copy.
        return prompt if len(prompt) > self.config.max_tokens else prompt.clone()

    def _build(self, request: Request, references: list[Tensor]) -> Tensor:
        return self._prompts.build(request.text, references=references, **request.fields)

    def _encode(self, job: Job) -> None:
        """Ask for the codes of a request's references; the last of them makes its prompt."""
        try:
            # The cache knows a clip, not whose it is and which.
            for index, clip in enumerate(job.request.references):
                self.stage.codec.check_clip(f"references[{index}]", clip)
            futures = [self.references.get(clip) for clip in job.request.references]
        except Exception as error:
            self._fail(job, error)
            return
        left = itertools.count(len(futures) - 1, -1)
        for future in futures:
            future.add_done_callback(lambda _: next(left) == 0 and self._encoded(job, futures))

    def _encoded(self, job: Job, futures: list[Future]) -> None:
        try:
            prompt = self._build(job.request, [future.result() for future in futures])
        except Exception as error:
            self._fail(job, error)
            return
        job.ready = time.perf_counter()
        job.prompt = prompt
        self._wake()

    def _fail(self, job: Job, error: Exception) -> None:
        job.failure = error
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._signal = True
            self._changed.notify_all()

    def _ended(self, job: Job) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _run(self) -> None:
        """The engine's thread."""
        device = self.runtime.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            while self._take_inbox():
                if not self._scheduler.step():
                    self._sleep()
            self._scheduler.end_all("abort")
        except Exception as error:
            # Nothing that belongs to one request gets here.
            _log.exception("the engine has stopped")
            with self._changed:
                self._closing = True
            self._take_inbox()
            self._scheduler.end_all("error", error)

    def _take_inbox(self) -> bool:
        """Let the scheduler know of new requests; whether to go on."""
        with self._changed:
            self._scheduler.waiting += self._inbox
            self._inbox.clear()
            self._signal = False
            return not self._closing

    def _sleep(self) -> None:
        """Until there may be something to do."""
        busy, soon = self.runtime.in_flight, self._scheduler.next_time()
        longest = _WAIT_S if self._scheduler.waiting else _IDLE_S
        end = time.perf_counter() + longest
        if soon is not None:
            end = min(end, soon)
        with self._changed:
            while not (self._signal or self._closing or self.runtime.landed):
                left = end - time.perf_counter()
                if left <= 0:
                    return
                self._changed.wait(min(left, _POLL_S) if busy else left)

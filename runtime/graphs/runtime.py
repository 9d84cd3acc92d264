"""`Runtime`: requests join, make frames together, and leave; the device is never waited for."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from moss_kernels import SamplingParams
from moss_runtime.errors import PromptError, UserError
from moss_runtime.graphs.audio_feed import CHUNKS, AudioFeed
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.graphs.capture import BUCKETS, bucket_for
from moss_runtime.graphs.frame import FrameGraph
from moss_runtime.graphs.launcher import Launcher
from moss_runtime.graphs.mixed import MixedStep
from moss_runtime.graphs.prefill import MAX_TOKENS, PROMPTS, Prefill, cut
from moss_runtime.graphs.requests import Flights, FrameDelta, Request
from moss_runtime.model.codec import Codec
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import Metrics, Range, StageTimer, annotate
from moss_runtime.state.decode_pool import DecodePool, RowLease
from moss_runtime.state.kv_cache import PAGE_SIZE, PagedKV

DTYPES = (torch.float32, torch.bfloat16)


class Runtime:
    """Frames of many requests on one device: pool, KV pages, prefill and frame graphs.

    `add` admits a request, `step` enqueues a prefill pass and the next frames of all live rows and returns what the
    host has learnt of earlier ones, `release` or `abort` ends it. Nothing but `wait` waits for the device: the host
    learns late which rows have finished, while the device masks them by itself. The codes of a request are those of
    `MossTTS.generate` with the same seed, up to the rounding of the dtype, whoever else is being served.

    Attributes:
        model, pool, kv: what it was made with and of.
        frame, prefill, mixed: graphs of frames, of prefill passes and of both at once, on one stream.
        feed: makes audio of frames, on a stream of its own; None without a codec.
    """

    def __init__(
        self,
        model: MossTTS,
        codec: Codec | None = None,
        *,
        rows: int,
        max_tokens: int,
        max_frames: int,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        frames_per_launch: int = 1,
        max_in_flight: int = 2,
        prefill_tokens: int = MAX_TOKENS,
        chunks: Sequence[int] = CHUNKS,
        graphs: bool = True,
        metrics: Metrics | None = None,
        timer: StageTimer | None = None,
    ):
        """Allocates everything; `warm_up` captures.

        Args:
            model: on the device and in the dtype to run in. Its backbone's weights are packed in place.
            codec: makes audio of the frames, on the same device; None: there is no `feed`.
            rows: requests at a time, at most 128.
            max_tokens: most tokens of a request in the KV cache, prompt and frames.
            max_frames: most frames of a request.
            pages: KV pages; None: enough for all rows at `max_tokens`.
            page_size: tokens of a KV page.
            frames_per_launch: frames that a step makes for each row; above 1 the host learns of them together.
            max_in_flight: launches that the host may be ahead of the device; `step` enqueues none beyond.
            prefill_tokens: most tokens of a prefill pass of several prompts. A step enqueues at most one pass while
                other rows are live, so this bounds what a running stream waits for.
            chunks: frames of the codec's first, second ... chunk of a request; see `AudioFeed`.
            graphs: False runs everything eagerly.
            metrics: for replays, eager steps, frames, seconds of audio; rows, pages and codec slots in use.
            timer: for the times of the stages `frame.STAGES` of each launch.

        Raises:
            UserError: the model is in another dtype, or the codec has other codebooks.
            ValueError: a size is not a positive integer, or there are too many rows.
        """
        sizes = {"rows": rows, "max_tokens": max_tokens, "max_frames": max_frames, "page_size": page_size}
        sizes |= {"frames_per_launch": frames_per_launch, "max_in_flight": max_in_flight}
        _check_sizes(sizes if pages is None else sizes | {"pages": pages})
        if model.dtype not in DTYPES:
            raise UserError(f"Runtime: `model` must be in float32 or bfloat16, got {model.dtype}")
        if codec is not None:
            model.config.check_codec(codec.config)
        self.model, self._metrics, self._timer = model, metrics, timer
        self._frames_per_launch, self._max_in_flight = frames_per_launch, max_in_flight
        config, common = model.config, {"dtype": model.dtype, "device": model.device}
        if pages is None:
            pages = rows * -(-max_tokens // page_size)
        self.pool = DecodePool(config, rows=rows, max_frames=max_frames, **common)
        self.kv = PagedKV(config.backbone, rows=rows, pages=pages, page_size=page_size, max_tokens=max_tokens, **common)
        largest = bucket_for(rows, BUCKETS)
        buckets = [bucket for bucket in BUCKETS if bucket <= largest]
        step = BackboneStep(model.transformer, max_batch=largest)
        graph_options = {"metrics": metrics, "graphs": graphs}
        parts = model, step, self.pool, self.kv
        frames = {"buckets": buckets, "frames": (frames_per_launch,)}
        self.frame = FrameGraph(*parts, **frames, timer=timer, **graph_options)
        passes = {"prompts": min(PROMPTS, rows), "max_tokens": prefill_tokens}
        self.prefill = Prefill(*parts, **passes, stream=self.frame.graphs.stream, **graph_options)
        self.mixed = MixedStep(self.frame, self.prefill, frames=frames_per_launch, **graph_options)
        self.feed = None if codec is None else AudioFeed(codec, streams=rows, chunks=chunks, metrics=metrics)
        if metrics is not None:
            metrics.watch(rows=lambda: self.pool.in_use, pages=lambda: pages - self.kv.free_pages)
        self._requests: dict[Hashable, Request] = {}
        self._flights = Flights(self.pool)
        launches = {"frames_per_launch": frames_per_launch, "abort": self.abort}
        self._launcher = Launcher(self.frame, self.prefill, self.mixed, self.kv, self._flights, **launches)
        self._deltas: list[FrameDelta] = []
        if model.device.type == "cuda":
            self.frame.graphs.stream.wait_stream(torch.cuda.current_stream(model.device))

    @property
    def graph_count(self) -> int:
        """Number of graphs that `warm_up` captures."""
        return sum(len(part.graphs.shapes) for part in (self.frame, self.prefill, self.mixed))

    @property
    def busy(self) -> bool:
        """Requests have frames to make, or frames that the host has not learnt of."""
        return any(not request.ended for request in self._requests.values())

    @property
    def in_flight(self) -> int:
        """Launches that the host has not learnt of."""
        return len(self._flights)

    @property
    def landed(self) -> bool:
        """The host can learn of the oldest launch now: `step` has something to return or to enqueue."""
        return self._flights.landed

    @torch.no_grad()
    def warm_up(self, progress: Callable[[], None] = lambda: None, *, prefill: bool = True) -> None:
        """Compile, load and capture everything, before the first request.

        Args:
            progress: called once for each graph.
            prefill: False leaves prefill without graphs: it starts sooner and serves each prompt a little later.
        """
        with annotate(Range.WARM_UP):
            with torch.cuda.stream(self.frame.graphs.stream):
                for part in (self.frame, self.prefill, self.mixed) if prefill else (self.frame,):
                    part.warm_up(progress)
            if self.feed is not None:
                self.feed.warm_up()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def add(
        self,
        request_id: Hashable,
        prompt: Tensor,
        params: SamplingParams,
        *,
        max_frames: int | None = None,
        whole: bool = False,
    ) -> RowLease:
        """Admit a request; its prefill begins with the next step.

        Args:
            request_id: not in use.
            prompt: [T, 1+n_vq] i64 on the CPU, as `PromptBuilder` makes it.
            params: sampling parameters; without a seed one is drawn, see `seed`.
            max_frames: limit; None: the pool's. The pool, `max_tokens` and the end of the context limit too.
            whole: it gets the KV pages of all its frames now, not as it grows.

        Raises:
            PoolFull: no row is free now.
            OutOfPages: too few KV pages are free now.
            PromptError, TypeError, ValueError: as `MossTTS.generate`, or the prompt is longer than `max_tokens`.
            Nothing has changed after an error.
        """
        limit = self.pool.max_frames if max_frames is None else max_frames
        (params,), (limit,) = self.model.admit([prompt], [params], limit)
        tokens = len(prompt) - 1
        if tokens >= self.kv.max_tokens:
            raise PromptError(f"prompt: must have at most {self.kv.max_tokens} rows here, got {len(prompt)}")
        limit = min(limit, self.pool.max_frames, self.kv.max_tokens - tokens)
        with annotate(Range.ADMIT), torch.cuda.stream(self.frame.graphs.stream):
            lease = self.pool.acquire(request_id, params, seed=params.seed, max_frames=limit, position=tokens)
            try:
                frames = limit if whole else min(self._frames_per_launch, limit)
                covered = self.kv.reserve(lease.row, tokens + frames)
            except BaseException:
                self.pool.abort(lease)
                raise
        pieces = deque(cut(lease.row, prompt, self.prefill.piece))
        self._requests[request_id] = Request(lease, tokens, limit, params.seed, pieces, covered)
        return lease

    def seed(self, lease: RowLease) -> int:
        """The seed in force."""
        return self._request(lease).seed

    def codes(self, lease: RowLease) -> Tensor:
        """A copy [n, n_vq] int64 of all frames that the host has learnt of."""
        request = self._request(lease)
        caller = torch.cuda.current_stream(self.model.device) if self.model.device.type == "cuda" else None
        with torch.cuda.stream(self.frame.graphs.stream):
            codes = self.pool.history[lease.row, : request.known].long()
            if caller is not None:
                caller.wait_stream(self.frame.graphs.stream)
                codes.record_stream(caller)
        return codes

    def pause(self, lease: RowLease, paused: bool = True) -> None:
        """Leave a row out of the next steps, or let it go on. A paused request equals an uninterrupted one."""
        self._request(lease).paused = paused

    @torch.no_grad()
    def step(self) -> list[FrameDelta]:
        """Enqueue the next work, without waiting: the next frames of every row that has room, and a prefill pass.

        A row that finds no KV pages is left out until some are free.

        Returns:
            What the host has learnt; nothing new is usual on a GPU.

        Raises:
            OutOfPages: no row can go on, no prompt waits and nothing in flight will free pages. No request has ended.
            Exception: whatever the work of the step raised; the requests in it have been aborted, others go on.
        """
        self._poll()
        if len(self._flights) < self._max_in_flight:
            shortage = self._launcher.step(self._requests.values())
            if shortage is not None and not (self._flights or self._deltas):
                raise shortage
        self._poll()
        deltas, self._deltas = self._deltas, []
        return deltas

    def wait(self) -> None:
        """Wait until the host can learn of the oldest launch."""
        self._flights.wait()

    def release(self, lease: RowLease, event: torch.cuda.Event | None = None) -> None:
        """Give everything back that a request with a final delta holds.

        Args:
            lease: of the request.
            event: recorded after the last read of its codes on another stream; None if there was none.
        """
        request = self._request(lease)
        if not request.ended:
            raise RuntimeError(f"request {lease.request_id!r} has not ended; abort it instead")
        self.pool.consumed(lease, event)
        self.pool.release(lease)
        self._forget(request)

    def abort(self, lease: RowLease, event: torch.cuda.Event | None = None) -> None:
        """End a request at any point and give everything back that it holds; frames not told of are lost.

        Args:
            lease: of the request.
            event: as in `release`.
        """
        request = self._request(lease)
        if event is not None:
            self.pool.consumed(lease, event)
        self.pool.abort(lease)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.lease.request_id]
        with torch.cuda.stream(self.frame.graphs.stream):
            self.kv.release(request.lease.row)

    def _request(self, lease: RowLease) -> Request:
        self.pool.check(lease)
        return self._requests[lease.request_id]

    def _poll(self) -> None:
        """Read the reports of launches that are over."""
        if not self._flights.landed:
            return
        if self._timer is not None:
            self._timer.collect()
        deltas = self._flights.read()
        if self._metrics is not None:
            self._metrics.generated(frames=sum(delta.frames for delta in deltas))
        self._deltas += deltas


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
            raise ValueError(f"Runtime: `{name}` must be a positive integer below 2^31, got {size!r}")
    if sizes["rows"] > BUCKETS[-1]:
        raise ValueError(f"Runtime: `rows` must be at most {BUCKETS[-1]}, got {sizes['rows']}")

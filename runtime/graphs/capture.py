"""Sets of CUDA graphs over static buffers: which shapes are captured, and what happens to a shape that is not."""

import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from moss_runtime.observe import FallbackReason, Metrics

# Batch sizes of frame graphs: rows of padding cost most beyond 64.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)

_log = logging.getLogger(__name__)

Shape = tuple[int, ...]


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; beyond the largest bucket the size itself, which no graph has."""
    return min((bucket for bucket in buckets if bucket >= size), default=size)


def free_memory(device: torch.device) -> int:
    """Bytes free on a CUDA device. The allocator gives back what it keeps unused, as it does ahead of a capture."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is left to the garbage collector inside: to free another's graph or memory breaks a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Branch:
    """Work that may run beside what the current stream gets: in a graph a branch of its own, on a CPU in its place."""

    def __init__(self, stream: torch.cuda.Stream | None):
        """Args: stream: whose priority it gets; None on a CPU."""
        self._stream = None if stream is None else torch.cuda.Stream(stream.device, priority=stream.priority)

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """What is enqueued inside runs after all that the current stream has, beside what it gets until `join`.

        Memory that it uses must not be freed before.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream gets from here on runs after all that was forked."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class GraphSet:
    """The graphs of one piece of work, one for each shape. They are captured and replayed on one stream.

    All of them share one memory pool and, since they share the stream, one cuBLAS workspace; so they never run at the
    same time, and sets that do must have streams of their own. A shape without a graph runs the same code eagerly and
    is counted by reason.

    Attributes:
        name: in metrics and log lines.
        stream: where the work runs; None on a CPU.
        replays: steps that a graph ran.
        fallbacks: eager steps by reason.
        enabled: graphs are replayed; where this is False, what was captured waits.
        seconds: time spent warming up and capturing.
        bytes: device memory that warming up and capturing took, the kernels' code included.
    """

    def __init__(
        self,
        name: str,
        shapes: Iterable[Shape],
        compute: Callable[..., None],
        *,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        priority: int = 0,
        metrics: Metrics | None = None,
        enabled: bool = True,
    ):
        """Captures nothing yet.

        Args:
            name: of the set.
            shapes: that are to have a graph.
            compute: called with the numbers of a shape, does the work from static inputs to static outputs. Run on
                what the inputs hold before the first step it must change no state.
            device: where the work runs; on a CPU there are no graphs.
            stream: of the graphs; None makes one.
            priority: of the stream that is made; what is lower runs first.
            metrics: where replays and eager steps are counted too.
            enabled: False runs everything eagerly.
        """
        self.name, self.shapes, self.compute, self.device = name, frozenset(shapes), compute, device
        self.stream = stream
        if stream is None and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=priority)
        self.replays, self.seconds, self.bytes = 0, 0.0, 0
        self.fallbacks: Counter[FallbackReason] = Counter()
        self._metrics, self.enabled = metrics, enabled
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._failed: set[Shape] = set()

    @property
    def hit_ratio(self) -> float:
        """Part of all steps that a graph ran; 1 before the first step."""
        steps = self.replays + self.fallbacks.total()
        return self.replays / steps if steps else 1.0

    def capture(self, progress: Callable[[], None] = lambda: None) -> None:
        """Capture every shape, largest first. Without graphs this does nothing.

        All shapes run once before the first capture, so that every kernel is compiled and loaded and every workspace
        allocated by then. A capture that fails is logged; its shape runs eagerly from then on.

        Args:
            progress: called once for each shape.
        """
        if self.device.type != "cuda" or not self.enabled:
            return
        start, free = time.perf_counter(), free_memory(self.device)
        shapes = sorted(self.shapes - self._graphs.keys(), reverse=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            for shape in shapes:
                self.compute(*shape)
            self.stream.synchronize()
            pool = torch.cuda.graph_pool_handle()
            with no_collection():
                for shape in shapes:
                    self._capture(shape, pool)
                    progress()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.seconds += time.perf_counter() - start
        self.bytes += free - free_memory(self.device)

    def _capture(self, shape: Shape, pool: tuple[int, int]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                self.compute(*shape)
        except RuntimeError:
            free = torch.cuda.mem_get_info(self.device)[0] / 2**20
            _log.exception(
                "%s: the graph of shape %s could not be captured (%.0f MiB are free)", self.name, shape, free
            )
            self._failed.add(shape)
        else:
            self._graphs[shape] = graph

    @torch.no_grad()
    def run(self, *shape: int) -> None:
        """Do the work of a shape on the current stream, which on CUDA must be `stream`: replay its graph, or run it."""
        graph = self._graphs.get(shape) if self.enabled else None
        if graph is not None:
            graph.replay()
            self.replays += 1
            if self._metrics is not None:
                self._metrics.replayed(self.name)
            return
        self.count_fallback(shape)
        self.compute(*shape)

    def count_fallback(self, shape: Shape) -> None:
        """Count a step of a shape that runs eagerly."""
        reason = self.reason(shape)
        self.fallbacks[reason] += 1
        if self._metrics is not None:
            self._metrics.fell_back(self.name, reason)

    def reason(self, shape: Shape) -> FallbackReason:
        """Why a shape without a graph has none."""
        if self.device.type != "cuda":
            return FallbackReason.DEVICE
        if not self.enabled:
            return FallbackReason.DISABLED
        if shape not in self.shapes:
            return FallbackReason.SHAPE
        return FallbackReason.CAPTURE_FAILED if shape in self._failed else FallbackReason.NOT_CAPTURED

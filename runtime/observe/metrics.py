"""Counters and gauges in the Prometheus format."""

import enum
from collections import Counter
from collections.abc import Callable
from functools import partial

from moss_runtime.optional import require


class FallbackReason(enum.StrEnum):
    """Why work that a CUDA graph, or the kernel of a frame, could do ran eagerly. There is no other reason."""

    DISABLED = "disabled"
    SHAPE = "shape"
    CAPTURE_FAILED = "capture_failed"
    NOT_CAPTURED = "not_captured"
    DEVICE = "device"


class Metrics:
    """The metrics of one runtime, in a registry of their own.

    - `graph_replays_total{graph}`, `fallback_total{graph, reason}`: launches of a graph, and of its work without it.
    - `graph_hit_ratio{graph}`: part of both that were replays.
    - `rows_in_use`, `kv_pages_in_use`, `codec_slots_in_use`: read when the metrics are, from what `watch` was given.
    - `frames_total`, `audio_seconds_total`: what was generated.

    Attributes:
        registry: a `prometheus_client.CollectorRegistry`.
    """

    def __init__(self):
        """Raises UserError without the package prometheus_client."""
        self._prometheus = prometheus = require("prometheus_client", "Metrics")
        self.registry = prometheus.CollectorRegistry()
        make_counter = partial(prometheus.Counter, registry=self.registry)
        make_gauge = partial(prometheus.Gauge, registry=self.registry)
        self._replays = make_counter("graph_replays", "CUDA graph launches", ["graph"])
        self._fallbacks = make_counter("fallback", "Launches without a CUDA graph", ["graph", "reason"])
        self._hit_ratios = make_gauge("graph_hit_ratio", "Replays of all launches", ["graph"])
        self._frames = make_counter("frames", "Acoustic frames generated")
        self._audio_seconds = make_counter("audio_seconds", "Seconds of audio decoded")
        self._gauges = {
            "rows": make_gauge("rows_in_use", "Rows of the decode pool that requests hold"),
            "pages": make_gauge("kv_pages_in_use", "Pages of the KV cache that requests hold"),
            "slots": make_gauge("codec_slots_in_use", "Codec slots that streams hold"),
        }
        self._watched: set[str] = set()
        self._hits: Counter[str] = Counter()
        self._launches: Counter[str] = Counter()

    def replayed(self, graph: str, count: int = 1) -> None:
        """Count launches of a graph."""
        self._launched(graph, count)
        self._hits[graph] += count
        self._replays.labels(graph).inc(count)

    def fell_back(self, graph: str, reason: FallbackReason | str, count: int = 1) -> None:
        """Count launches of a graph's work without it.

        Raises:
            ValueError: the reason is not a FallbackReason.
        """
        reason = FallbackReason(reason)
        self._launched(graph, count)
        self._fallbacks.labels(graph, reason.value).inc(count)

    def hit_ratio(self, graph: str) -> float:
        """Part of the launches that were replays; 1 before the first."""
        launches = self._launches[graph]
        return self._hits[graph] / launches if launches else 1.0

    def generated(self, *, frames: int = 0, audio_seconds: float = 0.0) -> None:
        """Count frames drawn and audio decoded."""
        self._frames.inc(frames)
        self._audio_seconds.inc(audio_seconds)

    def watch(self, **in_use: Callable[[], int]) -> None:
        """Say where to read how many `rows`, `pages`, `slots` are in use.

        Raises:
            ValueError: another runtime has said so.
        """
        taken = self._watched & in_use.keys()
        if taken:
            raise ValueError(f"Metrics: {', '.join(sorted(taken))} of another runtime are watched; make one for each")
        self._watched |= in_use.keys()
        for name, read in in_use.items():
            self._gauges[name].set_function(read)

    def text(self) -> str:
        """All metrics in the text format of Prometheus."""
        return self._prometheus.generate_latest(self.registry).decode()

    def _launched(self, graph: str, count: int) -> None:
        if graph not in self._launches:
            # A series that is there before its first event shows that nothing happened.
            self._replays.labels(graph)
            for reason in FallbackReason:
                self._fallbacks.labels(graph, reason.value)
            self._hit_ratios.labels(graph).set_function(partial(self.hit_ratio, graph))
        self._launches[graph] += count

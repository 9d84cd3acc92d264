"""What the engine counts: one set of numbers, for the JSON snapshot and for Prometheus."""

import bisect
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moss_runtime.observe import percentiles
from moss_runtime.optional import require

PERCENTILES = (50, 95, 99)
_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.09, 0.13, 0.18, 0.25, 0.5, 1, 2, 5, 10, 30)
_FRAMES = (1, 2, 4, 8, 10, 12, 15, 20, 30)
_RATIO = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 2)
_WINDOW = 8192

# name -> (meaning, label or None)
COUNTERS = {
    "requests_submitted": ("Requests accepted", None),
    "requests_refused": ("Requests that submit refused", "reason"),
    "requests_finished": ("Requests by finish reason", "reason"),
    "frames_delivered": ("Frames whose audio was handed out", None),
    "samples_delivered": ("Samples of each channel handed out", None),
    "chunks_delivered": ("Pieces of audio handed out", None),
    "underruns": ("Chunks later than the audio ahead of them lasts", None),
    "codec_calls": ("Codec calls", None),
    "codec_rows": ("Streams in all codec calls", None),
    "codec_padding_frames": ("Frames of padding in all codec calls", None),
    "slots_exhausted": ("Requests that found no codec slot", "policy"),
    "rows_paused": ("Times that a row was paused", "cause"),
    "admission_waits": ("Times that admission began to wait for the codec", None),
    "reference_hits": ("Reference clips found in the cache", None),
    "reference_joins": ("Reference clips that were being encoded for another request", None),
    "reference_misses": ("Reference clips encoded", None),
    "reference_failures": ("Reference clips that could not be encoded", None),
    "reference_evictions": ("Cache entries that made room", None),
    "stage_seconds": ("Time spent, device time where there is a device", "stage"),
}
# name -> (meaning, bounds)
DISTRIBUTIONS = {
    "first_audio_seconds": ("From submit to the first audio", _SECONDS),
    "chunk_gap_seconds": ("Between two pieces of a request's audio", _SECONDS),
    "latency_seconds": ("From submit to the end", _SECONDS),
    "chunk_frames": ("Frames of a piece of audio", _FRAMES),
    "rtf": ("Latency over seconds of audio", _RATIO),
}


class Distribution:
    """Counts by bucket for ever, and percentiles of the newest values."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value
        self._recent.append(value)

    def summary(self) -> dict[str, float]:
        """Count and, if there is one, mean and percentiles."""
        count = sum(self.counts)
        if not count:
            return {"count": 0}
        return {"count": count, "mean": self.total / count} | percentiles(self._recent, PERCENTILES)


class Stats:
    """Counters, distributions and gauges of one engine. Any thread may use it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counters: Counter[tuple[str, str | None]] = Counter()
        self._distributions: dict[str, Distribution] = {}
        self._first_audio: dict[str, Distribution] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self.reset()

    def count(self, name: str, value: float = 1, label: str | None = None) -> None:
        """Add to a counter of COUNTERS."""
        with self._lock:
            self._counters[name, label] += value

    def add(self, name: str, value: float) -> None:
        """Add a value to one of DISTRIBUTIONS."""
        with self._lock:
            self._distributions[name].add(value)

    def delivered(self, frames: int, samples: int, gap: float | None) -> None:
        """Count a piece of audio. gap: seconds since the one before it, if there was one."""
        with self._lock:
            for name, value in (("frames", frames), ("samples", samples), ("chunks", 1)):
                self._counters[f"{name}_delivered", None] += value
            self._distributions["chunk_frames"].add(frames)
            if gap is not None:
                self._distributions["chunk_gap_seconds"].add(gap)

    def first_audio(self, stages: Mapping[str, float]) -> None:
        """Seconds of the stages up to a request's first audio."""
        with self._lock:
            for stage, seconds in stages.items():
                self._first_audio.setdefault(stage, Distribution(_SECONDS)).add(seconds)

    def reset(self) -> None:
        """Begin again at zero; gauges stay."""
        with self._lock:
            self._counters.clear()
            self._distributions = {name: Distribution(bounds) for name, (_, bounds) in DISTRIBUTIONS.items()}
            self._first_audio.clear()

    def watch(self, **gauges: Callable[[], float]) -> None:
        """Say where to read a gauge."""
        self._gauges |= gauges

    def value(self, name: str, label: str | None = None) -> float:
        """A counter."""
        with self._lock:
            return self._counters[name, label]

    def snapshot(self) -> dict[str, Any]:
        """All numbers, ready for JSON: labelled counters as dictionaries, distributions as percentiles."""
        with self._lock:
            counters: dict[str, Any] = {name: 0 for name, (_, label) in COUNTERS.items() if label is None}
            counters |= {name: {} for name, (_, label) in COUNTERS.items() if label is not None}
            for (name, label), value in self._counters.items():
                if label is None:
                    counters[name] = value
                else:
                    counters[name][label] = value
            distributions = {name: distribution.summary() for name, distribution in self._distributions.items()}
            stages = {stage: distribution.summary() for stage, distribution in self._first_audio.items()}
        gauges = {name: read() for name, read in self._gauges.items()}
        return counters | distributions | {"first_audio_stages": stages} | gauges

    def register(self, registry: Any) -> None:
        """Show everything in a `prometheus_client.CollectorRegistry`, with the prefix `engine_`."""
        require("prometheus_client", "Prometheus metrics")
        registry.register(self)

    def collect(self) -> Iterator[Any]:
        """For Prometheus."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        with self._lock:
            counters = dict(self._counters)
            shapes = {
                name: (list(distribution.counts), distribution.total)
                for name, distribution in self._distributions.items()
            }
        for name, (meaning, label) in COUNTERS.items():
            family = CounterMetricFamily(f"engine_{name}", meaning, labels=[label] if label else [])
            found = {key: value for (counter, key), value in counters.items() if counter == name}
            for key, value in (found or ({} if label else {None: 0})).items():
                family.add_metric([] if key is None else [key], value)
            yield family
        for name, (meaning, bounds) in DISTRIBUTIONS.items():
            counts, total = shapes[name]
            sums = list(itertools.accumulate(counts))
            edges = [*map(str, map(float, bounds)), "+Inf"]
            family = HistogramMetricFamily(f"engine_{name}", meaning)
            family.add_metric([], list(zip(edges, sums, strict=True)), total)
            yield family
        for name, read in self._gauges.items():
            yield GaugeMetricFamily(f"engine_{name}", name.replace("_", " "), value=read())

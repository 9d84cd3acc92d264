"""Metrics, profiler ranges and stage timings."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moss_runtime.errors import UserError
from moss_runtime.observe import FallbackReason, Lap, Metrics, Range, StageTimer, annotate, percentiles, ranges


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_launches_are_counted_by_graph_and_reason():
    metrics = Metrics()
    metrics.replayed("frame", 3)
    metrics.fell_back("frame", FallbackReason.SHAPE)
    metrics.fell_back("codec", "device")
    assert value(metrics, "graph_replays_total", graph="frame") == 3
    assert value(metrics, "graph_replays_total", graph="codec") == 0
    counts = {r: value(metrics, "fallback_total", graph="frame", reason=r.value) for r in FallbackReason}
    assert counts == dict.fromkeys(FallbackReason, 0) | {FallbackReason.SHAPE: 1}
    assert value(metrics, "graph_hit_ratio", graph="frame") == metrics.hit_ratio("frame") == 0.75
    assert value(metrics, "graph_hit_ratio", graph="codec") == metrics.hit_ratio("codec") == 0
    assert metrics.hit_ratio("prefill") == 1


def test_reasons_are_a_closed_list():
    assert set(FallbackReason) == {"disabled", "shape", "capture_failed", "not_captured", "device"}
    metrics = Metrics()
    with pytest.raises(ValueError, match="other"):
        metrics.fell_back("frame", "other")
    assert metrics.hit_ratio("frame") == 1


def test_gauges_are_read_when_the_metrics_are():
    metrics, rows = Metrics(), [2]
    metrics.watch(rows=lambda: rows[0], slots=lambda: 7)
    assert value(metrics, "rows_in_use") == 2
    rows[0] = 5
    assert [value(metrics, name) for name in ("rows_in_use", "kv_pages_in_use", "codec_slots_in_use")] == [5, 0, 7]
    with pytest.raises(KeyError):
        metrics.watch(streams=lambda: 1)


def test_two_runtimes_do_not_share_metrics():
    metrics = Metrics()
    metrics.watch(rows=lambda: 1, pages=lambda: 1)
    metrics.watch(slots=lambda: 1)
    with pytest.raises(ValueError, match="rows, slots of another runtime are watched"):
        metrics.watch(rows=lambda: 2, slots=lambda: 2)


def test_registries_are_separate_and_print():
    first, second = Metrics(), Metrics()
    first.generated(frames=3, audio_seconds=0.24)
    assert value(second, "frames_total") == 0
    assert "frames_total 3.0\n" in first.text()
    assert "audio_seconds_total 0.24\n" in first.text()


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match="Metrics needs the package prometheus_client"):
        Metrics()


@pytest.fixture
def opener():
    ranges._opener.cache_clear()
    yield
    ranges._opener.cache_clear()


def test_ranges_use_nvtx_or_torch_on_cuda(opener, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    opened = []
    fake = SimpleNamespace(annotate=lambda name, domain: opened.append((name, domain)))
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    annotate(Range.FRAME)
    ranges._opener.cache_clear()
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", opened.append)
    annotate(Range.CODEC_CHUNK)
    assert opened == [("moss/frame", "moss"), "moss/codec_chunk"]


def test_ranges_do_nothing_on_a_cpu(opener, monkeypatch):
    opened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range", opened.append)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=lambda *names: opened.append(names)))
    with annotate(Range.PREFILL) as inside:
        assert inside is None
    assert opened == []


class FakeEvent:
    """An event of a device that passes it when told to."""

    def __init__(self):
        self.time = None

    def record(self):
        pass

    def query(self) -> bool:
        return self.time is not None

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.time - self.time

    def synchronize(self):
        raise AssertionError("the hot path waited")


@pytest.fixture
def events(monkeypatch):
    """Every event made, in order."""
    made = []

    def make(*, enable_timing, external):
        assert enable_timing
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", make)
    return made


def pass_events(events, *times):
    for event, time in zip(events, times, strict=False):
        event.time = time


def test_laps_are_read_when_the_device_is_through(events):
    timer = StageTimer(("backbone", "local_frame"), "cuda")
    lap = timer.lap()
    lap.begin()
    lap.end("backbone")
    lap.end("local_frame")
    timer.watch(lap)
    timer.collect()
    assert timer.percentiles() == {}
    pass_events(events, 10.0, 12.5)
    timer.collect()
    assert timer.percentiles() == {}
    pass_events(events, 10.0, 12.5, 16.0)
    timer.collect()
    timer.collect()
    assert timer.percentiles((50,)) == {"backbone": {"p50": 2.5}, "local_frame": {"p50": 3.5}}
    assert len(timer._samples) == 1 and not timer._watched


def test_a_lap_of_two_replays_is_not_read(events):
    timer = StageTimer(("backbone", "local_frame"), "cuda")
    lap = timer.lap(external=True)
    pass_events(events, 10.0, 12.0, 13.0)
    timer.watch(lap)
    # The next replay has passed its first two stamps.
    pass_events(events, 20.0, 22.0)
    timer.collect()
    assert timer.percentiles() == {}
    pass_events(events, 20.0, 22.0, 23.0)
    timer.collect()
    assert timer.percentiles((0, 100)) == {"backbone": {"p0": 2, "p100": 2}, "local_frame": {"p0": 1, "p100": 1}}


def test_percentiles_on_a_cpu(monkeypatch):
    clock = iter([0.0, 1.0, 5.0, 10.0, 12.0, 15.0, 20.0, 23.0, 25.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = StageTimer(("one", "two"), "cpu")
    for _ in range(3):
        lap = timer.lap()
        lap.begin()
        lap.end("one")
        lap.end("two")
        timer.watch(lap)
    timer.collect()
    one, two = ({"p0": 1000 * least, "p50": 1000 * least + 1000, "p100": 1000 * least + 2000} for least in (1, 2))
    assert timer.percentiles((0, 50, 100)) == {"one": one, "two": two}


def test_percentiles():
    assert percentiles([], (50,)) == {}
    assert percentiles([7.0], (20, 99)) == {"p20": 7, "p99": 7}
    assert percentiles(iter([4.0, 0.0, 1.0]), (0, 25, 50, 75)) == {"p0": 0, "p25": 0.5, "p50": 1, "p75": 2.5}


def test_unknown_stage():
    with pytest.raises(ValueError):
        Lap(("one",), torch.device("cpu")).end("three")

"""Sets of graphs: what is captured in which order, what runs eagerly and why, and that both show in the metrics."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from moss_runtime.graphs import capture
from moss_runtime.graphs.capture import BUCKETS, GraphSet, bucket_for
from moss_runtime.observe import FallbackReason, Metrics

CUDA = torch.device("cuda")


class FakeCuda:
    """Stands in for `torch.cuda`: a graph records the shapes computed inside it, a replay does them again."""

    def __init__(self):
        self.events, self.capturing, self.work = [], None, None
        self.Stream = lambda device, priority: SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
        self.current_stream = lambda device: SimpleNamespace(wait_stream=lambda other: None)
        self.cached = 2**28
        self.empty_cache = lambda: setattr(self, "cached", 0)
        self.mem_get_info = lambda device: (2**30 - self.cached - 2**20 * len(self.events), 2**31)
        self.graph_pool_handle = object
        self.stream = lambda stream: contextlib.nullcontext()

    def CUDAGraph(self):
        graph = SimpleNamespace(shapes=[])
        graph.replay = lambda: [self.work(*shape) for shape in graph.shapes]
        return graph

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.capturing = graph
        self.empty_cache()
        self.events.append(("capture", pool, stream))
        try:
            yield
        finally:
            self.capturing = None


class Work:
    """Doubles a buffer's front into another; while it is captured nothing is computed."""

    def __init__(self, cuda, broken=()):
        self.cuda, self.broken, self.calls = cuda, broken, []
        self.source, self.result = torch.arange(8.0), torch.zeros(8)
        cuda.work = self.really

    def really(self, size):
        self.result[:size] = 2 * self.source[:size]

    def __call__(self, size):
        self.calls.append((size, self.cuda.capturing is not None))
        if self.cuda.capturing is None:
            return self.really(size)
        if size in self.broken:
            raise torch.OutOfMemoryError("no memory for the graph")
        return self.cuda.capturing.shapes.append((size,))


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(capture.torch, "cuda", fake)
    return fake


def test_buckets():
    assert [bucket_for(size, BUCKETS) for size in (1, 3, 17, 64, 65, 128, 129)] == [1, 4, 24, 64, 80, 128, 129]


def test_all_shapes_run_before_the_first_capture_and_the_largest_is_captured_first(cuda):
    work = Work(cuda)
    graphs = GraphSet("work", [(2,), (8,), (4,)], work, device=CUDA)
    captured = []
    graphs.capture(lambda: captured.append(work.calls[-1][0]))
    assert work.calls == [(8, False), (4, False), (2, False), (8, True), (4, True), (2, True)]
    assert captured == [8, 4, 2]
    pools, streams = {event[1] for event in cuda.events}, {id(event[2]) for event in cuda.events}
    assert (len(pools), streams) == (1, {id(graphs.stream)})
    graphs.capture()
    assert len(work.calls) == 6


def test_the_garbage_collector_rests_during_captures(cuda):
    class Cycle:
        def __init__(self):
            self.own = self

    work, seen, left = Work(cuda), [], weakref.ref(Cycle())

    def compute(size):
        seen.append((gc.isenabled(), left() is None))
        work(size)

    GraphSet("work", [(8,), (4,)], compute, device=CUDA).capture()
    assert seen[2:] == [(False, True)] * 2 and seen[0][0] and gc.isenabled()


def test_what_the_allocator_gives_back_is_not_counted(cuda):
    graphs = GraphSet("work", [(8,), (4,)], Work(cuda), device=CUDA)
    graphs.capture()
    assert graphs.bytes == 2 * 2**20


def test_replay_equals_eager(cuda):
    work = Work(cuda)
    graphs = GraphSet("work", [(8,), (4,)], work, device=CUDA)
    graphs.capture()
    for size in (4, 8, 5):
        work.result.zero_()
        graphs.run(size)
        replayed = work.result.clone()
        work.result.zero_()
        work.really(size)
        assert torch.equal(work.result, replayed) and replayed.any()
    assert (graphs.replays, graphs.fallbacks) == (2, {FallbackReason.SHAPE: 1})


@pytest.mark.parametrize("reason", FallbackReason)
def test_each_reason_shows_and_the_work_is_done(cuda, reason, caplog):
    work = Work(cuda, broken=(4,) if reason is FallbackReason.CAPTURE_FAILED else ())
    metrics = Metrics()
    device = torch.device("cpu") if reason is FallbackReason.DEVICE else CUDA
    options = {"device": device, "metrics": metrics, "enabled": reason is not FallbackReason.DISABLED}
    graphs = GraphSet("work", [(8,), (4,)], work, **options)
    if reason is not FallbackReason.NOT_CAPTURED:
        graphs.capture()
    work.result.zero_()
    size = 3 if reason is FallbackReason.SHAPE else 4
    graphs.run(size)
    graphs.run(size)
    assert work.result.tolist() == [0, 2, 4, 6 * (size == 4), 0, 0, 0, 0]
    assert graphs.fallbacks == {reason: 2}
    assert f'fallback_total{{graph="work",reason="{reason}"}} 2.0' in metrics.text()
    assert ("no memory for the graph" in caplog.text) == (reason is FallbackReason.CAPTURE_FAILED)


def test_a_failed_capture_is_logged_once_and_leaves_the_others(cuda, caplog):
    work = Work(cuda, broken=(8,))
    graphs = GraphSet("work", [(8,), (4,)], work, device=CUDA)
    graphs.capture()
    for _ in range(3):
        graphs.run(8)
        graphs.run(4)
    assert (graphs.replays, graphs.fallbacks) == (3, {FallbackReason.CAPTURE_FAILED: 3})
    assert [record.getMessage() for record in caplog.records] == [
        "work: the graph of shape (8,) could not be captured (1023 MiB are free)"
    ]


def test_other_errors_in_a_capture_are_not_swallowed(cuda):
    graphs = GraphSet("work", [(8,)], Work(cuda), device=CUDA)
    graphs.compute = lambda size: 1 / (cuda.capturing is None)
    with pytest.raises(ZeroDivisionError):
        graphs.capture()


def test_hit_ratio(cuda):
    metrics = Metrics()
    graphs = GraphSet("work", [(8,)], Work(cuda), device=CUDA, metrics=metrics)
    assert graphs.hit_ratio == metrics.hit_ratio("work") == 1
    graphs.run(8)
    assert graphs.hit_ratio == 0
    graphs.capture()
    for _ in range(3):
        graphs.run(8)
    assert graphs.hit_ratio == metrics.hit_ratio("work") == 0.75
    assert 'graph_hit_ratio{graph="work"} 0.75' in metrics.text()
    assert 'graph_replays_total{graph="work"} 3.0' in metrics.text()

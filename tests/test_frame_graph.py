"""The frame graph's eager work on a CPU: batches reordered, shrunk, padded and paused; several frames in one launch."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import bench_frame_graph
from moss_kernels import SamplingParams, _library
from moss_runtime.graphs import frame as frame_module
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.graphs.capture import bucket_for
from moss_runtime.graphs.frame import FINISHED, STOPPED, FrameGraph
from moss_runtime.model import MossTTS
from moss_runtime.observe import FallbackReason, Metrics
from moss_runtime.random_weights import random_model
from moss_runtime.state.decode_pool import DecodePool
from moss_runtime.state.kv_cache import PagedKV

GOLDEN = Path(__file__).parent / "golden"
ROWS, FRAMES, BUCKETS = 5, 6, (1, 2, 4, 8)
# Seeds of requests that stop after 0, 1 and more frames, and of some that reach their limit.
SEEDS = (3, 14, 9, 11, 5)


@pytest.fixture(scope="module")
def model():
    return MossTTS.from_pretrained(GOLDEN / "local_hd16")


def make(model, **options):
    """A frame graph whose rows hold a request of one embedding each."""
    common = {"dtype": model.dtype, "device": "cpu"}
    pool = DecodePool(model.config, rows=ROWS, max_frames=FRAMES, **common)
    kv = PagedKV(model.config.backbone, rows=ROWS, pages=2 * ROWS, page_size=4, max_tokens=8, **common)
    kv.key_pages[:, :-1], kv.value_pages[:, :-1] = torch.nan, torch.nan
    step = BackboneStep(model.transformer, max_batch=BUCKETS[-1])
    frame = FrameGraph(model, step, pool, kv, buckets=BUCKETS, **options)
    staging = torch.randn(ROWS, model.config.backbone.hidden_size, generator=torch.Generator().manual_seed(1))
    for row, seed in enumerate(SEEDS):
        params = SamplingParams(text_temperature=0.3, repetition_penalty=1.2)
        pool.acquire(row, params, seed=seed, max_frames=FRAMES - row % 2)
        kv.reserve(row, FRAMES)
    pool.staging[:ROWS] = staging
    return frame


def state(frame):
    pool, kv = frame.pool, frame.kv
    named = {name: tensor for name, tensor in vars(pool).items() if isinstance(tensor, torch.Tensor)}
    sampling = pool.sampling
    named |= {f"sampling.{field.name}": getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    named |= {"key_pages": kv.key_pages, "value_pages": kv.value_pages}
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in named.items()}


def assert_same(one, other):
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def alone(model):
    """History, frames and flags of each row that makes all of its frames by itself."""
    frame = make(model)
    for row in range(ROWS):
        for _ in range(FRAMES):
            frame.launch([row])
    pool = frame.pool
    frames = pool.frames[:ROWS].tolist()
    assert min(frames) < 4 <= max(frames) and pool.stopped[:ROWS].any() and not pool.stopped[:ROWS].all()
    assert pool.finished.all()
    return frame


def assert_same_requests(frame, alone):
    for row in range(ROWS):
        count = alone.pool.frames[row]
        assert torch.equal(frame.pool.history[row, :count], alone.pool.history[row, :count]), row
        for name in ("frames", "stopped", "finished", "status", "positions"):
            assert getattr(frame.pool, name)[row] == getattr(alone.pool, name)[row], (name, row)


def test_reordered_shrinking_and_paused_batches(model, alone):
    frame, generator = make(model), torch.Generator().manual_seed(2)
    while not frame.pool.finished.all():
        count = int(torch.randint(1, ROWS + 1, (), generator=generator))
        rows = torch.randperm(ROWS, generator=generator)[:count].tolist()
        active = (torch.rand(count, generator=generator) < 0.7).tolist()
        before = state(frame)
        frame.launch(rows, active=active)
        if not any(active):
            assert_same(state(frame), before)
    assert_same_requests(frame, alone)


def test_several_frames_in_a_launch(model, alone):
    frame = make(model, frames=(1, 4))
    frame.launch([4, 0, 1, 3, 2], 4)
    frame.launch([4, 0, 1, 3, 2], 4)
    assert_same_requests(frame, alone)
    single = make(model)
    for _ in range(8):
        single.launch([4, 0, 1, 3, 2])
    assert_same(state(frame), state(single))


def test_inactive_rows_keep_every_bit(model):
    frame = make(model)
    frame.launch(range(ROWS))
    before = state(frame)
    frame.launch([3, 1], active=[False, False])
    frame.launch([])
    assert_same(state(frame), before)


def test_a_finished_row_keeps_every_bit(model, alone):
    before = state(alone)
    alone.launch(range(ROWS), 2)
    assert_same(state(alone), before)


def test_report(model, alone):
    report = alone.launch([2, 4, 0])
    pool = alone.pool
    assert report.shape == (3, bucket_for(3, BUCKETS))
    for column, row in enumerate((2, 4, 0)):
        frames, flags, status = report[:, column].tolist()
        assert (frames, status) == (pool.frames[row], pool.status[row])
        assert (bool(flags & FINISHED), bool(flags & STOPPED)) == (pool.finished[row], pool.stopped[row])


def test_inputs(model):
    frame = make(model)
    frame.launch([4, 2, 0], active=[True, False, True])
    assert frame.buffers.inputs[:8].tolist() == [4, 2, 0, ROWS, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="`rows` must have at most 8 entries, got 9"):
        frame.launch(range(9))
    assert frame.graphs.fallbacks == {FallbackReason.DEVICE: 1}


@pytest.mark.parametrize(
    ("backend", "dtype", "obstacle", "reason"),
    [
        ("auto", torch.bfloat16, None, None),
        ("auto", torch.float32, None, FallbackReason.SHAPE),
        ("auto", torch.float16, "not built", FallbackReason.DEVICE),
        ("triton", torch.bfloat16, None, FallbackReason.DISABLED),
        ("reference", torch.bfloat16, None, None),
    ],
)
def test_where_the_kernel_of_a_frame_runs(monkeypatch, backend, dtype, obstacle, reason):
    weights = SimpleNamespace(stop_head=SimpleNamespace(device=torch.device("cuda"), dtype=dtype))
    monkeypatch.setattr(_library, "_obstacle", lambda name, device: obstacle if name == "cuda" else None)
    monkeypatch.setattr(frame_module, "LocalFrameDecoder", lambda weights, max_batch: "kernel")
    with _library.forced_backend(backend):
        decoder, found = frame_module._decoder(weights, 8)
    assert found == reason
    assert (decoder == "kernel") == (backend == "auto" and reason is None)


def test_a_size_without_a_kernel_and_a_backend_that_is_not_there(monkeypatch):
    def refuse(weights, max_batch):
        raise NotImplementedError

    weights = SimpleNamespace(stop_head=SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))
    monkeypatch.setattr(_library, "_obstacle", lambda name, device: None)
    monkeypatch.setattr(frame_module, "LocalFrameDecoder", refuse)
    with _library.forced_backend("auto"):
        assert frame_module._decoder(weights, 8) == (None, FallbackReason.SHAPE)
    monkeypatch.setattr(_library, "_obstacle", lambda name, device: "not built")
    with _library.forced_backend("cuda"), pytest.raises(NotImplementedError, match="not built"):
        frame_module._decoder(weights, 8)


def test_frames_without_their_kernel_are_logged_once_and_counted(model, alone, monkeypatch, caplog):
    make(model)
    assert not caplog.records  # a CPU has none to miss
    monkeypatch.setattr(frame_module, "_decoder", lambda *_: (None, FallbackReason.DISABLED))
    metrics = Metrics()
    frame = make(model, metrics=metrics)
    for _ in range(FRAMES):
        frame.launch(range(ROWS))
    assert_same_requests(frame, alone)
    (record,) = caplog.records
    assert "eager PyTorch decodes frames, not the CUDA kernel (disabled; MOSS_BACKEND=" in record.getMessage()
    assert f'fallback_total{{graph="local_frame",reason="disabled"}} {float(FRAMES)}' in metrics.text()


def test_logits_that_are_not_finite_end_the_row_alone(model, alone):
    frame = make(model)
    frame.pool.staging[1] = torch.nan
    for _ in range(FRAMES):
        report = frame.launch(range(ROWS))
    assert report[2, 1] != 0 and frame.pool.frames[1] == 0 and frame.pool.finished[1]
    for row in (0, 2, 3, 4):
        count = alone.pool.frames[row]
        assert torch.equal(frame.pool.history[row, :count], alone.pool.history[row, :count])


def test_the_benchmark_runs_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_frame_graph", "--smoke"])
    bench_frame_graph.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(" ok") for line in lines) == 6


def test_the_benchmark_refuses_a_wrong_step():
    model = random_model("tiny", device="cpu", dtype=torch.bfloat16, layers=1)
    bench = bench_frame_graph.Bench(model, 4, 24)
    bench.frame.step.layers[0].o.mul_(1.05)
    reference = random_model("tiny", device="cpu", dtype=torch.bfloat16, layers=1)
    bench.model = reference
    with pytest.raises(AssertionError, match="error of the hidden states"):
        bench.check()


def test_a_failed_capture_leaves_no_stamps_behind(monkeypatch):
    """A lap of which only the beginning was stamped can never be read."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    on_gpu = SimpleNamespace(inputs=SimpleNamespace(is_cuda=True))
    frame = SimpleNamespace(buffers=on_gpu, _timer=object(), _laps={(4, 1): "half stamped", (2, 1): "whole"})
    assert FrameGraph._lap(frame, 4, 1) is None and frame._laps == {(2, 1): "whole"}

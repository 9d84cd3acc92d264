"""The engine on a GPU: graphs everywhere, codes and audio under load as alone, and everything back at the end."""

import random
import time

import pytest
import torch

from bench.bench_engine import Bench
from moss_runtime.commands.bench_engine import Workload

pytestmark = pytest.mark.gpu
MODES = ("streaming-low-latency", "streaming-balanced", "offline-fast")


@pytest.fixture(scope="module", params=["tiny", "full"])
def bench(request):
    return Bench(request.param, "cuda", clones=True)


def assert_empty(engine):
    engine.drain(60)
    torch.cuda.synchronize()
    pool, kv, slots = engine.runtime.pool, engine.runtime.kv, engine.stage.chunk.slots
    assert (pool.in_use, pool.free, kv.free_pages) == (0, engine.config.rows, kv.pages)
    assert (slots.free, engine._scheduler.empty) == (slots.null_slot, True)


def assert_graphs(engine):
    for name, graph in engine.snapshot()["graphs"].items():
        assert graph["replays"] > 0 and graph["fallbacks"] == {}, name


@pytest.mark.parametrize("overlap", [True, False])
def test_under_load_as_alone(bench, overlap):
    with bench.engine("streaming-balanced", 16, overlap=overlap) as engine:
        bench.check(engine, 24, clone=True)
        assert_graphs(engine)
        assert_empty(engine)


@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_requests_at_random(bench, mode, monkeypatch):
    """Readers that leave, are slow, or have a limit of time; who stays to the end gets the codes of the first time."""
    monkeypatch.setattr("moss_runtime.commands.bench_engine.FRAMES", (1, 40))
    rng = random.Random(0)
    with bench.engine(mode, 12, max_waiting=200) as engine:
        make = Workload(engine, clone=True)
        requests = [make(index) for index in range(25)]
        alone = [engine.submit(request).result(60).codes for request in requests]
        handles = []
        for _ in range(200):
            index = rng.randrange(len(requests))
            handles.append((engine.submit(requests[index]), index, rng.choice(("read", "leave", "slow"))))
        for handle, index, kind in handles:
            read = 0
            for chunk in handle:
                read += chunk.frames
                if kind == "leave":
                    handle.abort()
                if kind == "slow":
                    time.sleep(0.005)
            result = handle.result(60)
            assert torch.equal(result.codes, alone[index][: result.frames])
            if kind != "leave":
                assert result.frames == read == requests[index].max_frames
        assert_graphs(engine)
        assert_empty(engine)


def test_a_long_run_takes_no_memory(bench):
    with bench.engine("streaming-balanced", 8) as engine:
        bench.load(engine, 8, warm_s=1, window_s=1)
        load, growth = bench.load(engine, 8, warm_s=1, window_s=5)
        assert load.underruns == 0 and growth <= 16

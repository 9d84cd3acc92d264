"""Back-pressure: a codec or a reader that stands still makes others wait, within bounds, and everything recovers."""

import dataclasses
import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.engine import Engine, EngineBusy, EngineConfig, Request
from moss_runtime.model import MossTTS
from moss_runtime.model.codec import Codec

GOLDEN = Path(__file__).parent / "golden"
FRAMES = 24
ROWS, PENDING, TOTAL, OUTPUT, CALLS, WAITING = 4, 12, 24, 8, 2, 6


@pytest.fixture(scope="module")
def parts():
    """A model that never stops, and the codec."""
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    model.local_text_lm_head.weight.zero_()
    return model, Codec.from_pretrained(GOLDEN / "codec")


@pytest.fixture
def engine(parts):
    config = EngineConfig.from_mode(
        "streaming-low-latency",
        rows=ROWS,
        max_tokens=64,
        max_frames=FRAMES,
        chunk_ramp=[1, 2, 4],
        largest_chunk=8,
        max_pending_frames=PENDING,
        max_pending_total=TOTAL,
        max_output_frames=OUTPUT,
        max_waiting=WAITING,
        codec_calls=CALLS,
    )
    with Engine(config, *parts) as engine:
        yield engine


def request(seed):
    rows = torch.full((9, 13), 64)
    rows[:, 0] = torch.arange(3, 12)
    return Request(prompt=rows, params=SamplingParams(text_temperature=0, seed=seed))


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "did not come about in time"
        time.sleep(0.001)


def settled(engine):
    """Nothing has changed for a while: for many looks, since a collection of garbage can take all of a time."""
    seen, looks, end = None, 0, time.monotonic() + 10
    while looks < 75:
        live = list(engine._scheduler.live.values())
        state = [(job.stream.known, job.stream.taken, len(job.channel.chunks)) for job in live]
        seen, looks = state, looks + 1 if state == seen else 0
        assert time.monotonic() < end, "never came to rest"
        time.sleep(0.002)
    return live


class Gate:
    """An event that the device passes when it is told to."""

    def __init__(self):
        self.open = threading.Event()

    def synchronize(self):
        assert self.open.wait(20)

    def query(self):
        return self.open.is_set()


@pytest.fixture
def gate(engine, monkeypatch):
    """Once `stall` is called, codec calls do not end before the gate is open."""
    gate, decode = Gate(), engine.stage.decode

    def gated(pieces, now):
        call = decode(pieces, now)
        engine.stage.event = gate
        return dataclasses.replace(call, event=gate)

    gate.stall = lambda: monkeypatch.setattr(engine.stage, "decode", gated)
    yield gate
    gate.open.set()


def test_with_the_codec_stalled_everything_stays_bounded_and_recovers(engine, gate):
    free = [engine.submit(request(seed)).result(20).codes for seed in range(3)]
    gate.stall()
    handles = [engine.submit(request(seed)) for seed in range(ROWS)]
    wait_until(lambda: len(engine._scheduler.live) == ROWS)
    live = settled(engine)
    pending = [job.stream.pending for job in live]
    assert max(pending) <= PENDING and sum(pending) <= TOTAL
    # Nearly all that may wait does: it is the bounds that stop it, not something else.
    assert sum(pending) > TOTAL - ROWS * (1 + engine.config.unlearnt_frames)
    assert not engine.stage.idle and all(job.paused for job in live)
    # With rows paused nobody is admitted, then nobody is accepted.
    more = []
    with pytest.raises(EngineBusy):
        while True:
            more.append(engine.submit(request(10 + len(more))))
    assert len(more) == WAITING
    # An abort is heard all the same.
    handles[0].abort()
    wait_until(lambda: len(engine._scheduler.live) == ROWS - 1)
    assert len(settled(engine)) == ROWS - 1 and len(engine._scheduler.waiting) == WAITING
    assert engine.stats.value("rows_paused", "total") >= ROWS
    assert engine.stats.value("admission_waits") >= 1
    gate.open.set()
    for handle in (*handles[1:], *more):
        assert handle.result(20).frames == FRAMES
    assert all(torch.equal(handle.result().codes, codes) for handle, codes in zip(handles[1:], free[1:], strict=False))
    engine.drain(20)
    assert (engine.runtime.pool.in_use, engine.stage.chunk.slots.free) == (0, ROWS)
    wait_until(lambda: engine.stage.idle)


def test_a_free_row_stays_free_while_too_much_waits_for_the_codec(engine, gate):
    gate.stall()
    handles = [engine.submit(request(seed)) for seed in range(ROWS - 1)]
    wait_until(lambda: len(engine._scheduler.live) == ROWS - 1)
    settled(engine)
    handles.append(engine.submit(request(9)))
    settled(engine)
    assert (engine.runtime.pool.free, len(engine._scheduler.waiting)) == (1, 1)
    gate.open.set()
    assert [handle.result(20).frames for handle in handles] == [FRAMES] * ROWS


def test_chunks_grow_when_the_codec_lags(engine, gate):
    gate.stall()
    handle = engine.submit(request(1))
    settled(engine)
    gate.open.set()
    sizes = [chunk.frames for chunk in handle]
    # The ramp 1, 2, 4 would go on with 4; what has piled up goes in pieces as large as the reader has room for.
    assert sizes[0] == 1 and max(sizes) > 4 and sum(sizes) == FRAMES


def test_a_slow_reader_stops_only_its_own_request(engine):
    slow = engine.submit(request(1))
    for seed in range(2, 5):
        others = [engine.submit(request(seed)) for _ in range(2)]
        assert [sum(chunk.frames for chunk in other) for other in others] == [FRAMES, FRAMES]
    (job,) = settled(engine)
    assert job.channel is slow._channel and job.paused
    unread = job.stream.taken - slow.read_frames
    assert 0 < unread <= OUTPUT and job.stream.pending <= PENDING
    assert engine.stats.value("rows_paused", "request") >= 1
    chunks = list(slow)
    assert sum(chunk.frames for chunk in chunks) == FRAMES
    assert engine.submit(request(1)).result(20).codes.equal(slow.result(20).codes)


def test_slow_readers_in_every_row_do_not_press_each_other(engine):
    """What they leave unread counts for each alone; the first that reads goes on while the others stand."""
    handles = [engine.submit(request(seed)) for seed in range(ROWS)]
    wait_until(lambda: len(engine._scheduler.live) == ROWS)
    live = settled(engine)
    assert all(0 < job.stream.pending <= PENDING for job in live)
    assert engine.stats.value("admission_waits") <= 1
    assert sum(chunk.frames for chunk in handles[2]) == FRAMES
    for handle in handles:
        handle.abort()
    engine.drain(20)
    assert engine.runtime.pool.in_use == 0


def test_reading_wakes_the_engine_only_if_it_waits_for_that(engine, monkeypatch):
    woken = []
    # Nothing but a sign from the reader ends the wait of a request that is held back.
    monkeypatch.setattr("moss_runtime.engine.engine._IDLE_S", 60.0)
    slow = engine.submit(request(1))
    (job,) = settled(engine)
    assert job.channel.awaited and len(job.channel.chunks) > 1
    monkeypatch.setattr(job.channel, "on_change", lambda: (woken.append(job.channel.read_frames), engine._wake()))
    assert sum(chunk.frames for chunk in slow) == FRAMES
    # Towards the end its audio fits whether it reads or not.
    assert woken[0] == 1 and woken[-1] < FRAMES


def test_launches_that_outlive_their_requests_are_read(engine):
    """Unread ones would keep the engine from sleeping."""
    engine.runtime._flights.add([], torch.zeros(3, 1, dtype=torch.int32))
    engine._wake()
    wait_until(lambda: not engine.runtime.in_flight)


def test_waiting_for_the_result_lets_a_request_go_on(engine):
    handle = engine.submit(request(1))
    settled(engine)
    assert not handle.done
    assert handle.result(20).frames == FRAMES
    assert sum(chunk.frames for chunk in handle) == FRAMES


def test_a_request_whose_reader_is_gone_ends(engine):
    """Its audio would wait for a reader for ever, and everything that it holds with it."""
    abandoned = [engine.submit(request(seed)) for seed in range(ROWS)]
    for handle in abandoned:
        for _ in handle:
            break
    settled(engine)
    del abandoned, handle
    assert engine.submit(request(9)).result(5).frames == FRAMES
    engine.drain(5)
    assert (engine.runtime.pool.in_use, engine.stats.value("requests_finished", "abort")) == (0, ROWS)


def test_memory_of_a_long_run_is_that_of_a_short_one(engine):
    """Nothing is kept of requests that have ended."""
    ended = []
    for seed in range(4):
        handle = engine.submit(dataclasses.replace(request(seed), max_frames=3))
        handle.result(20)
        ended.append(weakref.ref(handle._channel))
        del handle
    engine.drain(20)
    time.sleep(0.3)  # the engine's thread and the output thread let go of the last one
    gc.collect()
    assert sum(channel() is not None for channel in ended) <= 1

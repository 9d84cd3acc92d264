"""The engine when something fails or runs out: who is hit is told, nobody else notices, what was held comes back."""

import dataclasses
import threading

import pytest
import torch
from engine_support import (
    ENDLESS,
    FRAMES,
    GOLDEN,
    assert_audio,
    assert_empty,
    assert_result,
    generate,
    make,
    make_model,
    make_prompts,
)

from moss_runtime.engine import DeadlineExceeded, EngineBusy, EngineClosed, NoCodecSlot, Request
from moss_runtime.errors import UserError
from moss_runtime.model.codec import Codec
from moss_runtime.state.kv_cache import PAGE_SIZE


@pytest.fixture(scope="module")
def codec():
    return Codec.from_pretrained(GOLDEN / "codec")


@pytest.fixture(scope="module")
def endless():
    return make_model(endless=True)


def test_aborts_at_every_stage(endless, codec):
    """Waiting, between prefill and the first frame, with audio on its way, at the end: a request may leave anywhere."""
    prompt = make_prompts()[0]
    with make(endless, codec, rows=1) as engine:
        first, second, third = (engine.submit(Request(prompt=prompt, params=ENDLESS)) for _ in range(3))
        second.abort()
        assert second.result(20).finish_reason == "abort"
        assert second.result().frames == 0
        next(first)
        first.abort()
        result = first.result(20)
        assert (result.finish_reason, result.error) == ("abort", None)
        assert 1 <= result.frames < FRAMES
        assert_audio([], torch.empty(0, 12), codec)
        assert third.result(20).finish_reason == "length"
        third.abort()
        assert third.result().finish_reason == "length"
        assert_empty(engine)


def test_deadlines(endless, codec):
    prompt = make_prompts()[0]
    with make(endless, codec, rows=1) as engine:
        slow = engine.submit(Request(prompt=prompt, params=ENDLESS))
        late = engine.submit(Request(prompt=prompt, params=ENDLESS, deadline_s=0.01))
        with pytest.raises(DeadlineExceeded, match=r"not finished within 0.01 s"):
            list(late)
        assert late.result().finish_reason == "error"
        assert slow.result(20).finish_reason == "length"
        assert_empty(engine)


@pytest.mark.parametrize("part", ["frames", "codec"])
def test_a_failure_of_the_device_ends_who_was_in_it_and_nobody_later(endless, codec, monkeypatch, part):
    request = Request(prompt=make_prompts()[0], params=dataclasses.replace(ENDLESS, seed=1))
    with make(endless, codec) as engine:
        calm = engine.submit(request).result(20)
        owner, name = (engine.runtime.pool, "advance") if part == "frames" else (engine.stage, "chunk")

        def fails(*_, **__):
            monkeypatch.undo()
            raise RuntimeError("the device is gone")

        if part == "codec":
            fails.slots = engine.stage.chunk.slots
        monkeypatch.setattr(owner, name, fails)
        lost = engine.submit(request)
        assert "the device is gone" in str(lost.result(20).error)
        assert torch.equal(engine.submit(request).result(20).codes, calm.codes)
        assert_empty(engine)


def test_without_a_free_codec_slot(endless, codec):
    requests = [
        Request(prompt=prompt, params=dataclasses.replace(ENDLESS, seed=seed), max_frames=9)
        for seed, prompt in enumerate(make_prompts()[:3])
    ]
    whole = [generate(make_model(endless=True), request) for request in requests]
    for policy in ("queue", "offline", "reject"):
        with make(endless, codec, rows=3, codec_slots=1, slot_policy=policy) as engine:
            handles = [engine.submit(request) for request in requests]
            chunks = [[] if policy == "reject" and index else list(handle) for index, handle in enumerate(handles)]
            reasons = [handle.result(20).finish_reason for handle in handles]
            exhausted = engine.stats.value("slots_exhausted", policy)
            assert_empty(engine)
        if policy == "reject":
            assert reasons == ["length", "error", "error"] and exhausted == 2
            assert all(isinstance(handle.result().error, NoCodecSlot) for handle in handles[1:])
            continue
        assert reasons == ["length"] * 3 and exhausted == 2
        assert [len(one) for one in chunks] == ([4, 1, 1] if policy == "offline" else [4, 4, 4])
        for handle, one, parts in zip(handles, whole, chunks, strict=True):
            assert_result(handle, one)
            assert_audio(parts, one.codes, codec)


def test_kv_pages_are_promised_so_that_nobody_waits_half_way(endless, codec):
    request = Request(prompt=make_prompts()[0], params=ENDLESS)
    with make(endless, codec, pages=1, max_tokens=100) as engine:
        handles = [engine.submit(request) for _ in range(3)]
        assert {handle.result(20).finish_reason for handle in handles} == {"length"}
        long = Request(prompt=make_prompts()[0].repeat(6, 1), params=ENDLESS)
        assert "needs 2 KV pages, there are 1" in str(engine.submit(long).result(20).error)
        assert_empty(engine)


def test_a_request_that_ends_with_the_context_needs_no_pages_beyond(endless, codec):
    context = endless.config.backbone.max_position_embeddings
    prompt = make_prompts()[0].repeat(context, 1)[-(context - 2) :]
    with make(endless, codec, pages=-(-context // PAGE_SIZE), max_tokens=2 * context) as engine:
        result = engine.submit(Request(prompt=prompt, params=ENDLESS)).result(60)
        assert (result.error, result.frames, result.finish_reason) == (None, 3, "length")
        assert_empty(engine)


def test_a_codec_that_does_not_fit_is_refused(endless, codec):
    threads = threading.active_count()
    other = dataclasses.replace(codec.config, quantizer=dataclasses.replace(codec.config.quantizer, codebooks=4))
    with pytest.raises(UserError, match="the codec 4 of 64: they do not belong together"):
        make(endless, Codec.on_meta(other, torch.float32))
    with pytest.raises(UserError, match="`codec` must be on the model's device, cpu, got meta"):
        make(endless, Codec.on_meta(codec.config, torch.float32))
    assert threading.active_count() == threads


@pytest.mark.parametrize("failing", ["np.hstack", "np.vstack", "json.dumps"])
def test_what_fails_at_the_end_of_one_request_harms_no_other(endless, codec, monkeypatch, failing):
    request = Request(prompt=make_prompts()[0], params=ENDLESS)
    with make(endless, codec, mode="offline-fast") as engine:

        def fails(*_, **__):
            monkeypatch.undo()
            raise MemoryError("too much")

        monkeypatch.setattr(f"moss_runtime.engine.output.{failing}", fails)
        result = engine.submit(request).result(20)
        assert result.finish_reason == ("length" if failing == "json.dumps" else "error")
        assert engine.submit(request).result(20).finish_reason == "length"
        assert_empty(engine)


def test_drain_and_close(endless, codec):
    request = Request(prompt=make_prompts()[0], params=ENDLESS)
    with make(endless, codec, rows=1, max_waiting=2) as engine:
        handles = [engine.submit(request)]
        next(handles[0])  # it has the row now
        handles += [engine.submit(request) for _ in range(2)]
        with pytest.raises(EngineBusy, match="2 requests wait already"):
            engine.submit(request)
        with pytest.raises(TimeoutError, match="3 requests have not ended"):
            engine.drain(0.001)
        with pytest.raises(EngineClosed):
            engine.submit(request)
        for handle in handles:
            handle.result(20)
        assert_empty(engine)
    engine = make(endless, codec, rows=1)
    handles = [engine.submit(request) for _ in range(3)]
    engine.close()
    engine.close()
    assert {handle.result(5).finish_reason for handle in handles} <= {"abort", "length"}
    with pytest.raises(EngineClosed):
        engine.submit(request)
    assert_empty(engine)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e30, "5"])
def test_timeouts_that_are_none(endless, codec, timeout):
    """A condition waits for NaN seconds by looking again and again, so that nobody else gets on."""
    with make(endless, codec, rows=1) as engine:
        handle = engine.submit(Request(prompt=make_prompts()[0], params=ENDLESS))
        for wait in (handle.result, engine.drain):
            with pytest.raises(ValueError, match="`timeout` must be None or a number of seconds"):
                wait(timeout)
        assert handle.result(20).finish_reason == "length"


def test_a_fault_of_the_engine_itself_leaves_nobody_waiting(endless, codec, monkeypatch):
    engine = make(endless, codec)
    monkeypatch.setattr(engine._scheduler, "_hold_back", lambda: 1 / 0)
    handle = engine.submit(Request(prompt=make_prompts()[0]))
    assert isinstance(handle.result(5).error, ZeroDivisionError)
    with pytest.raises(EngineClosed):
        engine.submit(Request(prompt=make_prompts()[0]))
    engine.close()


def test_a_device_that_takes_no_orders_leaves_nobody_waiting(endless, codec, monkeypatch):
    """After such a failure nothing can be given back, but everybody is told."""

    def fails(*_):
        raise RuntimeError("the device is gone")

    engine = make(endless, codec, rows=2)
    handles = [engine.submit(Request(prompt=make_prompts()[0], params=ENDLESS)) for _ in range(4)]
    next(handles[0])
    monkeypatch.setattr(engine.runtime.kv, "release", fails)
    handles[0].abort()
    assert [handle.result(5).finish_reason for handle in handles] == ["abort", "error", "error", "error"]
    assert all("the device is gone" in str(handle.result().error) for handle in handles[1:])
    engine.drain(5)
    engine.close()

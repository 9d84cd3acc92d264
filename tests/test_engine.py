"""The engine on a CPU: every request gets its own codes and its own audio, and everything back that it held."""

import asyncio
import dataclasses
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.engine import (
    DeadlineExceeded,
    Engine,
    EngineBusy,
    EngineClosed,
    EngineConfig,
    NoCodecSlot,
    Request,
)
from moss_runtime.engine.transport import HostCopy, InProcess
from moss_runtime.errors import AudioError, CheckpointError, PromptError, UserError
from moss_runtime.model import MossTTS
from moss_runtime.model.codec import Codec

GOLDEN = Path(__file__).parent / "golden"
PAD, FRAMES, SAMPLES = 64, 24, 8
# A stop head of zeros continues for ever: of equal scores the lower id is taken.
ENDLESS = SamplingParams(text_temperature=0)
MODES = ("offline-fast", "streaming-low-latency", "streaming-balanced")


def make_prompts():
    generator = torch.Generator().manual_seed(11)
    prompts = []
    for length in (9, 1, 23, 2, 14, 5, 17):
        rows = torch.randint(0, PAD, (length, 13), generator=generator)
        rows[torch.rand(length, generator=generator) < 0.6, 1:] = PAD
        rows[-1] = torch.tensor([3] + [PAD] * 12)
        prompts.append(rows)
    return prompts


def make_model(*, endless=False):
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    if endless:
        model.local_text_lm_head.weight.zero_()
    return model


@pytest.fixture(scope="module")
def codec():
    return Codec.from_pretrained(GOLDEN / "codec")


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def endless():
    return make_model(endless=True)


@pytest.fixture(scope="module")
def requests():
    """Outputs of no frame, of a few, and of as many as allowed."""
    params = [SamplingParams(text_temperature=0.2, seed=seed) for seed in (1, 2, 3, 4, 35)]
    params += [
        SamplingParams(temperature=0, text_temperature=0, seed=0),
        SamplingParams(seed=8, repetition_penalty=1.4),
    ]
    limits = (None, 3, None, 1, 7, None, 12)
    return [
        Request(prompt=prompt, params=one, max_frames=limit)
        for prompt, one, limit in zip(make_prompts(), params, limits, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(requests):
    return [generate(make_model(), request) for request in requests]


def generate(model, request):
    return model.generate([request.prompt], [request.params], max_frames=request.max_frames or FRAMES)[0]


def make(model, codec, mode="streaming-low-latency", *, transport=InProcess, **changes):
    options = {"rows": 4, "max_tokens": 64, "max_frames": FRAMES, "reference_wait_ms": 1.0} | changes
    return Engine(EngineConfig.from_mode(mode, **options), model, codec, transport=transport)


def assert_empty(engine):
    """Whatever was served, nothing is held any more."""
    engine.drain(20)
    pool, kv, slots = engine.runtime.pool, engine.runtime.kv, engine.stage.chunk.slots
    assert (pool.in_use, pool.free, kv.free_pages) == (0, engine.config.rows, kv.pages)
    assert slots.free == slots.null_slot
    assert engine._scheduler.empty and engine._scheduler._pages == 0
    transport = engine.stage.transport
    assert not (transport._first if isinstance(transport, InProcess) else transport._sent)
    deadline = time.monotonic() + 5
    while not engine.stage.idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def assert_audio(chunks, codes, codec):
    """The chunks are whole, in order, and together the offline waveform."""
    assert [chunk.first_frame for chunk in chunks] == numpy.cumsum([0, *[c.frames for c in chunks]])[:-1].tolist()
    assert all(chunk.frames > 0 and chunk.pcm.shape == (2, chunk.frames * SAMPLES) for chunk in chunks)
    assert sum(chunk.frames for chunk in chunks) == len(codes)
    if chunks:
        offline = codec.decode(codes[None].long())[0]
        audio = torch.from_numpy(numpy.concatenate([chunk.pcm for chunk in chunks], axis=1))
        assert (audio - offline).abs().max() <= 1e-5 * offline.abs().max()


def assert_result(handle, expected):
    result = handle.result(20)
    assert torch.equal(result.codes.long(), expected.codes)
    assert (result.finish_reason, result.seed, result.error) == (expected.finish_reason, expected.seed, None)
    assert (result.frames, result.seconds) == (len(expected.codes), len(expected.codes) / 100)


@pytest.mark.parametrize("transport", [InProcess, lambda history: HostCopy()])
@pytest.mark.parametrize("mode", MODES)
def test_codes_are_those_of_the_model_and_audio_is_the_offline_decoding(
    model, codec, requests, expected, mode, transport
):
    assert {len(one.codes) for one in expected} >= {0, 1, 3}
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    with make(model, codec, mode, transport=transport) as engine:
        handles = [engine.submit(request) for request in requests]
        for handle, one in zip(handles, expected, strict=True):
            chunks = list(handle)
            assert_audio(chunks, one.codes, codec)
            assert_result(handle, one)
            if mode == "offline-fast":
                assert len(chunks) == bool(len(one.codes))
        assert_empty(engine)


@pytest.mark.parametrize(
    "changes", [{"chunk_ramp": [3], "largest_chunk": 5}, {"chunk_ramp": [2, 5], "largest_chunk": 5, "codec_batch": 1}]
)
def test_any_chunk_schedule_gives_the_same_audio(endless, codec, changes):
    request = Request(prompt=make_prompts()[0], params=dataclasses.replace(ENDLESS, seed=5))
    with make(endless, codec, **changes) as engine:
        handles = [engine.submit(request) for _ in range(3)]
        for handle in handles:
            chunks = list(handle)
            assert_audio(chunks, handle.result().codes, codec)
            assert max(chunk.frames for chunk in chunks) <= 5
            assert torch.equal(handle.result().codes, handles[0].result().codes)
        assert_empty(engine)


def test_streaming_sends_the_first_frame_while_later_ones_are_made(endless, codec):
    with make(endless, codec) as engine:
        handle = engine.submit(Request(prompt=make_prompts()[0], params=ENDLESS))
        first = next(handle)
        assert (first.frames, handle.done) == (1, False)
        sizes = [first.frames, *[chunk.frames for chunk in handle]]
        assert sizes == [1, 2, 4, 8, 9]
        result = handle.result()
        assert (result.chunks, result.frames, result.finish_reason) == (5, FRAMES, "length")
        assert result.first_audio == pytest.approx(first.time)
        assert 0 < first.time < result.latency
        assert sum(result.stages.values()) == pytest.approx(result.first_audio)
        assert min(result.stages.values()) >= 0


def test_asyncio_readers(model, codec, requests, expected):
    async def read(engine, request):
        handle = engine.submit(request)
        return [chunk async for chunk in handle], handle

    async def read_all(engine):
        return await asyncio.gather(*[read(engine, request) for request in requests])

    with make(model, codec) as engine:
        for (chunks, handle), one in zip(asyncio.run(read_all(engine)), expected, strict=True):
            assert_audio(chunks, one.codes, codec)
            assert_result(handle, one)
        assert_empty(engine)


def test_a_second_asyncio_reader_is_refused_and_a_cancelled_one_replaced(endless, codec):
    async def read(handle):
        return [chunk async for chunk in handle]

    async def main(engine):
        busy, handle = (engine.submit(Request(prompt=make_prompts()[0], params=ENDLESS)) for _ in range(2))
        reader = asyncio.create_task(read(handle))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader at a time"):
            await anext(handle)
        reader.cancel()
        await asyncio.wait([reader])
        chunks = await asyncio.wait_for(read(handle), 20)
        return busy.result(20).codes, handle.result(20).codes, chunks

    with make(endless, codec, rows=1) as engine:
        _, codes, chunks = asyncio.run(main(engine))
        assert_audio(chunks, codes, codec)


def test_submit_from_many_threads(model, codec, requests, expected):
    failures = []

    def client(index):
        try:
            for turn in range(3):
                which = (index + turn) % len(requests)
                handle = engine.submit(requests[which])
                assert_audio(list(handle), expected[which].codes, codec)
                assert_result(handle, expected[which])
        except BaseException as error:
            failures.append(error)

    with make(model, codec) as engine:
        threads = [threading.Thread(target=client, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert_empty(engine)


def test_int16_samples(model, codec, requests, expected):
    which = max(range(len(expected)), key=lambda index: len(expected[index].codes))
    offline = codec.decode(expected[which].codes[None])[0]
    with make(model, codec, pcm="int16") as engine:
        pcm = numpy.concatenate([chunk.pcm for chunk in engine.submit(requests[which])], axis=1)
    assert pcm.dtype == numpy.int16
    limited = (offline * 32768).clamp(-32768, 32767)
    assert (torch.from_numpy(pcm) - limited).abs().max() <= 1


def test_a_bad_request_fails_alone(model, codec, requests, expected):
    wrong = requests[0].prompt.clone()
    wrong[3, 2] = 65
    bad = [Request(prompt=wrong), Request(prompt=torch.zeros(70, 13, dtype=torch.int64)), Request(prompt=wrong.int())]
    with make(model, codec) as engine:
        handles = [engine.submit(request) for pair in zip(bad, requests, strict=False) for request in pair]
        for handle, kind in zip(handles[::2], (PromptError, PromptError, TypeError), strict=True):
            result = handle.result(20)
            assert (result.finish_reason, result.frames, result.seed) == ("error", 0, None)
            assert isinstance(result.error, kind)
            with pytest.raises(kind):
                next(handle)
        for handle, one in zip(handles[1::2], expected, strict=False):
            assert_result(handle, one)
        with pytest.raises(UserError, match="needs an engine with a PromptBuilder"):
            engine.submit(Request("hello"))
        assert_empty(engine)


def test_a_bad_reference_is_named_as_the_request_has_it(model, codec):
    class Prompts:
        def build(self, text, *, references):
            return make_prompts()[0]

    good, nan = torch.zeros(2, 80), torch.full((2, 80), torch.nan)
    config = EngineConfig.from_mode("offline-fast", rows=1, max_tokens=64, max_frames=2)
    with Engine(config, model, codec, Prompts()) as engine:
        for clips, message in (
            ([good, nan], r"references\[1\] holds NaN"),
            ([good, good, good[:1]], r"references\[2\] must be \[2, samples\], got \[1, 80\]"),
        ):
            with pytest.raises(AudioError, match=message):
                list(engine.submit(Request("hello", references=clips)))
        assert engine.submit(Request("hello", references=[good, good])).result(20).error is None


def test_a_prompt_may_change_after_submit(model, codec, requests, expected):
    with make(model, codec, rows=1) as engine:
        first = engine.submit(requests[0])
        prompt = requests[2].prompt.clone()
        second = engine.submit(dataclasses.replace(requests[2], prompt=prompt))
        prompt.fill_(-7)
        for handle, one in ((first, expected[0]), (second, expected[2])):
            assert_result(handle, one)
        huge = torch.zeros(1, 13, dtype=torch.int64).expand(10**9, 13)
        assert isinstance(engine.submit(Request(prompt=huge)).result(20).error, PromptError)
        with pytest.raises(TypeError, match="`request` must be a Request, got str"):
            engine.submit("hello")


def test_logits_that_are_not_finite_end_one_request(codec, requests, expected):
    model = make_model()
    broken = requests[0].prompt.clone()
    broken[4, 0] = 77
    model.transformer.embed_tokens.weight[77] = torch.nan
    with make(model, codec) as engine:
        bad, good = engine.submit(Request(prompt=broken)), engine.submit(requests[2])
        assert isinstance(bad.result(20).error, CheckpointError)
        assert_result(good, expected[2])
        assert_empty(engine)


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


def test_a_codec_that_does_not_fit_is_refused(endless, codec):
    threads = threading.active_count()
    other = dataclasses.replace(codec.config, quantizer=dataclasses.replace(codec.config.quantizer, codebooks=4))
    with pytest.raises(UserError, match="the codec 4 of 64: they do not belong together"):
        make(endless, Codec.on_meta(other, torch.float32))
    with pytest.raises(UserError, match="`codec` must be on the model's device, cpu, got meta"):
        make(endless, Codec.on_meta(codec.config, torch.float32))
    assert threading.active_count() == threads


@pytest.mark.parametrize("failing", ["torch.cat", "json.dumps"])
def test_what_fails_at_the_end_of_one_request_harms_no_other(endless, codec, monkeypatch, failing):
    request = Request(prompt=make_prompts()[0], params=ENDLESS)
    with make(endless, codec, mode="offline-fast") as engine:

        def fails(*_, **__):
            monkeypatch.undo()
            raise MemoryError("too much")

        monkeypatch.setattr(f"moss_runtime.engine.output.{failing}", fails)
        result = engine.submit(request).result(20)
        assert result.finish_reason == ("error" if failing == "torch.cat" else "length")
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

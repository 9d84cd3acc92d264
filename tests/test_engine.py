"""The engine on a CPU: every request gets its own codes and its own audio, and everything back that it held."""

import asyncio
import dataclasses
import threading
import time

import numpy
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

from moss_kernels import SamplingParams
from moss_runtime.engine import AudioChunk, Engine, EngineConfig, Handle, Request
from moss_runtime.engine.handle import Channel, tell
from moss_runtime.engine.scheduler import _ADMISSIONS
from moss_runtime.engine.transport import HostCopy, InProcess
from moss_runtime.errors import AudioError, CheckpointError, PromptError, UserError
from moss_runtime.graphs import CodecChunk
from moss_runtime.model.codec import Codec

MODES = ("offline-fast", "streaming-low-latency", "streaming-balanced")


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


def test_calls_of_the_codec_write_into_memory_that_was_there_before(endless, codec, monkeypatch):
    written, run = [], CodecChunk.__call__

    def call(chunk, codes, slots, valid, out):
        written.append(out.untyped_storage().data_ptr())
        return run(chunk, codes, slots, valid, out)

    monkeypatch.setattr(CodecChunk, "__call__", call)
    with make(endless, codec) as engine:
        for handle in [engine.submit(Request(prompt=prompt, params=ENDLESS)) for prompt in make_prompts()]:
            handle.result(30)
        assert len(written) > 5
        assert set(written) == {engine.stage.audio.data_ptr()}


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


def test_readers_of_one_loop_are_told_together():
    async def main():
        loop, woken = asyncio.get_running_loop(), []
        channels = [Channel(lambda: None) for _ in range(3)]
        readers = [asyncio.create_task(anext(Handle(None, channel))) for channel in channels]
        await asyncio.sleep(0)
        threadsafe = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: (woken.append(call), threadsafe(*call))
        chunks = [AudioChunk(numpy.zeros((1, 1)), index, 1, 0.0) for index in range(3)]
        tell(
            [*(channel.put(chunk) for channel, chunk in zip(channels, chunks, strict=True)), channels[0].put(chunks[1])]
        )
        assert await asyncio.wait_for(asyncio.gather(*readers), 20) == chunks
        assert len(woken) == 1

    asyncio.run(main())


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


def test_frames_go_on_while_many_are_admitted(model, codec, requests):
    """A burst of requests gets its rows a few at a time, with a launch in between, also beside one that runs."""
    with make(model, codec, rows=16) as engine:
        calls, runtime = [], engine.runtime
        add, step = runtime.add, runtime.step
        runtime.add = lambda *args, **kwargs: calls.append("add") or add(*args, **kwargs)
        runtime.step = lambda: calls.append("step") or step()
        with engine._changed:  # the engine's thread sees all of them at once
            handles = [engine.submit(requests[2]) for _ in range(14)]
        for handle in handles:
            handle.result(20)
    bursts = [len(run) for run in "".join("a" if call == "add" else " " for call in calls).split()]
    assert sum(bursts) == 14 and max(bursts) == _ADMISSIONS


def test_a_group_larger_than_what_is_admitted_at_once_waits_for_nobody(endless, codec, requests):
    """Whoever is left of a group when the first of it have rows is no smaller group, which would have to wait."""
    with make(endless, codec, rows=16, prefill_batch=8, prefill_wait_ms=1e5, max_output_frames=15) as engine:
        running = engine.submit(dataclasses.replace(requests[0], params=ENDLESS))  # stands still: nobody reads
        while not engine.runtime.pool.in_use:
            time.sleep(0.001)
        with engine._changed:
            handles = [engine.submit(dataclasses.replace(requests[2], params=ENDLESS)) for _ in range(8)]
        for handle in handles:
            assert handle.result(10).frames == FRAMES
        assert not running.done

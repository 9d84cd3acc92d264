"""What the tests of the engine share: a small model, requests, and what must hold of any of them."""

import time
from pathlib import Path

import numpy
import torch

from moss_kernels import SamplingParams
from moss_runtime.engine import Engine, EngineConfig
from moss_runtime.engine.transport import InProcess
from moss_runtime.model import MossTTS

GOLDEN = Path(__file__).parent / "golden"
PAD, FRAMES, SAMPLES = 64, 24, 8
# A stop head of zeros continues for ever: of equal scores the lower id is taken.
ENDLESS = SamplingParams(text_temperature=0)


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
    assert engine._scheduler.empty
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

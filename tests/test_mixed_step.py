"""The mixed step: frames and pages are those of a frame graph and a prefill pass, one after the other."""

import dataclasses
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.graphs.prefill import cut
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model import MossTTS
from moss_runtime.random_weights import random_model, random_prompts
from moss_runtime.state.decode_pool import StaleLeaseError

GOLDEN = Path(__file__).parent / "golden"
RUNNING, FRAMES = 3, 4


def make(model, sizes, **options):
    """A runtime that has prefilled the first prompts and made a frame of each; pieces of the others."""
    options = {"rows": len(sizes), "max_tokens": max(sizes) + FRAMES, "max_frames": FRAMES} | options
    runtime = Runtime(model, **options)
    runtime.kv.key_pages[:, :-1], runtime.kv.value_pages[:, :-1] = torch.nan, torch.nan
    prompts = random_prompts(model, sizes)
    pieces = []
    for row, prompt in enumerate(prompts):
        params = SamplingParams(text_temperature=0.3, repetition_penalty=1.2)
        runtime.pool.acquire(row, params, seed=row, max_frames=FRAMES, position=len(prompt) - 1)
        runtime.kv.reserve(row, len(prompt) - 1 + FRAMES)
        pieces.append(cut(row, prompt, runtime.prefill.piece)[0])
    runtime.prefill.run(pieces[:RUNNING])
    runtime.frame.launch(range(RUNNING))
    return runtime, pieces[RUNNING:]


def state(runtime):
    pool, kv = runtime.pool, runtime.kv
    names = ("history", "frames", "positions", "stopped", "finished", "status", "staging")
    named = {name: getattr(pool, name) for name in names}
    sampling = pool.sampling
    named |= {f"sampling.{field.name}": getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    return named | {"key_pages": kv.key_pages, "value_pages": kv.value_pages}


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("sizes", [(9, 2, 18, 7), (5, 30, 3, 17, 1, 40), (3, 4, 5, 1)])
def test_frames_and_prefill_at_once_are_both_alone(sizes, frames):
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    options = {"page_size": 4, "frames_per_launch": frames}
    (mixed, pieces), (alone, _) = (make(model, sizes, **options) for _ in range(2))
    rows = [2, 0, 1]
    report = mixed.mixed.launch(rows, pieces)[:, :RUNNING].clone()
    expected = alone.frame.launch(rows, frames)[:, :RUNNING].clone()
    alone.prefill.run(pieces)
    assert torch.equal(report, expected) and report[0].any()
    got, wanted = state(mixed), state(alone)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=2e-5, equal_nan=True, msg=name)
    for runtime in (mixed, alone):
        runtime.frame.launch(range(len(sizes)), frames)
    assert torch.equal(mixed.pool.history, alone.pool.history)
    assert mixed.pool.frames[:-1].tolist() == alone.pool.frames[:-1].tolist()


def test_a_step_takes_prompts_along_while_rows_run():
    """Two requests run, two more join: one mixed launch, and codes as when each is alone."""
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    prompts = random_prompts(model, [9, 4, 20, 6])
    params = [SamplingParams(seed=seed, text_temperature=0.3) for seed in range(4)]
    runtime = Runtime(model, rows=4, max_tokens=32, max_frames=FRAMES, page_size=4)
    launches = []
    for name in ("frame", "prefill", "mixed"):
        graphs = getattr(runtime, name).graphs
        compute = graphs.compute
        graphs.compute = lambda *shape, name=name, compute=compute: (launches.append(name), compute(*shape))
    leases = [runtime.add(index, prompts[index], params[index]) for index in range(2)]
    runtime.step()
    leases += [runtime.add(index, prompts[index], params[index]) for index in (2, 3)]
    runtime.step()
    assert launches == ["prefill", "frame", "mixed"]
    while runtime.busy:
        runtime.step()
    assert set(launches[3:]) == {"frame"}
    for lease, prompt, one in zip(leases, prompts, params, strict=True):
        (expected,) = model.generate([prompt], [one], max_frames=FRAMES)
        assert torch.equal(runtime.codes(lease), expected.codes)


def test_a_failed_mixed_launch_ends_those_in_it_alone():
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    prompts = random_prompts(model, [9, 4, 6])
    runtime = Runtime(model, rows=4, max_tokens=32, max_frames=FRAMES, page_size=4)
    paused, running = (runtime.add(index, prompts[index], SamplingParams(seed=1)) for index in range(2))
    runtime.step()
    runtime.pause(paused)
    joining = runtime.add(2, prompts[2], SamplingParams(seed=1))
    compute, runtime.mixed.graphs.compute = runtime.mixed.graphs.compute, None
    with pytest.raises(TypeError):
        runtime.step()
    runtime.mixed.graphs.compute = compute
    for ended in (running, joining):
        with pytest.raises(StaleLeaseError):
            runtime.pool.check(ended)
    runtime.pause(paused, False)
    while runtime.busy:
        runtime.step()
    (expected,) = model.generate(prompts[:1], [SamplingParams(seed=1)], max_frames=FRAMES)
    assert torch.equal(runtime.codes(paused), expected.codes)


@pytest.mark.gpu
@pytest.mark.parametrize("joining", [(151,), (151, 131, 200, 17, 151, 151, 180, 40)])
def test_bits_on_the_gpu_are_those_of_both_alone(joining):
    """Full dimensions, in graphs; so few tokens that linears into the residual stream are cut, and so many not."""
    model = random_model("full", device="cuda", dtype=torch.bfloat16, layers=3)
    sizes, results = (150, 33, 260, *joining), []
    for mixed in (True, False):
        runtime, pieces = make(model, sizes)
        stream = runtime.frame.graphs.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            if mixed:
                tokens = runtime.prefill.fill_inputs(pieces)
                runtime.mixed.graphs.shapes = frozenset({(runtime.mixed.buckets[0], 1, tokens)})
                runtime.prefill.fill_inputs([])
                runtime.mixed.warm_up()
                runtime.mixed.launch(range(RUNNING), pieces)
                assert runtime.mixed.graphs.hit_ratio == 1
            else:
                runtime.frame.launch(range(RUNNING))
                runtime.prefill.run(pieces)
            for _ in range(2):
                runtime.frame.launch(range(len(sizes)))
        torch.cuda.synchronize()
        results.append({name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in state(runtime).items()})
        frames = runtime.pool.frames[:-1].tolist()
    got, wanted = results
    assert min(frames) >= 1 and not [name for name in wanted if not torch.equal(got[name], wanted[name])]

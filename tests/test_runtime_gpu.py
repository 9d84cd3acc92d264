"""Frame, prefill and codec graphs on a GPU: replay against eager bit by bit, alone and at the same time."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.graphs.prefill import cut
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.graphs.speech import generate
from moss_runtime.observe import FallbackReason, Metrics
from moss_runtime.random_weights import codec_config, random_codec, random_model, random_prompts

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
FRAMES = 24
LENGTHS = (9, 33, 1, 70, 2, 160, 40, 5)


@pytest.fixture(scope="module")
def model():
    """bfloat16, of the small size that the frame kernel is built for; about half of all frames stop."""
    return random_model("tiny", device="cuda", dtype=torch.bfloat16, never_stop=False)


def params(index: int) -> SamplingParams:
    """Different for each request; the stop decision is cooled, so that requests have several frames."""
    return SamplingParams(
        temperature=(1.7, 0.9, 0.0)[index % 3],
        top_k=(25, 0, 5)[index // 3 % 3],
        repetition_penalty=(1.0, 1.3)[index % 2],
        text_temperature=0.3,
        seed=1000 + index,
    )


def make(model, rows, *, warm=True, **options):
    runtime = Runtime(model, **{"rows": rows, "max_tokens": 256, "max_frames": FRAMES} | options)
    pages = runtime.kv.pages
    runtime.kv.key_pages[:, :pages], runtime.kv.value_pages[:, :pages] = torch.nan, torch.nan
    torch.cuda.synchronize()
    if warm:
        runtime.warm_up()
    return runtime


def state(runtime) -> dict[str, torch.Tensor]:
    """Copies of every state buffer, by name; NaN, which pages nobody wrote hold, compares as its bits."""
    torch.cuda.synchronize()
    pool, kv = runtime.pool, runtime.kv
    named = {name: tensor for name, tensor in vars(pool).items() if isinstance(tensor, torch.Tensor)}
    named |= {
        f"sampling.{field.name}": getattr(pool.sampling, field.name) for field in dataclasses.fields(pool.sampling)
    }
    named |= {name: getattr(kv, name) for name in ("key_pages", "value_pages", "page_table")}
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in named.items()}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def admit(runtime, rows):
    """Requests in `rows` rows, prefilled."""
    prompts = random_prompts(runtime.model, [LENGTHS[row % len(LENGTHS)] for row in range(rows)])
    for row, prompt in enumerate(prompts):
        lease = runtime.add(row, prompt, params(row))
        assert lease.row == row
    with torch.cuda.stream(runtime.prefill.graphs.stream):
        runtime.prefill.graphs.stream.wait_stream(runtime.frame.graphs.stream)
        pieces = [request.pieces.popleft() for request in runtime._requests.values()]
        while pieces:
            done = runtime.prefill.next_pass(pieces)
            runtime.prefill.run(done)
            pieces = [piece for piece in pieces if piece not in done]
    for row in range(rows):
        with torch.cuda.stream(runtime.frame.graphs.stream):
            runtime.kv.reserve(row, LENGTHS[row % len(LENGTHS)] + FRAMES)
    torch.cuda.synchronize()


def launch(runtime, *arguments):
    with torch.cuda.stream(runtime.frame.graphs.stream):
        report = runtime.frame.launch(*arguments).clone()
    torch.cuda.synchronize()
    return report


def test_replay_equals_eager_for_every_bucket(model):
    """The same schedules of reordered, shrinking, paused and padded batches, once as graphs and once eagerly."""
    graph, eager = make(model, 128), make(model, 128, graphs=False)
    for runtime in (graph, eager):
        admit(runtime, 128)
    assert_same_state(state(graph), state(eager))
    rng = random.Random(0)
    for bucket in reversed(graph.frame.buckets):
        for count in {bucket, rng.randint(bucket // 2 + 1, bucket)}:
            rows = rng.sample(range(128), count)
            active = [rng.random() < 0.8 for _ in rows]
            reports = [launch(runtime, rows, 1, active)[:, :count] for runtime in (graph, eager)]
            assert torch.equal(*reports)
            assert_same_state(state(graph), state(eager))
    assert graph.frame.graphs.hit_ratio == graph.prefill.graphs.hit_ratio == 1
    assert eager.frame.graphs.fallbacks.keys() == {FallbackReason.DISABLED}
    assert graph.pool.frames.max() > 3


def test_the_order_of_captures_and_replays_does_not_matter(model):
    """Small graphs captured after large ones and before, then replayed in turn."""
    large_first, small_first = make(model, 64), make(model, 64, warm=False)
    for bucket in small_first.frame.buckets:
        small_first.frame.fill_inputs([], bucket)
    shapes = small_first.frame.graphs.shapes
    for shape in sorted(shapes):
        small_first.frame.graphs.shapes = frozenset({shape})
        small_first.frame.graphs.capture()
    small_first.frame.graphs.shapes = shapes
    small_first.prefill.warm_up()
    for runtime in (large_first, small_first):
        admit(runtime, 64)
    for rows in ([0], list(range(64)), [1], [63, 1, 7], list(range(40)), [0], list(range(64))):
        assert torch.equal(*(launch(runtime, rows) for runtime in (large_first, small_first)))
        assert_same_state(state(large_first), state(small_first))


def test_several_frames_in_a_launch_equal_single_ones(model):
    single, several = make(model, 8), make(model, 8, frames_per_launch=5)
    prompts = random_prompts(model, list(LENGTHS))
    requests = [params(index) for index in range(len(prompts))]
    one, other = (generate(runtime, prompts, requests) for runtime in (single, several))
    assert_same(one, other)
    assert len({len(generation.codes) for generation in one}) > 2


def assert_same(one, other):
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a.codes, b.codes), index
        assert a.finish_reason == b.finish_reason


def test_a_replay_neither_waits_nor_allocates(model):
    runtime = make(model, 4)
    admit(runtime, 3)
    launch(runtime, [0, 1, 2])
    stream = runtime.frame.graphs.stream
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            runtime.frame.launch([2, 0, 1])
            runtime.frame.launch([1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    torch.cuda.synchronize()


def test_a_step_of_the_runtime_never_waits(model):
    runtime = make(model, 4)
    prompts = random_prompts(model, [9, 33, 40])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index, prompt in enumerate(prompts):
            runtime.add(index, prompt, params(index))
        for _ in range(6):
            runtime.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while runtime.busy:
        runtime.step()
        runtime.wait()
    alone = generate(make(model, 1), prompts, [params(index) for index in range(3)])
    for index, generation in enumerate(alone):
        lease = runtime._requests[index].lease
        assert torch.equal(runtime.codes(lease), generation.codes)


def test_frame_prefill_and_codec_at_the_same_time_equal_serial_replays(model):
    codec = random_codec(codec_config("tiny"), device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(codec.config.codebook_size, (4, 6, 12), device="cuda")
    prompts = random_prompts(model, [150, 140, 130, 155], seed=3)

    def run(between: Callable[[], None]):
        """A runtime whose first rows make frames while the last four are prefilled and four streams are decoded."""
        runtime = make(model, 12, codec=codec)
        admit(runtime, 8)
        chunk, feed = runtime.feed.chunk, runtime.feed
        slots = [chunk.slots.lease().slot for _ in range(4)]
        with torch.cuda.stream(runtime.frame.graphs.stream):
            leases = [runtime.pool.acquire(row, params(row), seed=row, max_frames=4) for row in range(8, 12)]
            for lease, prompt in zip(leases, prompts, strict=True):
                runtime.kv.reserve(lease.row, len(prompt))
        pieces = runtime.prefill.next_pass(
            [piece for lease, prompt in zip(leases, prompts, strict=True) for piece in cut(lease.row, prompt)]
        )
        torch.cuda.synchronize()
        audio = []
        for step in range(3):
            with torch.cuda.stream(runtime.frame.graphs.stream):
                runtime.frame.launch(list(range(8)))
            between()
            with torch.cuda.stream(runtime.prefill.graphs.stream):
                runtime.prefill.run(pieces)
            between()
            with torch.cuda.stream(feed.stream):
                audio.append(chunk(codes[:, 2 * step : 2 * step + 2], slots, [2] * 4))
            between()
        torch.cuda.synchronize()
        return state(runtime) | {f"audio {i}": part for i, part in enumerate(audio)}

    serial = run(torch.cuda.synchronize)
    for _ in range(3):
        assert_same_state(serial, run(lambda: None))


def test_a_fresh_process_whose_first_act_is_capture():
    script = """
import torch
from moss_runtime.random_weights import codec_config, random_codec, random_model, random_prompts
from moss_kernels import SamplingParams
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.graphs.speech import generate
model = random_model("tiny", device="cuda", dtype=torch.bfloat16)
runtime = Runtime(model, rows=2, max_tokens=64, max_frames=4)
runtime.warm_up()
made = generate(runtime, random_prompts(model, [5, 9]), [SamplingParams(seed=1)] * 2)
assert [len(generation.codes) for generation in made] == [4, 4]
print(runtime.frame.graphs.hit_ratio, runtime.prefill.graphs.hit_ratio)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1.0", "1.0"]


def test_a_failed_capture_is_logged_and_the_frames_are_made(model, monkeypatch, caplog):
    metrics = Metrics()
    runtime = make(model, 2, warm=False, metrics=metrics)
    compute = runtime.frame.graphs.compute

    def fails_in_capture(*shape):
        compute(*shape)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("no memory for this graph")

    runtime.frame.graphs.compute = fails_in_capture
    runtime.warm_up()
    prompts, requests = random_prompts(model, [9, 20]), [params(0), params(1)]
    made = generate(runtime, prompts, requests)
    assert_same(made, generate(make(model, 2), prompts, requests))
    assert runtime.frame.graphs.fallbacks.keys() == {FallbackReason.CAPTURE_FAILED}
    assert "frame: the graph of shape (2, 1) could not be captured" in caplog.text
    assert 'fallback_total{graph="frame",reason="capture_failed"}' in metrics.text()
    assert runtime.prefill.graphs.hit_ratio == 1


def test_a_steady_run_has_a_hit_ratio_of_one(model):
    metrics = Metrics()
    codec = random_codec(codec_config("tiny"), device="cuda", dtype=torch.bfloat16)
    runtime = make(model, 8, codec=codec, metrics=metrics)
    prompts = random_prompts(model, list(LENGTHS) * 3)
    audio: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(prompts))}
    made = generate(
        runtime,
        prompts,
        [params(index) for index in range(len(prompts))],
        on_audio=lambda index, part: audio[index].append(part.clone()),
    )
    assert metrics.hit_ratio("frame") == metrics.hit_ratio("prefill") == metrics.hit_ratio("codec_chunk") == 1
    for index, generation in enumerate(made):
        assert sum(part.shape[1] for part in audio[index]) == codec.config.samples_per_frame * len(generation.codes)
    assert runtime.pool.in_use == 0 and runtime.kv.free_pages == runtime.kv.pages


@pytest.fixture(scope="module")
def wide():
    """Full dimensions but for the number of layers; requests end at their limits."""
    return random_model("full", device="cuda", dtype=torch.bfloat16, layers=4)


def test_requests_together_equal_requests_alone(wide):
    """64 requests that join and leave at random, and 64 runs of one: the same bits."""
    rng = random.Random(1)
    prompts = random_prompts(wide, [rng.randint(1, 200) for _ in range(64)], seed=2)
    limits = [rng.randint(20, 50) for _ in prompts]
    options = {"max_tokens": 256, "max_frames": 50}
    alone = make(wide, 1, **options)
    expected = [
        generate(alone, [prompt], [params(index)], max_frames=limit)[0].codes
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    del alone
    together, waiting, leases = make(wide, 48, **options), list(range(64)), {}
    rng.shuffle(waiting)
    while waiting or leases:
        while waiting and together.pool.free and rng.random() < 0.6:
            index = waiting.pop()
            leases[index] = together.add(index, prompts[index], params(index), max_frames=limits[index])
        for lease in leases.values():
            together.pause(lease, rng.random() < 0.1)
        for delta in together.step():
            if delta.final:
                lease = leases.pop(delta.request_id)
                assert torch.equal(together.codes(lease), expected[delta.request_id]), delta.request_id
                together.release(lease)
        together.wait()
    assert together.frame.graphs.hit_ratio == 1
    assert sum(map(len, expected)) > 64 * 20


def test_prefill_gives_the_same_keys_in_any_pass(wide):
    """Prompts of many lengths, alone, in pairs and with six others, in every place."""
    runtime = make(wide, 8, max_tokens=256)
    prompts = random_prompts(wide, [150, 149, 40, 131, 160, 255, 130, 17])

    def pages(order):
        with torch.cuda.stream(runtime.prefill.graphs.stream):
            runtime.prefill.run([cut(row, prompts[row])[0] for row in order])
            row = order[-1]
            page_ids = list(runtime.kv.pages_of(row))
            tokens = len(prompts[row]) - 1
            kept = [pages[:, page_ids].transpose(2, 3).flatten(1, 2)[:, :tokens] for pages in (keys, values)]
        torch.cuda.synchronize()
        return torch.stack(kept)

    keys, values = runtime.kv.key_pages, runtime.kv.value_pages
    for row, prompt in enumerate(prompts):
        runtime.kv.reserve(row, len(prompt))
    torch.cuda.synchronize()
    for row in range(8):
        alone = pages([row])
        assert alone.isfinite().all()
        others = [other for other in range(8) if other != row]
        for company in ([others[0]], others[:3], others):
            assert torch.equal(pages([*company, row]), alone), (row, company)

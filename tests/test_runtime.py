"""The runtime on a CPU: the codes of `MossTTS.generate`, whoever joins, leaves, waits or fails meanwhile."""

import dataclasses
import random
import re
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.errors import PromptError, UserError
from moss_runtime.graphs.frame import STAGES
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.graphs.speech import generate
from moss_runtime.model import MossTTS
from moss_runtime.model.codec import Codec
from moss_runtime.observe import FallbackReason, Metrics, StageTimer
from moss_runtime.state.decode_pool import PoolFull, StaleLeaseError
from moss_runtime.state.kv_cache import OutOfPages

GOLDEN = Path(__file__).parent / "golden"
PAD = 64
FRAMES = 12
GREEDY = SamplingParams(temperature=0, text_temperature=0)
# The stop head has random weights; cooled, it continues often enough for outputs of several frames.
SAMPLED = SamplingParams(text_temperature=0.2)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(11)
    made = []
    for length in (9, 1, 23, 2, 14, 5, 17, 11, 40, 3):
        rows = torch.randint(0, PAD, (length, 13), generator=generator)
        rows[torch.rand(length, generator=generator) < 0.6, 1:] = PAD
        rows[-1] = torch.tensor([3] + [PAD] * 12)
        made.append(rows)
    return made


@pytest.fixture(scope="module")
def requests():
    changes = [
        {"seed": 1},
        {"seed": 2, "temperature": 0.8, "top_k": 5},
        {"seed": 2**63 - 1, "repetition_penalty": 1.4},
        {"seed": 4, "top_k": 0, "top_p": 1.0},
        {"seed": 5, "top_p": 0.3, "repetition_penalty": 0.8},
        {"seed": 1},
        {"seed": 8},
        {"seed": 35},
        {"seed": 10},
    ]
    return [dataclasses.replace(GREEDY, seed=0), *[dataclasses.replace(SAMPLED, **change) for change in changes]]


@pytest.fixture(scope="module")
def expected(prompts, requests):
    generations = MossTTS.from_pretrained(GOLDEN / "local_hd16").generate(prompts, requests, max_frames=FRAMES)
    assert {generation.finish_reason for generation in generations} == {"stop", "length"}
    return generations


@pytest.fixture(scope="module")
def model():
    return MossTTS.from_pretrained(GOLDEN / "local_hd16")


def make(model, rows=4, **options):
    runtime = Runtime(model, **{"rows": rows, "max_tokens": 64, "max_frames": FRAMES, "page_size": 8} | options)
    # What nobody has written must not matter.
    runtime.kv.key_pages[:, : runtime.kv.pages] = torch.nan
    runtime.kv.value_pages[:, : runtime.kv.pages] = torch.nan
    return runtime


def assert_empty(runtime):
    assert (runtime.pool.in_use, runtime.kv.free_pages) == (0, runtime.kv.pages)
    assert not runtime.busy


def assert_equal(actual, expected):
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one.codes, other.codes), index
        assert (one.seed, one.finish_reason) == (other.seed, other.finish_reason)


@pytest.mark.parametrize("options", [{"rows": 10}, {"rows": 3}, {"rows": 1}, {"rows": 4, "frames_per_launch": 5}])
def test_codes_are_those_of_the_model(model, prompts, requests, expected, options):
    runtime = make(model, **options)
    assert_equal(generate(runtime, prompts, requests), expected)
    assert_empty(runtime)


class LateEvent:
    """An event of a device that is some polls behind the host."""

    def __init__(self, polls):
        self.polls = polls

    def query(self):
        self.polls -= 1
        return self.polls < 0


def make_late(runtime, monkeypatch, rng):
    """The host learns of each launch late, as on a GPU: finished rows are in later launches, rows change hands."""
    add = runtime._flights.add

    def add_late(batch, report):
        add(batch, report)
        runtime._flights._flights[-1].event = LateEvent(rng.randrange(5))

    monkeypatch.setattr(runtime._flights, "add", add_late)


@pytest.mark.parametrize(("seed", "late"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_rows_join_leave_wait_and_fail_at_random(model, prompts, requests, expected, monkeypatch, seed, late):
    """Rows are shared by few requests, some pause, some are aborted and come again; each gets its own codes."""
    rng, runtime = random.Random(seed), make(model, pages=20, max_in_flight=4)
    if late:
        make_late(runtime, monkeypatch, rng)
    waiting, leases, codes = rng.sample(range(len(prompts)), len(prompts)), {}, {}
    aborts = 3
    while waiting or leases:
        if waiting and rng.random() < 0.7:
            try:
                leases[waiting[0]] = runtime.add(waiting[0], prompts[waiting[0]], requests[waiting[0]])
                codes[waiting.pop(0)] = []
            except (PoolFull, OutOfPages):
                pass
        for lease in leases.values():
            runtime.pause(lease, rng.random() < 0.3)
        if leases and aborts and rng.random() < 0.2:
            index = rng.choice(list(leases))
            runtime.abort(leases.pop(index))
            waiting.append(index)
            aborts -= 1
        for delta in runtime.step():
            index = delta.request_id
            assert (delta.generation, delta.first_frame) == (leases[index].generation, sum(map(len, codes[index])))
            codes[index].append(delta.codes.clone())
            if delta.final:
                assert delta.finish_reason == expected[index].finish_reason
                assert torch.equal(runtime.codes(leases[index]), expected[index].codes)
                runtime.release(leases.pop(index))
    assert_empty(runtime)
    for index, parts in codes.items():
        assert torch.equal(torch.cat(parts).long(), expected[index].codes), index


def test_the_null_row_keeps_every_bit(model, prompts, requests):
    runtime = make(model, rows=3)
    pool, null = runtime.pool, runtime.pool.null_row
    tensors = [pool.staging, pool.codes, pool.history, pool.positions, pool.frames, pool.status, pool.finished]
    tensors += [getattr(pool.sampling, field.name) for field in dataclasses.fields(pool.sampling)]
    before = [tensor[null].clone() for tensor in tensors]
    generate(runtime, prompts, requests)
    assert all(torch.equal(old, tensor[null]) for old, tensor in zip(before, tensors, strict=True))
    assert not runtime.kv.key_pages[:, -1].any() and not runtime.kv.value_pages[:, -1].any()


def test_a_drawn_seed_is_reported_and_replays(model, prompts):
    runtime = make(model)
    first = generate(runtime, prompts[:2], [SAMPLED] * 2)
    assert first[0].seed != first[1].seed
    assert_equal(generate(runtime, prompts[:2], [dataclasses.replace(SAMPLED, seed=g.seed) for g in first]), first)


def test_limits(model, prompts, requests, expected):
    runtime = make(model, max_tokens=25)
    whole = expected[2]
    assert len(whole.codes) > 3
    cut = generate(runtime, prompts[2:3], requests[2:3], max_frames=2)[0]
    assert torch.equal(cut.codes, whole.codes[:2]) and cut.finish_reason == "length"
    # 22 tokens of the prompt leave room for 3 frames.
    cut = generate(runtime, prompts[2:3], requests[2:3])[0]
    assert torch.equal(cut.codes, whole.codes[:3]) and cut.finish_reason == "length"
    with pytest.raises(PromptError, match="must have at most 25 rows here, got 40"):
        runtime.add("long", prompts[8], GREEDY)
    assert_empty(runtime)


def test_a_bad_request_is_refused_and_harms_nobody(model, prompts, requests, expected):
    runtime = make(model)
    lease = runtime.add(2, prompts[2], requests[2])
    runtime.step()
    wrong = prompts[0].clone()
    wrong[3, 2] = 65
    with pytest.raises(PromptError, match=r"row 3, column 2 must be a code"):
        runtime.add("wrong", wrong, GREEDY)
    with pytest.raises(ValueError, match="holds row 0 already"):
        runtime.add(2, prompts[0], GREEDY)
    with pytest.raises(ValueError, match="at least 1"):
        runtime.add("none", prompts[0], GREEDY, max_frames=0)
    while runtime.busy:
        runtime.step()
    assert torch.equal(runtime.codes(lease), expected[2].codes)
    assert runtime.pool.in_use == 1


@pytest.mark.parametrize(
    "size", ["rows", "max_tokens", "max_frames", "page_size", "frames_per_launch", "max_in_flight", "pages"]
)
@pytest.mark.parametrize("value", [0, 1.5, True, "4", 2**31])
def test_sizes_that_cannot_be(model, size, value):
    """Without a frame in a launch, or a launch at all, a request would never end."""
    with pytest.raises(ValueError, match=rf"`{size}` must be a positive integer below 2\^31, got {value!r}"):
        make(model, **{size: value})


def test_parts_that_do_not_fit(model):
    with pytest.raises(ValueError, match="`rows` must be at most 128, got 129"):
        make(model, rows=129)
    with pytest.raises(UserError, match="`model` must be in float32 or bfloat16, got torch"):
        make(MossTTS.on_meta(model.config).half())
    codec = Codec.from_pretrained(GOLDEN / "codec")
    narrow = dataclasses.replace(model.config, audio_vocab_size=32)
    with pytest.raises(UserError, match="the model speaks 12 codebooks of 32, the codec 12 of 64"):
        make(MossTTS.on_meta(narrow), codec=codec)


def test_full(model, prompts, requests):
    runtime = make(model, rows=2, pages=4)
    runtime.add("a", prompts[2], requests[2])  # 22 tokens and a frame: 3 pages of 8
    with pytest.raises(OutOfPages):
        runtime.add("b", prompts[4], requests[4])
    assert (runtime.pool.in_use, runtime.kv.free_pages) == (1, 1)
    runtime.add("b", prompts[1], requests[1])
    with pytest.raises(PoolFull):
        runtime.add("c", prompts[1], requests[1])


def test_a_whole_request_has_its_pages_from_the_start(model, prompts, requests, monkeypatch):
    runtime = make(model, rows=2, pages=6)
    lease = runtime.add("a", prompts[2], requests[2], max_frames=10, whole=True)  # 22 tokens and 10 frames
    assert runtime.kv.free_pages == 2
    monkeypatch.setattr(runtime.kv, "reserve", lambda row, tokens: 1 / 0)
    while runtime.busy:
        runtime.step()
    runtime.release(lease)
    assert runtime.kv.free_pages == 6


def test_a_row_without_pages_waits_and_a_lone_one_is_an_error(model, prompts, requests, expected):
    """The first row wants its fifth page when none is left; it goes on once the other, which has seven, is released."""
    wanted = [2, 8]
    assert all(len(expected[index].codes) > 3 for index in wanted)
    runtime = make(model, pages=11)
    leases = {index: runtime.add(index, prompts[index], requests[index]) for index in wanted}
    codes = {}
    while leases:
        for delta in runtime.step():
            if delta.final:
                codes[delta.request_id] = runtime.codes(leases[delta.request_id])
                runtime.release(leases.pop(delta.request_id))
    assert all(torch.equal(codes[index], expected[index].codes) for index in wanted)
    runtime = make(model, pages=3)
    runtime.add("a", prompts[2], requests[2])
    with pytest.raises(OutOfPages):
        for _ in range(FRAMES):
            runtime.step()
    assert runtime.pool.in_use == 1


@pytest.mark.parametrize("standing", ["paused", "without pages"])
def test_a_row_that_cannot_go_on_does_not_hold_up_a_prompt_of_many_pieces(model, prompts, requests, expected, standing):
    """One step prefills all of it and makes its first frame, as if the row were not there."""
    runtime = make(model, pages=8)
    runtime.prefill.piece = 16
    first = runtime.add(2, prompts[2], requests[2])
    for _ in range(2):  # with which the row fills its three pages
        runtime.step()
    lease = runtime.add(8, prompts[8], requests[8])  # the other five pages, with its first frame
    runtime.pause(first, standing == "paused")
    (delta,) = runtime.step()
    assert delta.request_id == 8 and torch.equal(runtime.codes(lease), expected[8].codes[:1])
    if standing == "without pages":
        with pytest.raises(OutOfPages):
            runtime.step()
        assert runtime.pool.in_use == 2


def test_an_exception_in_a_step_ends_its_requests_and_no_other(model, prompts, requests, expected, monkeypatch):
    runtime = make(model)
    waiting = runtime.add(2, prompts[2], requests[2])
    runtime.step()
    runtime.pause(waiting)
    lost = [runtime.add(index, prompts[index], requests[index]) for index in (3, 5)]
    runtime.step()
    decode, compute = runtime.pool.advance, runtime.prefill.graphs.compute

    def fails(*_, **__):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runtime.pool, "advance", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runtime.step()
    monkeypatch.setattr(runtime.pool, "advance", decode)
    lost.append(runtime.add(0, prompts[0], requests[0]))
    runtime.prefill.graphs.compute = fails
    with pytest.raises(RuntimeError, match="the device is gone"):
        runtime.step()
    runtime.prefill.graphs.compute = compute
    for lease in lost:
        with pytest.raises(StaleLeaseError):
            runtime.abort(lease)
    assert runtime.pool.in_use == 1
    runtime.pause(waiting, False)
    while runtime.busy:
        runtime.step()
    assert torch.equal(runtime.codes(waiting), expected[2].codes)
    runtime.release(waiting)
    assert_empty(runtime)


def test_an_exception_in_generate_gives_everything_back(model, prompts, requests):
    runtime = make(model, rows=3)

    def fails(index, codes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(runtime, prompts, requests, on_frames=fails)
    assert_empty(runtime)


def test_only_what_has_ended_can_be_released(model, prompts, requests):
    runtime = make(model)
    lease = runtime.add("a", prompts[0], requests[0])
    with pytest.raises(RuntimeError, match="'a' has not ended"):
        runtime.release(lease)
    runtime.abort(lease)
    with pytest.raises(StaleLeaseError):
        runtime.abort(lease)


def test_logits_that_are_not_finite_end_one_row(prompts, requests, expected):
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    broken = prompts[0].clone()
    broken[4, 0] = 77
    assert not any((prompt[:, 0] == 77).any() for prompt in prompts[1:4])
    model.transformer.embed_tokens.weight[77] = torch.nan
    generations = generate(make(model), [broken, *prompts[1:4]], requests[:4])
    assert (tuple(generations[0].codes.shape), generations[0].finish_reason) == ((0, 12), "error")
    assert_equal(generations[1:], expected[1:4])


def test_metrics_and_timings(model, prompts, requests, expected):
    metrics, timer = Metrics(), StageTimer(STAGES, "cpu")
    runtime = make(model, rows=10, metrics=metrics, timer=timer)
    lease = runtime.add("a", prompts[0], requests[0])
    assert "rows_in_use 1.0" in metrics.text() and "kv_pages_in_use 2.0" in metrics.text()
    runtime.abort(lease)
    generate(runtime, prompts, requests)
    text = metrics.text()
    assert f"frames_total {float(sum(len(generation.codes) for generation in expected))}" in text
    launches = runtime.frame.graphs.fallbacks[FallbackReason.DEVICE]
    assert launches >= FRAMES and runtime.frame.graphs.hit_ratio == 0
    assert f'fallback_total{{graph="frame",reason="device"}} {float(launches)}' in text
    assert "rows_in_use 0.0" in text and "kv_pages_in_use 0.0" in text
    assert timer.percentiles().keys() == set(STAGES)


def test_metrics_of_the_codec(model, prompts, requests):
    metrics, in_use = Metrics(), set()
    runtime = make(model, rows=3, codec=Codec.from_pretrained(GOLDEN / "codec"), metrics=metrics)

    def read(name):
        return float(re.search(rf"^{name} (.*)", metrics.text(), re.MULTILINE)[1])

    made = generate(runtime, prompts[:4], requests[:4], on_audio=lambda *audio: in_use.add(read("codec_slots_in_use")))
    frames, rate = sum(len(generation.codes) for generation in made), runtime.feed.chunk.codec.config.frame_rate
    assert read("audio_seconds_total") == pytest.approx(frames / rate)
    eager = runtime.feed.chunk.fallbacks["device"]
    assert read('fallback_total{graph="codec_chunk",reason="device"}') == eager > 0
    assert read("codec_slots_in_use") == 0 and max(in_use) > 1


def test_audio_is_the_offline_decoding(model, prompts, requests, expected):
    codec = Codec.from_pretrained(GOLDEN / "codec")
    runtime = make(model, rows=3, codec=codec)
    events: dict[int, list[tuple[str, torch.Tensor]]] = {index: [] for index in range(len(prompts))}
    generations = generate(
        runtime,
        prompts,
        requests,
        on_frames=lambda index, codes: events[index].append(("frames", codes.clone())),
        on_audio=lambda index, audio: events[index].append(("audio", audio.clone())),
    )
    assert_equal(generations, expected)
    for index, generation in enumerate(generations):
        audio = [part for kind, part in events[index] if kind == "audio"]
        sizes, left = [], len(generation.codes)
        for size in (1, 2, 4, 8):
            sizes.append(min(size, left))
            left -= sizes[-1]
        assert [part.shape[1] // 8 for part in audio] == [size for size in sizes if size]
        if audio:
            # The first frame is heard before the second is made.
            assert [kind for kind, _ in events[index]][:2] == ["frames", "audio"]
            offline = codec.decode(generation.codes[None])[0]
            assert (torch.cat(audio, 1) - offline).abs().max() <= 1e-5 * offline.abs().max()
    assert runtime.feed.chunk.slots.free == 3
    assert_empty(runtime)


@pytest.mark.parametrize("polls", [0, 3])
def test_an_aborted_generation_leaves_nothing_behind(model, prompts, requests, monkeypatch, polls):
    """Neither slots nor audio: the next one would take that for its own. polls: how late audio reaches the host."""
    runtime = make(model, rows=3, codec=Codec.from_pretrained(GOLDEN / "codec"))
    decode = runtime.feed._decode

    def late(due):
        decode(due)
        deltas, _ = runtime.feed._landing.pop()
        runtime.feed._landing.append((deltas, LateEvent(polls)))

    monkeypatch.setattr(runtime.feed, "_decode", late)
    monkeypatch.setattr(LateEvent, "synchronize", lambda event: None, raising=False)

    def fails(index, audio):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(runtime, prompts, requests, on_audio=fails)
    assert runtime.feed.chunk.slots.free == 3
    assert_empty(runtime)
    heard = []
    (made,) = generate(runtime, prompts[2:3], requests[2:3], on_audio=lambda _, audio: heard.append(audio))
    samples = runtime.feed.chunk.codec.config.samples_per_frame
    assert sum(audio.shape[1] for audio in heard) == len(made.codes) * samples

"""Generation: golden codes, seeds, batches, limits, streaming and refused input."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moss_kernels import SamplingParams
from moss_runtime.errors import CheckpointError, PromptError
from moss_runtime.model import MossTTS

GOLDEN = Path(__file__).parent / "golden"
GREEDY = SamplingParams(temperature=0, text_temperature=0)
# The stop head has random weights; cooled, it continues often enough for outputs of several frames.
SAMPLED = SamplingParams(text_temperature=0.3)
PAD = 64


@pytest.fixture(scope="module")
def model() -> MossTTS:
    return MossTTS.from_pretrained(GOLDEN / "local_hd16")


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Eight prompts of 1 to 23 rows, some rows with codes."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for length in (9, 1, 23, 2, 14, 5, 17, 11):
        rows = torch.randint(0, PAD, (length, 13), generator=generator)
        rows[torch.rand(length, generator=generator) < 0.6, 1:] = PAD
        rows[-1] = torch.tensor([3] + [PAD] * 12)
        made.append(rows)
    return made


@pytest.fixture(scope="module")
def requests() -> list[SamplingParams]:
    return [
        GREEDY,
        dataclasses.replace(SAMPLED, seed=1),
        dataclasses.replace(SAMPLED, seed=2, temperature=0.8, top_k=5),
        dataclasses.replace(SAMPLED, seed=2**63 - 1, repetition_penalty=1.4),
        dataclasses.replace(SAMPLED, seed=4, top_k=0, top_p=1.0),
        dataclasses.replace(SAMPLED, seed=5, top_p=0.3, repetition_penalty=0.8),
        dataclasses.replace(GREEDY, seed=6, repetition_penalty=1.2),
        dataclasses.replace(SAMPLED, seed=1),
    ]


@pytest.mark.parametrize("name", ["local_hd16", "local_hd80"])
class TestGolden:
    def check(self, generation, rows: torch.Tensor, limit: int) -> None:
        """Rows: audio_start, the frames, pad rows if the row stopped before its batch."""
        frames = rows[1:][rows[1:, 0] == 6, 1:]
        assert torch.equal(generation.codes, frames)
        assert generation.finish_reason == ("length" if len(frames) == limit else "stop")

    @pytest.fixture
    def golden(self, name):
        directory = GOLDEN / name
        return MossTTS.from_pretrained(directory), load_file(directory / "expected.safetensors")

    def test_greedy(self, golden):
        model, expected = golden
        generations = model.generate(list(expected["prompt.input_ids"]), [GREEDY] * 2, max_frames=40)
        for row, generation in enumerate(generations):
            self.check(generation, expected[f"greedy.{row}"], 40)

    def test_cut_and_repetition_penalty(self, golden):
        model, expected = golden
        prompt = expected["prompt.input_ids"][0]
        self.check(model.generate([prompt], [GREEDY], max_frames=3)[0], expected["greedy_max3.0"], 3)
        penalised = dataclasses.replace(GREEDY, repetition_penalty=1.3)
        self.check(model.generate([prompt], [penalised], max_frames=12)[0], expected["greedy_rep1.3.0"], 12)

    def test_left_padding(self, golden):
        model, expected = golden
        prompts = [
            rows[mask] for rows, mask in zip(expected["leftpad.input_ids"], expected["leftpad.mask"], strict=True)
        ]
        assert [len(prompt) for prompt in prompts] == [17, 13]
        generations = model.generate(prompts, [GREEDY] * 2, max_frames=12)
        for row, generation in enumerate(generations):
            self.check(generation, expected[f"leftpad.greedy.{row}"], 12)


def test_alone_or_in_any_batch(model, prompts, requests):
    alone = [model.generate([p], [r], max_frames=12)[0] for p, r in zip(prompts, requests, strict=True)]
    assert {generation.finish_reason for generation in alone} == {"stop", "length"}
    for order in (range(8), (5, 2, 7, 0, 3), (6, 1)):
        together = model.generate([prompts[i] for i in order], [requests[i] for i in order], max_frames=12)
        for index, generation in zip(order, together, strict=True):
            assert torch.equal(generation.codes, alone[index].codes), index
            assert generation.finish_reason == alone[index].finish_reason


def test_same_seed_after_a_restart(model, prompts, requests):
    script = """
import json, sys, torch
from moss_kernels import SamplingParams
from moss_runtime.model import MossTTS
prompts, params = json.load(sys.stdin)
model = MossTTS.from_pretrained(sys.argv[1])
made = model.generate([torch.tensor(p) for p in prompts], [SamplingParams(**p) for p in params], max_frames=12)
print(json.dumps([generation.codes.tolist() for generation in made]))
"""
    given = json.dumps([[p.tolist() for p in prompts], [dataclasses.asdict(r) for r in requests]])
    command = [sys.executable, "-c", script, str(GOLDEN / "local_hd16")]
    restarted = json.loads(subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout)
    here = model.generate(prompts, requests, max_frames=12)
    assert restarted == [generation.codes.tolist() for generation in here]
    assert sum(len(codes) for codes in restarted) > 30


def test_a_drawn_seed_is_reported_and_replays(model, prompts):
    first = model.generate(prompts[:4], [SAMPLED] * 4, max_frames=6)
    assert len({generation.seed for generation in first}) == 4
    replayed = model.generate(
        prompts[:4], [dataclasses.replace(SAMPLED, seed=generation.seed) for generation in first], max_frames=6
    )
    for one, other in zip(first, replayed, strict=True):
        assert torch.equal(one.codes, other.codes) and one.seed == other.seed


def test_seeds_of_one_batch_differ(model, prompts):
    params = [dataclasses.replace(SAMPLED, seed=seed) for seed in range(6)]
    generations = model.generate([prompts[0]] * 6, params, max_frames=4)
    assert len({tuple(generation.codes.flatten().tolist()) for generation in generations}) == 6


def test_limit_of_each_request(model, prompts, requests):
    whole = model.generate([prompts[2]], [requests[2]], max_frames=12)[0]
    assert len(whole.codes) >= 5
    limits = (1, 5, 3)
    for cut, generation in zip(
        limits, model.generate([prompts[2]] * 3, [requests[2]] * 3, max_frames=limits), strict=True
    ):
        assert torch.equal(generation.codes, whole.codes[:cut])
        assert generation.finish_reason == "length"


def test_stop_at_the_first_frame(model, prompts):
    params = [dataclasses.replace(SAMPLED, text_temperature=3.0, seed=seed) for seed in range(8)]
    generations = model.generate([prompts[0]] * 8, params, max_frames=2)
    empty = [generation for generation in generations if len(generation.codes) == 0]
    assert 0 < len(empty) < 8
    assert {(tuple(generation.codes.shape), generation.finish_reason) for generation in empty} == {((0, 12), "stop")}


def test_end_of_the_context(model, prompts):
    longest = torch.cat([prompts[2]] * 23)[-511:]
    assert len(longest) == 511
    # Frames 0 and 1 read the context's positions 510 and 511; there is no third.
    generation = model.generate([longest], [dataclasses.replace(SAMPLED, seed=3)])[0]
    assert (len(generation.codes), generation.finish_reason) == (2, "length")


def test_frames_stream(model, prompts, requests):
    frames: list[list[torch.Tensor]] = [[] for _ in prompts]
    for codes, is_frame in model.generate_frames(prompts, requests, max_frames=12):
        assert (codes.shape, is_frame.shape) == ((8, 12), (8,))
        assert is_frame.any()
        assert torch.equal((codes == PAD).any(1), ~is_frame)
        for row in is_frame.nonzero()[:, 0].tolist():
            frames[row].append(codes[row])
    calls = []
    generations = model.generate(prompts, requests, max_frames=12, on_frame=lambda *step: calls.append(step))
    for row, generation in enumerate(generations):
        assert torch.equal(generation.codes, torch.stack(frames[row]) if frames[row] else generation.codes[:0])
    assert len(calls) == max(len(row) for row in frames)


def test_bfloat16(prompts, requests):
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16", dtype=torch.bfloat16)
    generations = model.generate(prompts, requests, max_frames=6)
    assert sum(len(generation.codes) for generation in generations) > 0
    assert all(((generation.codes >= 0) & (generation.codes < PAD)).all() for generation in generations)


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [
        (3, 0, 512, r"prompts\[1\]: row 3, column 0 must be a text id in 0..511, got 512"),
        (0, 0, -1, r"prompts\[1\]: row 0, column 0 must be a text id in 0..511, got -1"),
        (2, 12, 65, r"prompts\[1\]: row 2, column 12 must be a code in 0..63 or the pad code 64, got 65"),
        (4, 1, -3, r"prompts\[1\]: row 4, column 1 must be a code in 0..63 or the pad code 64, got -3"),
    ],
)
def test_ids_out_of_range(model, prompts, row, column, value, message):
    wrong = prompts[0].clone()
    wrong[row, column] = value
    with pytest.raises(PromptError, match=message):
        model.generate([prompts[1], wrong], [GREEDY] * 2, max_frames=1)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (
            torch.zeros(513, 13, dtype=torch.int64),
            PromptError,
            r"must have 1..512 rows \(the model's context\), got 513",
        ),
        (torch.zeros(0, 13, dtype=torch.int64), PromptError, r"must have 1..512 rows \(the model's context\), got 0"),
        (torch.zeros(4, 12, dtype=torch.int64), ValueError, r"`prompts\[0\]` must be \[T, 13\], got \(4, 12\)"),
        (torch.zeros(13, dtype=torch.int64), ValueError, r"`prompts\[0\]` must be \[T, 13\], got \(13,\)"),
        (torch.zeros(4, 13), TypeError, r"`prompts\[0\]` must be an int64 tensor, got torch.float32"),
        ([[0] * 13], TypeError, r"`prompts\[0\]` must be an int64 tensor, got <class 'list'>"),
    ],
)
def test_prompts_refused(model, prompt, error, message):
    with pytest.raises(error, match=message):
        model.generate([prompt], [GREEDY], max_frames=1)


@pytest.mark.parametrize(
    ("max_frames", "error", "message"),
    [
        (0, ValueError, "`max_frames` must be at least 1, got 0"),
        ([4, -1], ValueError, "`max_frames` must be at least 1, got -1"),
        ([4], ValueError, "`max_frames` must be one integer or 2 integers, got 1"),
        ([4, 2.5], TypeError, "`max_frames` must be an integer, got 2.5"),
        (True, TypeError, "`max_frames` must be an integer, got True"),
    ],
)
def test_limits_refused(model, prompts, max_frames, error, message):
    with pytest.raises(error, match=message):
        model.generate(prompts[:2], [GREEDY] * 2, max_frames=max_frames)


def test_counts_refused(model, prompts):
    with pytest.raises(ValueError, match="`params` must hold one entry for each of 2 prompts, got 1"):
        model.generate(prompts[:2], [GREEDY])
    with pytest.raises(ValueError, match="`prompts` must hold at least one prompt, got none"):
        model.generate([], [])
    with pytest.raises(TypeError, match=r"`params\[1\]` must be a SamplingParams, got dict"):
        model.generate(prompts[:2], [GREEDY, {}])
    with pytest.raises(ValueError, match=r"`prompts\[0\]` must be \[T, 13\], got \(13,\)"):
        model.generate(prompts[0], [GREEDY] * len(prompts[0]))


def test_weights_that_are_not_finite(prompts):
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    model.transformer.norm.weight[3] = torch.nan
    (generation,) = model.generate(prompts[:1], [GREEDY], max_frames=1)
    assert (tuple(generation.codes.shape), generation.finish_reason) == ((0, 12), "error")
    with pytest.raises(CheckpointError, match=r"prompts \[0\]: logits are not finite in torch\.float32"):
        list(model.generate_frames(prompts[:1], [GREEDY], max_frames=1))


def test_a_row_that_is_not_finite_harms_no_other(prompts, requests):
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    unused = next(i for i in range(PAD, 512) if all(i not in prompt[:, 0] for prompt in prompts))
    model.transformer.embed_tokens.weight[unused] = torch.inf
    expected = model.generate(prompts, requests, max_frames=12)
    rows = [*prompts[:3], prompts[0].clone(), *prompts[3:]]
    rows[3][2, 0] = unused
    params = [*requests[:3], GREEDY, *requests[3:]]
    generations = model.generate(rows, params, max_frames=12)
    broken = generations.pop(3)
    assert (len(broken.codes), broken.finish_reason) == (0, "error")
    for generation, other in zip(generations, expected, strict=True):
        assert torch.equal(generation.codes, other.codes) and generation.finish_reason == other.finish_reason

    steps = model.generate_frames(rows, params, max_frames=12)
    frames = torch.zeros(len(rows), dtype=torch.int64)
    with pytest.raises(CheckpointError, match=r"prompts \[3\]"):
        for codes, is_frame in steps:
            assert (codes[3] == PAD).all()
            frames += is_frame
    assert frames.tolist() == [len(g.codes) for g in [*generations[:3], broken, *generations[3:]]]

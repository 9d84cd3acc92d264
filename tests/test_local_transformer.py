"""One frame of the local transformer: golden parity, the draws, and what rows that produce nothing leave alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moss_kernels import SamplingParams, SamplingState
from moss_kernels.embed_codes import embed_codes_reference
from moss_kernels.local_frame_decode import LocalFrame, LocalFrameWeights, local_frame_decode_reference
from moss_kernels.sample_codebook import sample_codebook_reference
from moss_runtime.model import MossTTS

GOLDEN = Path(__file__).parent / "golden"
CODEBOOKS = 12


@dataclasses.dataclass
class Case:
    weights: LocalFrameWeights
    expected: dict[str, torch.Tensor]

    @property
    def vocab(self) -> int:
        return self.weights.audio_embeddings[0].shape[0]

    def teacher_forced(self, dtype: torch.dtype) -> LocalFrame:
        hidden, codes = self.expected["local.hidden_in"].to(dtype), self.expected["local.codes"]
        everyone = torch.ones(len(codes), dtype=torch.bool)
        return local_frame_decode_reference(hidden, self.weights.to(dtype), None, None, everyone, teacher_codes=codes)

    def state(self, batch: int) -> SamplingState:
        """Mixed parameters, seeds and frames; half of the rows have generated something before."""
        state = SamplingState.allocate(rows=batch, codebooks=CODEBOOKS, vocab=self.vocab)
        for row in range(batch):
            params = SamplingParams(
                temperature=(0.0, 0.7, 1.7)[row % 3],
                top_k=(25, 0)[row % 2],
                repetition_penalty=(1.0, 1.3, 0.7)[row % 3],
            )
            state.set_row(row, params, seed=1000 + row)
            state.frame[row] = 7 * row
            state.seen[row] = (row % 2) * 0x5A5A5A5A
        return state

    def hidden(self, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        return torch.randn(batch, self.expected["local.hidden_in"].shape[1], generator=generator)


@pytest.fixture(params=["local_hd16", "local_hd80"])
def case(request) -> Case:
    directory = GOLDEN / request.param
    return Case(MossTTS.from_pretrained(directory).frame_weights(), load_file(directory / "expected.safetensors"))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()


def identity_map(batch: int) -> torch.Tensor:
    return torch.arange(batch, dtype=torch.int32)


def golden_pairs(case: Case, frame: LocalFrame) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    expected = case.expected
    return {
        "stop_logits": (frame.stop_logits, expected["local.stop_logits"]),
        "audio_logits": (frame.audio_logits, expected["local.audio_logits"]),
        "hidden": (frame.hidden, expected["local.hidden_out"]),
        "k_cache": (frame.k_cache, expected["local.k_cache"][:, :CODEBOOKS]),
        "v_cache": (frame.v_cache, expected["local.v_cache"][:, :CODEBOOKS]),
    }


def test_golden(case):
    frame = case.teacher_forced(torch.float32)
    for name, (got, expected) in golden_pairs(case, frame).items():
        assert relative_error(got, expected) < 1e-4, name
    assert torch.equal(frame.codes, case.expected["local.codes"])


def test_reduced_precision_follows_float64(case):
    exact, rounded = case.teacher_forced(torch.float64), case.teacher_forced(torch.bfloat16)
    for name, (_, expected) in golden_pairs(case, exact).items():
        got = getattr(exact, name)
        assert relative_error(expected.double(), got) < 1e-5, name
        assert got.dtype == torch.float64
        # About eight roundings of 2^-9 lie between the input and a logit, and the largest error of them all counts.
        assert getattr(rounded, name).dtype == torch.bfloat16
        assert 0 < relative_error(getattr(rounded, name).double(), got) < 8 * 2**-9, name


def test_draws_are_those_of_the_sampler(case):
    batch = 12
    state, before = case.state(batch), case.state(batch)
    row_map = torch.randperm(batch, generator=torch.Generator().manual_seed(1)).int()
    everyone = torch.ones(batch, dtype=torch.bool)
    frame = local_frame_decode_reference(case.hidden(batch), case.weights, state, row_map, everyone)
    assert 0 < frame.continues.sum() < batch

    def draw(logits, active, parameters, seen, channel):
        code, status = torch.empty(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32)
        tail = (before.seed, before.frame, seen, channel, max(channel - 1, 0), case.vocab, code, status)
        sample_codebook_reference(logits.contiguous(), row_map, active, *parameters, *tail)
        return code

    text = (before.text_temperature, before.text_top_k, before.text_top_p, None)
    assert torch.equal(frame.continues, draw(frame.stop_logits, everyone, text, None, 0) == 0)
    audio = (before.temperature, before.top_k, before.top_p, before.repetition_penalty)
    for q in range(CODEBOOKS):
        code = draw(frame.audio_logits[:, q], frame.continues, audio, before.seen, q + 1)
        assert torch.equal(frame.codes[:, q], code), q
    assert torch.equal(state.seen, before.seen)


def test_rows_that_produce_nothing(case):
    batch = 12
    state, before = case.state(batch), case.state(batch)
    active = torch.arange(batch) % 4 != 0
    row_map = torch.where(active, identity_map(batch), batch).int()  # inactive rows share the null row
    hidden = case.hidden(batch)
    hidden[~active] = torch.nan
    frame = local_frame_decode_reference(hidden, case.weights, state, row_map, active)
    assert 0 < frame.continues.sum() < active.sum()

    silent = ~frame.continues
    assert not frame.continues[~active].any()
    assert (frame.codes[silent] == case.vocab).all()
    assert (frame.codes[frame.continues] < case.vocab).all()
    assert (frame.status == 0).all()
    pad_embedding = case.weights.embed_tokens[case.weights.pad_token_id]
    assert torch.equal(frame.feedback[silent], pad_embedding.expand(int(silent.sum()), -1))
    slot = torch.full((batch,), case.weights.audio_assistant_slot_token_id)
    fed_back = embed_codes_reference(
        slot, frame.codes, case.weights.embed_tokens, case.weights.audio_embeddings, case.vocab
    )
    assert torch.equal(frame.feedback[frame.continues], fed_back[frame.continues])

    unchanged = torch.cat((silent, torch.tensor([True])))
    for field in dataclasses.fields(state):
        now, then = getattr(state, field.name), getattr(before, field.name)
        assert torch.equal(now[unchanged], then[unchanged]), field.name
    assert torch.equal(state.frame, before.frame + (~unchanged).int())


def test_rows_do_not_depend_on_the_batch(case):
    batch = 12
    hidden, state = case.hidden(batch), case.state(batch)
    everyone = torch.ones(batch, dtype=torch.bool)
    together = local_frame_decode_reference(hidden, case.weights, state, identity_map(batch), everyone)
    for row in range(batch):
        alone_state = case.state(batch)
        row_map = torch.tensor([row], dtype=torch.int32)
        alone = local_frame_decode_reference(hidden[row : row + 1], case.weights, alone_state, row_map, everyone[:1])
        assert torch.equal(alone.codes[0], together.codes[row])
        assert torch.equal(alone_state.seen[row], state.seen[row])


def test_not_finite_logits_show_in_the_status(case):
    hidden = case.hidden(3)
    hidden[1] = torch.nan
    everyone = torch.ones(3, dtype=torch.bool)
    frame = local_frame_decode_reference(hidden, case.weights, case.state(3), identity_map(3), everyone)
    assert frame.status.ne(0).tolist() == [False, True, False]

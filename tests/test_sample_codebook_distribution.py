"""sample_codebook draws from the exact distribution: chi-square over 2^20 draws for each set of parameters."""

import pytest
import torch

from moss_kernels import SamplingState
from moss_kernels.sample_codebook.reference import penalised_scores
from moss_kernels.testing.cases import SampleCodebookInputs
from moss_kernels.testing.compare import chi_square_p_value, implementation

DRAWS = 2**20
SEEN = 0b10110

# vocab, temperature, top_k, top_p, repetition penalty
SMALL = [
    (2, 1.0, 0, 1.0, 1.0),
    (8, 1.7, 0, 1.0, 1.0),
    (12, 0.7, 5, 1.0, 1.0),
    (12, 1.0, 0, 0.8, 1.0),
    (16, 1.7, 12, 0.9, 1.3),
    (24, 5.0, 0, 0.95, 2.0),
    (64, 1.7, 25, 0.8, 1.0),
]
FULL = [
    (1024, 1.7, 25, 0.8, 1.0),
    (1024, 1.7, 0, 0.9, 1.3),
    (1024, 3.0, 0, 1.0, 1.0),
    (1024, 1.0, 50, 1.0, 2.0),
    (1024, 1.0, 0, 0.5, 1.0),
    (2, 1.0, 50, 1.0, 1.0),
]


def _exact_probabilities(z: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    order = z.argsort(descending=True, stable=True)
    kept = order[: top_k or len(z)]
    p = torch.softmax(z[kept], 0)
    kept = kept[p.cumsum(0) - p <= top_p]
    return torch.zeros_like(z).scatter_(0, kept, torch.softmax(z[kept], 0))


def _p_value(sampler, device, rows, vocab, temperature, top_k, top_p, penalty) -> float:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    state = SamplingState.allocate(rows=rows, codebooks=1, vocab=vocab, device="cpu")
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        getattr(state, name).fill_(value)
    state.repetition_penalty.fill_(penalty)
    state.seen[:, :, 0] = SEEN
    # Consecutive seeds: independence must come from the generator, not from how seeds are chosen.
    state.seed.copy_(torch.arange(rows + 1))
    inputs = SampleCodebookInputs(
        logits=logits.expand(rows, vocab),
        state=state,
        row_map=torch.arange(rows, dtype=torch.int32),
        active=torch.ones(rows, dtype=torch.bool),
    ).to(device)
    counts = torch.zeros(vocab, dtype=torch.int64)
    for _ in range(DRAWS // rows):
        inputs.state.seen.copy_(state.seen)
        counts += inputs.run(sampler)[0].cpu().bincount(minlength=vocab)
        inputs.state.frame += 1
    seen = state.seen[:1, 0]
    scores = penalised_scores(logits[None], seen, torch.tensor([penalty]))[0]
    return chi_square_p_value(counts, _exact_probabilities(scores.double() / temperature, top_k, top_p))


@pytest.mark.parametrize("parameters", SMALL)
def test_draws_follow_the_exact_probabilities(parameters):
    assert _p_value(implementation("sample_codebook", "reference"), "cpu", 2**13, *parameters) > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("parameters", FULL)
@pytest.mark.parametrize("name", ["reference", "triton", "cuda"])
def test_draws_follow_the_exact_probabilities_on_the_gpu(name, parameters):
    assert _p_value(implementation("sample_codebook", name), "cuda", 2**15, *parameters) > 1e-4

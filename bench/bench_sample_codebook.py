"""Time of one draw: `python -m bench.bench_sample_codebook`.

A graph holds 48 draws, one node each for a fused sampler, cycling through 12 codebooks that have logits, a random
channel and a history of their own; times are those of one draw.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from bench import baselines, harness
from moss_kernels import _library
from moss_kernels.sample_codebook.reference import filtered_weights, penalised_scores
from moss_kernels.testing.cases import SAMPLE_CODEBOOK_CASES, SampleCodebookCase, SampleCodebookInputs
from moss_kernels.testing.compare import implementation, require_same_draws

CODEBOOKS, DRAWS = 12, 48
TOP_P_TOLERANCE = 1e-5


def _run(sampler: Callable[..., None], draws: list[SampleCodebookInputs]) -> Callable[[], None]:
    batch, device = draws[0].logits.shape[0], draws[0].logits.device
    codes = torch.zeros(batch, CODEBOOKS, dtype=torch.int64, device=device)
    status = torch.zeros(batch, dtype=torch.int32, device=device)

    def run() -> None:
        for draw in range(DRAWS):
            codebook = draw % CODEBOOKS
            sampler(*draws[codebook].arguments(codes[:, codebook], status))

    return run


def _check_kept(sampler: Callable[..., None], inputs: SampleCodebookInputs) -> None:
    """A baseline's codes must be among those that top_k and top_p keep (with a float's tolerance for top_p)."""
    state, rows = inputs.state, inputs.row_map.long()
    scores = penalised_scores(
        inputs.logits.float(), _packed_seen(state.seen)[rows, inputs.codebook], state.repetition_penalty[rows]
    )
    z = scores / state.temperature[rows, None]
    weights = filtered_weights(
        z, torch.ones_like(z, dtype=torch.bool), state.top_k[rows], state.top_p[rows] + TOP_P_TOLERANCE
    )
    code, _ = inputs.run(sampler)
    assert (weights.gather(1, code[:, None]) > 0).all(), "a code outside the kept set was drawn"


def _packed_seen(seen: torch.Tensor) -> torch.Tensor:
    if seen.dtype == torch.int32:
        return seen
    words = (seen.unflatten(2, (-1, 32)).long() << torch.arange(32, device=seen.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _draws(case: SampleCodebookCase, device: str, *, unpacked_seen: bool = False) -> list[SampleCodebookInputs]:
    """Inputs of the 12 codebooks: one state, logits for each."""
    first = case.inputs(device)
    if unpacked_seen:
        shape = (*first.state.seen.shape[:2], case.vocab)
        first.state.seen = torch.zeros(shape, dtype=torch.bool, device=device)
    return [
        dataclasses.replace(first, logits=case.inputs(device, seed=codebook).logits, codebook=codebook)
        for codebook in range(CODEBOOKS)
    ]


def _variants(case: SampleCodebookCase, device: str) -> list[harness.Variant]:
    own = ["reference"]
    compared = [("torch_ops", baselines.sample_torch_ops)]
    if device == "cuda":
        own = ["cuda", "triton", "reference"] if _library.is_available() else ["triton", "reference"]
        if case.params is None or 0 < case.params.top_k <= baselines.TRITON_BASELINE_TOP_K:
            compared.append(("triton_baseline", baselines.sample_triton_baseline))
    variants = []
    for name in own:
        sampler = implementation("sample_codebook", name)
        check = partial(require_same_draws, sampler, case.inputs(device), device)
        variants.append(harness.Variant(name, _run(sampler, _draws(case, device)), check))
    for name, sampler in compared:
        draws = _draws(case, device, unpacked_seen=name == "torch_ops")
        variants.append(harness.Variant(name, _run(sampler, draws), partial(_check_kept, sampler, draws[0])))
    return variants


def _case(case: SampleCodebookCase) -> harness.Case:
    # logits and the history bits of each row; its parameters, seed, frame, row, flag, code and status.
    row_bytes = case.vocab * 2 + case.vocab // 8 + 4 * 4 + 8 + 4 + 4 + 1 + 8 + 4
    conditions = {"dtype": "bfloat16", "l2": "hot", "vocab": case.vocab}
    return harness.Case(case.name, "us", case.batch * row_bytes, 0, DRAWS, conditions)


def main() -> None:
    options = harness.argument_parser(__doc__).parse_args()
    for case in SAMPLE_CODEBOOK_CASES:
        if options.smoke:
            case = dataclasses.replace(case, batch=min(case.batch, 3), vocab=64)
        harness.bench(_case(case), partial(_variants, case, "cpu" if options.smoke else "cuda"), options)


if __name__ == "__main__":
    main()

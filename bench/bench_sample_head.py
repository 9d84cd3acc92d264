"""Time of a head's product and the draw from it: `python -m bench.bench_sample_head`.

A graph holds 48 of them, each with weights of its own, so that none is in L2; times are those of one.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from bench import harness
from moss_kernels import _library, sample_codebook, sample_head_workspace
from moss_kernels.testing.cases import SampleCodebookCase
from moss_kernels.testing.compare import implementation

DRAWS, HIDDEN = 48, 2560
CASES = tuple(SampleCodebookCase(f"sample_head/B{batch}", batch, None) for batch in (1, 8, 16, 32, 64, 128))


def _torch_linear(hidden: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, *draw: object) -> None:
    sample_codebook(torch.nn.functional.linear(hidden, weight), *draw)


class _Heads:
    """Inputs of the case, and a run of `sampler` over all weights."""

    def __init__(self, case: SampleCodebookCase, hidden: int, device: str, sampler: Callable[..., None]):
        generator = torch.Generator(device).manual_seed(0)

        def normal(rows: int) -> torch.Tensor:
            return torch.randn(rows, hidden, generator=generator, device=device)

        self._sampler = sampler
        self._hidden = normal(case.batch).bfloat16()
        self._weights = [(normal(case.vocab) * 3 * hidden**-0.5).bfloat16() for _ in range(DRAWS)]
        self._workspace = sample_head_workspace(device)
        self._state = case.inputs(device)
        self._codes = torch.zeros(case.batch, DRAWS, dtype=torch.int64, device=device)
        self._status = torch.zeros(case.batch, dtype=torch.int32, device=device)

    def run(self) -> None:
        for draw, weight in enumerate(self._weights):
            arguments = self._state.arguments(self._codes[:, draw], self._status)
            self._sampler(self._hidden, weight, self._workspace, *arguments[1:])

    def check(self) -> None:
        """Logits may round otherwise than the reference's, which few codes show."""
        expected, actual = self._state.to(self._hidden.device), self._state.to(self._hidden.device)
        operands = self._hidden, self._weights[0], self._workspace
        codes = [inputs.run(partial(_without_logits, sampler, operands))[0] for inputs, sampler in
                 ((expected, implementation("sample_head", "reference")), (actual, self._sampler))]  # fmt: skip
        assert (codes[0] != codes[1]).sum() <= 1 + len(codes[0]) // 10, "codes differ from the reference's"


def _without_logits(sampler: Callable[..., None], operands: tuple, logits: torch.Tensor, *draw: object) -> None:
    sampler(*operands, *draw)


def _variants(case: SampleCodebookCase, hidden: int, device: str) -> list[harness.Variant]:
    samplers = {"reference": implementation("sample_head", "reference")}
    if device == "cuda":
        samplers = {"cuda": implementation("sample_head", "cuda")} if _library.is_available() else {}
        samplers["torch_linear"] = _torch_linear
    heads = {name: _Heads(case, hidden, device, sampler) for name, sampler in samplers.items()}
    return [harness.Variant(name, each.run, each.check) for name, each in heads.items()]


def _case(case: SampleCodebookCase) -> harness.Case:
    moved = 2 * HIDDEN * (case.vocab + case.batch)
    conditions = {"dtype": "bfloat16", "l2": "cold", "vocab": case.vocab, "hidden": HIDDEN}
    return harness.Case(case.name, "us", moved, 2 * case.batch * case.vocab * HIDDEN, DRAWS, conditions)


def main() -> None:
    options = harness.argument_parser(__doc__).parse_args()
    for case in CASES:
        hidden, device = HIDDEN, "cuda"
        if options.smoke:
            case, hidden, device = dataclasses.replace(case, batch=min(case.batch, 3), vocab=64), 32, "cpu"
        harness.bench(_case(case), partial(_variants, case, hidden, device), options)


if __name__ == "__main__":
    main()

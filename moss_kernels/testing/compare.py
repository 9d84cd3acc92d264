"""Comparisons that tests and benchmarks share. Each raises AssertionError that says what differs, where and how."""

import importlib
from collections.abc import Callable

import torch

from moss_kernels.sample_codebook import sample_codebook_reference

from .cases import SampleCodebookInputs


def implementation(op: str, name: str) -> Callable[..., None]:
    """The implementation of an op by name: reference, triton or cuda. Its arguments are those of the op, unchecked."""
    module = "reference" if name == "reference" else f"{name}_kernel"
    return getattr(importlib.import_module(f"moss_kernels.{op}.{module}"), f"{op}_{name}")


def require_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises AssertionError unless two tensors of any devices are bitwise equal; floats must not be NaN."""
    actual, expected = actual.cpu(), expected.cpu()
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"`{name}` must be {expected.dtype} {tuple(expected.shape)}, got {actual.dtype} {tuple(actual.shape)}"
        )
    differing = (actual != expected).nonzero()
    if len(differing):
        first = tuple(differing[0].tolist())
        raise AssertionError(
            f"`{name}` differs in {len(differing)} of {actual.numel()} elements, first at {first}: "
            f"expected {expected[first].item()}, got {actual[first].item()}"
        )


def require_same_replays(run: Callable[[], None], out: torch.Tensor, *, replays: int = 20) -> None:
    """Raises AssertionError unless each replay of a graph of `run` leaves in `out` what running it by itself does.

    Args:
        run: CUDA work that writes all of `out` and depends on nothing that it writes.
        out: floating; overwritten.
    """
    run()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(replays):
        out.zero_()
        graph.replay()
        require_equal("out", out, expected)


def require_same_draws(
    sampler: Callable[..., None], inputs: SampleCodebookInputs, device: torch.device | str, *, label: str = ""
) -> None:
    """Raises AssertionError unless a sampler on a device draws what the reference draws on the CPU.

    Codes, status words and seen bits must be bitwise equal. The inputs are copied, not changed.
    """
    expected, actual = inputs.to("cpu"), inputs.to(device)
    expected_code, expected_status = expected.run(sample_codebook_reference)
    code, status = actual.run(sampler)
    require_equal(f"{label} code", code, expected_code)
    require_equal(f"{label} status", status, expected_status)
    require_equal(f"{label} seen", actual.state.seen, expected.state.seen)


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Probability that draws from the given distribution deviate at least as much as these counts.

    Args:
        counts: [V] int64. How often each code was drawn.
        probabilities: [V] float64. Their sum is 1.

    Raises:
        AssertionError: A code of probability 0 was drawn.
    """
    possible = probabilities > 0
    if counts[~possible].any():
        raise AssertionError(f"codes outside the kept set were drawn {counts[~possible].sum()} times")
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    # Survival function of the chi-square distribution with (kept codes - 1) degrees of freedom.
    return torch.special.gammaincc((possible.sum() - 1).double() / 2, statistic / 2).item()

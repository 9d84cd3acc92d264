"""The CUDA C++ draw without a GPU: csrc/device/sample_row.cuh, compiled for the CPU over an emulator of a thread block.

Each call runs in several orders of the block's threads, so that a missing barrier shows as another result.
"""

import ctypes
import inspect
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingState
from moss_kernels.sample_codebook import sample_codebook_reference
from moss_kernels.sample_codebook.cuda_kernel import SampleCodebookParams
from moss_kernels.sample_codebook.reference import exp_weights
from moss_kernels.testing.cases import (
    SAMPLE_CODEBOOK_CASES,
    SampleCodebookInputs,
    sample_codebook_inputs,
    top_p_edge_inputs,
    weight_arguments,
)
from moss_kernels.testing.compare import require_equal, require_same_draws

CSRC = Path(__file__).parents[1] / "csrc"
NAMES = tuple(inspect.signature(sample_codebook_reference).parameters)
# Upward, downward, shuffled.
ORDERS = (0, 1, 2)


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Function (order, *arguments of sample_codebook) that draws with the emulated kernel; float32 logits."""
    library = tmp_path_factory.mktemp("emulated") / "sample_row.so"
    source = CSRC / "tests" / "sample_row_emulated.cpp"
    # Products must not be fused with sums; the fortified longjmp takes a switch of stacks for an error.
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    warnings = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    command = ["c++", *options, *warnings, f"-I{CSRC}", f"-I{CSRC / 'include'}", source, "-o", library]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    function = ctypes.CDLL(str(library)).emulate_sample_codebook
    function.argtypes = [ctypes.POINTER(SampleCodebookParams), ctypes.c_uint32]
    function.restype = ctypes.c_char_p

    def draw(order: int, *arguments: object) -> None:
        values = dict(zip(NAMES, arguments, strict=True))
        fields = {name: v.data_ptr() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
        batch, vocab = values["logits"].shape
        codebooks = 1 if values["seen"] is None else values["seen"].shape[1]
        params = SampleCodebookParams(
            batch=batch, vocab=vocab, codebooks=codebooks, logits_row_stride=vocab, code_stride=1, **fields
        )
        error = function(ctypes.byref(params), order)
        assert error is None, error.decode()

    return draw


def _check(emulate, inputs: SampleCodebookInputs) -> None:
    inputs.logits = inputs.logits.float()
    for order in ORDERS:
        require_same_draws(partial(emulate, order), inputs, "cpu", label=f"order {order}")


@pytest.mark.parametrize(
    ("vocab", "batch"),
    [(2, 300), (3, 300), (17, 300), (32, 400), (33, 150), (64, 300), (1000, 150), (1024, 400), (4095, 30), (4096, 60)],
)
def test_draws_as_the_reference(emulate, vocab, batch):
    inputs = sample_codebook_inputs(batch, vocab, seed=vocab, device_values=True)
    for words in (None, torch.zeros(batch, dtype=torch.int64), torch.full((batch,), 2**32 - 1)):
        inputs.random_words = words
        _check(emulate, inputs)
    inputs.penalised = False
    _check(emulate, inputs)


def test_draws_without_history(emulate):
    inputs = sample_codebook_inputs(100, 64, seed=0)
    inputs.penalised = False
    expected, _ = inputs.to("cpu").run(sample_codebook_reference)
    inputs.state.seen = None
    require_equal("code", inputs.run(partial(emulate, 0))[0], expected)


def test_a_code_that_starts_at_the_top_p_limit_stays(emulate):
    _check(emulate, top_p_edge_inputs())


def test_rounding_of_top_p(emulate):
    """4096 equal codes and top_p just below, at and below half a unit of 2^-32 under 1/4096: two codes stay or one."""
    inputs = sample_codebook_inputs(3, 4096, seed=0)
    inputs.logits = torch.zeros(3, 4096)
    inputs.active.fill_(True)
    inputs.row_map = torch.arange(3, dtype=torch.int32)
    inputs.state.temperature.fill_(1)
    inputs.state.top_k.fill_(0)
    inputs.state.top_p[:3] = 2.0**-12 * (1 - torch.tensor([2.0**-24, 2.0**-21, 2.0**-20]))
    inputs.penalised = False
    inputs.random_words = torch.full((3,), 2**32 - 1)
    _check(emulate, inputs)
    assert inputs.run(partial(emulate, 0))[0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("top_k", [0, 2])
def test_weights(emulate, top_k):
    """Codes of weights 2^30 and w: the random words between which the draw goes from the one to the other."""
    u = weight_arguments()
    total = exp_weights(u) + 2**30
    first_of_second = (-(-(2**62) // total)).clamp(max=2**32 - 1)
    batch = 2 * len(u)
    state = SamplingState.allocate(rows=batch, codebooks=1, vocab=3)
    state.temperature.fill_(1)
    state.top_k.fill_(top_k)
    state.top_p.fill_(1)
    inputs = SampleCodebookInputs(
        logits=torch.nn.functional.pad(torch.stack([torch.zeros_like(u), u], 1), (0, 1), value=-torch.inf).repeat(2, 1),
        state=state,
        row_map=torch.arange(batch, dtype=torch.int32),
        active=torch.ones(batch, dtype=torch.bool),
        random_words=torch.cat([first_of_second - 1, first_of_second]),
    )
    _check(emulate, inputs)
    assert inputs.run(partial(emulate, 0))[0].sum() == (total > 2**30).sum()


@pytest.mark.parametrize("case", SAMPLE_CODEBOOK_CASES, ids=lambda case: case.name)
def test_benchmark_cases(emulate, case):
    _check(emulate, case.inputs("cpu"))


@pytest.mark.parametrize("vocab", [32, 1024])
@pytest.mark.parametrize(("highest", "step"), [(8.0, 2.0**-21), (0.0, 2.0**-149)])
def test_scores_that_the_temperature_makes_equal(emulate, vocab, highest, step):
    """Scores a few times the least step below the highest: many are equal once divided, also at the top_k threshold."""
    batch = 600
    generator = torch.Generator().manual_seed(vocab)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    inputs = sample_codebook_inputs(batch, vocab, seed=vocab)
    spread = 2 ** integers(4, 15, batch, 1)
    inputs.logits = highest - integers(0, 2**15, batch, vocab) % spread * step
    inputs.logits[:, 7:8] = highest - 2 * spread * step
    inputs.active.fill_(True)
    inputs.row_map = torch.arange(batch, dtype=torch.int32)
    inputs.state.temperature = torch.tensor([0.7, 1.3, 1.7, 1.9])[integers(0, 4, batch + 4)]
    inputs.state.top_k = integers(1, min(vocab, 65), batch + 4).to(torch.int32)
    inputs.state.top_p.fill_(1)
    inputs.penalised = False
    _check(emulate, inputs)

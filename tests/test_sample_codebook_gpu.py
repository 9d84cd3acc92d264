"""sample_codebook on a GPU: a million draws equal in every implementation, and graph replay."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from moss_kernels import SamplingParams, sample_codebook
from moss_kernels.sample_codebook import sample_codebook_reference
from moss_kernels.testing.cases import PAD_ID, SAMPLE_CODEBOOK_CASES, sample_codebook_inputs, top_p_edge_inputs
from moss_kernels.testing.compare import implementation, require_equal, require_same_draws

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = ("reference", "triton", "cuda")
# vocab, rows; together 1,000,000
DRAWS = ((2, 100_000), (33, 100_000), (64, 400_000), (1000, 100_000), (1024, 280_000), (4096, 20_000))
CHUNK = 20_000


@pytest.mark.parametrize(("vocab", "rows"), DRAWS)
def test_a_million_draws_are_the_same_everywhere(vocab, rows):
    for chunk in range(rows // CHUNK):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[chunk % 3]
        inputs = sample_codebook_inputs(CHUNK, vocab, seed=1000 * vocab + chunk, dtype=dtype, device_values=True)
        expected = inputs.to("cpu")
        code, status = expected.run(sample_codebook_reference)
        for name in IMPLEMENTATIONS:
            actual = inputs.to("cuda")
            actual_code, actual_status = actual.run(implementation("sample_codebook", name))
            require_equal(f"{name}: code", actual_code, code)
            require_equal(f"{name}: status", actual_status, status)
            require_equal(f"{name}: seen", actual.state.seen, expected.state.seen)


@pytest.mark.parametrize("word", [0, 2**32 - 1, None])
@pytest.mark.parametrize("vocab", [2, 3, 64, 1024, 4095])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_extreme_words_and_missing_history(name, vocab, word):
    inputs = sample_codebook_inputs(500, vocab, seed=vocab, device_values=True)
    inputs.random_words = None if word is None else torch.full((500,), word)
    require_same_draws(implementation("sample_codebook", name), inputs, "cuda")
    inputs.penalised = False
    require_same_draws(implementation("sample_codebook", name), inputs, "cuda")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_code_that_starts_at_the_top_p_limit_stays(name):
    require_same_draws(implementation("sample_codebook", name), top_p_edge_inputs(), "cuda")


@pytest.mark.parametrize("case", SAMPLE_CODEBOOK_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_benchmark_cases(name, case):
    require_same_draws(implementation("sample_codebook", name), case.inputs("cpu"), "cuda")


def test_the_op_draws_as_the_reference():
    require_same_draws(sample_codebook, sample_codebook_inputs(128, 1024, seed=5), "cuda")


@triton.jit
def _advance_late(row_map, frame, seed, ROWS: tl.constexpr):
    """The kernel behind may start at once; what it reads of [ROWS] row_map, frame and seed changes 0.1 ms later."""
    gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    next_row = tl.load(row_map + (row + 1) % ROWS)
    next_frame = tl.load(frame + row) + 1
    next_seed = tl.load(seed + row) + 5
    sleep: tl.constexpr = "nanosleep.u32 100000; mov.b32 $0, $1;"
    late = tl.inline_asm_elementwise(sleep, "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(row_map + late, next_row)
    tl.store(frame + late, next_frame)
    tl.store(seed + late, next_seed)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_the_kernel_ahead_writes_late_is_what_is_read(name):
    batch = 64
    expected, actual = (SAMPLE_CODEBOOK_CASES[1].inputs(device) for device in ("cpu", "cuda"))
    code = torch.zeros(batch, dtype=torch.int64, device="cuda")
    status = torch.zeros(batch, dtype=torch.int32, device="cuda")
    for step in range(8):
        _advance_late[(1,)](actual.row_map, actual.state.frame, actual.state.seed, batch, num_warps=1)
        implementation("sample_codebook", name)(*actual.arguments(code, status))
        expected.row_map = expected.row_map.roll(-1)
        expected.state.frame[:batch] += 1
        expected.state.seed[:batch] += 5
        require_equal(f"code of step {step}", code, expected.run(sample_codebook_reference)[0])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_graph_replay(name):
    sampler = implementation("sample_codebook", name)
    batch = 64
    inputs = sample_codebook_inputs(batch, 1024, seed=7).to("cuda")
    state, history = inputs.state, inputs.state.seen.clone()
    inputs.logits.copy_(torch.randn(batch, 1024))
    inputs.active.fill_(True)
    inputs.row_map.copy_(torch.randperm(batch))
    for row in range(batch):
        state.set_row(row, SamplingParams(repetition_penalty=1.2), seed=row)
    state.seen.copy_(history)
    code = torch.zeros(batch, dtype=torch.int64, device="cuda")
    status = torch.zeros(batch, dtype=torch.int32, device="cuda")
    arguments = inputs.arguments(code, status)
    sampler(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler(*arguments)

    def replay() -> torch.Tensor:
        """Codes of one replay from the same history, checked against the reference on the CPU."""
        state.seen.copy_(history)
        expected_inputs = inputs.to("cpu")
        expected, _ = expected_inputs.run(sample_codebook_reference)
        graph.replay()
        require_equal("code", code, expected)
        require_equal("seen", state.seen, expected_inputs.state.seen)
        return code.clone()

    first = replay()
    require_equal("code of the second replay", replay(), first)
    state.frame += 1
    assert (replay() != first).float().mean() > 0.5
    state.temperature[: batch // 2] = 0
    greedy = replay()
    state.seed += 1
    halved = inputs.row_map < batch // 2
    reseeded = replay()
    require_equal("code of greedy rows", reseeded[halved], greedy[halved])
    assert (reseeded[~halved] != greedy[~halved]).float().mean() > 0.5
    inputs.active[::2] = False
    assert (replay()[::2] == PAD_ID).all()

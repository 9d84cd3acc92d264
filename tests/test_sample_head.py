"""sample_head: the draw from the logits of a linear, bitwise where sums are exact, and the same in any batch."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from moss_kernels import _library, sample_head
from moss_kernels.sample_codebook import sample_codebook_reference
from moss_kernels.sample_head import cuda_kernel, sample_head_workspace
from moss_kernels.testing.cases import SampleCodebookInputs, mixed_state
from moss_kernels.testing.compare import require_equal, require_same_draws

HIDDEN, VOCAB = 2560, 1024


def quarters(*shape: int, seed: int) -> torch.Tensor:
    """bfloat16 multiples of 1/4 within 1/2: sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-2, 3, shape, generator=generator) / 4).bfloat16()


def draws(hidden: torch.Tensor, weight: torch.Tensor, seed: int) -> SampleCodebookInputs:
    """Draws from the logits of [B, K] and [V, K], with mixed parameters; one row in eight is inactive."""
    generator = torch.Generator().manual_seed(seed)
    (batch, vocab), count = (len(hidden), len(weight)), len(hidden) + 3
    active = torch.rand(batch, generator=generator) < 7 / 8
    row_map = torch.where(active, torch.randperm(count, generator=generator)[:batch], count).to(torch.int32)
    logits = F.linear(hidden.double(), weight.double()).bfloat16()
    return SampleCodebookInputs(logits, mixed_state(count, vocab, generator), row_map, active, codebook=1)


def sampler(op: Callable[..., None], hidden: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor):
    """`op` as a sampler, which makes its logits for itself."""
    return lambda logits, *draw: op(hidden, weight, workspace, *draw)


def test_the_op_draws_from_the_logits_of_the_linear():
    hidden, weight = quarters(9, 40, seed=0)[:, :32], quarters(96, 32, seed=1)
    inputs = draws(hidden, weight, 2)
    require_same_draws(sampler(sample_head, hidden, weight, sample_head_workspace("cpu")), inputs, "cpu")


def test_bad_arguments_are_named():
    hidden, weight, workspace = quarters(4, 32, seed=0), quarters(96, 32, seed=1), sample_head_workspace("cpu")
    inputs = draws(hidden, weight, 2)
    code, status = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    draw = inputs.arguments(code, status)[1:]
    with pytest.raises(ValueError, match=r"`sample_head`: `weight` must be \[V, K\] with K = 32"):
        sample_head(hidden, weight[:, :16], workspace, *draw)
    with pytest.raises(TypeError, match="`sample_head`: `hidden` must be bfloat16, got float32"):
        sample_head(hidden.float(), weight, workspace, *draw)
    with pytest.raises(ValueError, match="`sample_head`: `workspace` must be"):
        sample_head(hidden, weight, workspace[1:], *draw)
    with pytest.raises(ValueError, match=r"`sample_head`: `row_map` must be \[B\] with B = 3"):
        sample_head(hidden[:3], weight, workspace, *draw)


def test_what_the_cuda_kernel_takes():
    hidden, weight = torch.empty(128, HIDDEN), torch.empty(VOCAB, HIDDEN)
    assert cuda_kernel.takes(hidden, weight) and cuda_kernel.takes(hidden[:0], weight)
    assert not cuda_kernel.takes(torch.empty(129, HIDDEN), weight)
    assert not cuda_kernel.takes(hidden, weight[1:]) and not cuda_kernel.takes(hidden[:, :256], weight[:, :256])


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "inputs", "vocab"), [(9, 32, 96), (129, HIDDEN, VOCAB)])
def test_other_sizes_take_the_reference(batch, inputs, vocab):
    hidden, weight = quarters(batch, inputs, seed=0), quarters(vocab, inputs, seed=1)
    op = sampler(sample_head, hidden.cuda(), weight.cuda(), sample_head_workspace("cuda"))
    require_same_draws(op, draws(hidden, weight, 2), "cuda")


def test_opcheck():
    hidden, weight = quarters(4, 32, seed=0), quarters(96, 32, seed=1)
    code, status = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    draw = draws(hidden, weight, 2).arguments(code, status)[1:]
    torch.library.opcheck(torch.ops.moss.sample_head, (hidden, weight, sample_head_workspace("cpu"), *draw))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "`struct_size` must be .*, got 8"),
        ("inputs", 2048, "`vocab` and `inputs` must be 1024 and 2560, got 1024 and 2048"),
        ("hidden_row_stride", 2559, "`hidden_row_stride` must be >= 2560, got 2559"),
        ("hidden_row_stride", 2564, "`hidden_row_stride` must be a multiple of 8, got 2564"),
        ("hidden", 0x1008, "`hidden` must be aligned to 16 bytes, got 0x1008"),
        ("weight", None, "`weight` must not be null"),
        ("workspace", None, "`workspace` must not be null"),
        ("draw.struct_size", 8, "`struct_size` must be .*, got 8"),
        ("draw.batch", 129, r"`batch` must be 0 \.\. 128, got 129"),
        ("draw.vocab", 1000, "must be 1024 and 2560, got 1000 and 2560"),
        ("draw.codebook", 12, r"`codebook` must be 0 \.\. 11, got 12"),
        ("draw.seed", None, "`seed` must not be null"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    params = cuda_kernel.SampleHeadParams(inputs=HIDDEN, hidden_row_stride=HIDDEN)
    for struct in (params, params.draw):
        for name, kind in struct._fields_:
            if kind is ctypes.c_void_p and name != "stream":
                setattr(struct, name, 0x1000)
        struct.struct_size, struct.abi_version = ctypes.sizeof(struct), _library.ABI_VERSION
    draw = params.draw
    draw.batch, draw.vocab, draw.pool_rows, draw.codebooks, draw.code_stride = 2, VOCAB, 3, 12, 1
    place, _, name = field.rpartition(".")
    setattr(draw if place else params, name, value)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 8, 9, 31, 32, 33, 64, 65, 100, 128])
def test_codes_are_those_of_exact_logits(batch):
    hidden, weight = quarters(batch, HIDDEN + 8, seed=batch)[:, 8:], quarters(VOCAB, HIDDEN, seed=1)
    inputs, workspace = draws(hidden, weight, batch), sample_head_workspace("cuda")
    on_gpu = sampler(cuda_kernel.sample_head_cuda, quarters(batch, HIDDEN + 8, seed=batch).cuda()[:, 8:],
                     weight.cuda(), workspace)  # fmt: skip
    for _ in range(3):
        require_same_draws(on_gpu, inputs, "cuda")
        assert (workspace == 0xFF).all()


@pytest.mark.gpu
def test_a_row_has_the_same_code_in_any_batch():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(128, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.06).bfloat16()
    inputs, workspace = draws(hidden, weight, 4).to("cuda"), sample_head_workspace("cuda")
    expected, _ = inputs.to("cuda").run(sampler(sample_head, hidden.cuda(), weight.cuda(), workspace))
    elsewhere, _ = inputs.to("cpu").run(sample_codebook_reference)
    assert (elsewhere == expected.cpu()).float().mean() > 0.9
    for rows in (slice(0, 1), slice(5, 12), slice(70, 90), slice(60, 120)):
        part = inputs.to("cuda")
        part.logits, part.row_map, part.active = part.logits[rows], part.row_map[rows], part.active[rows]
        code, _ = part.run(sampler(sample_head, hidden.cuda()[rows], weight.cuda(), workspace))
        require_equal(f"code of rows {rows}", code, expected[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 32, 64, 128])
def test_launches_of_a_graph_that_overlap(batch):
    """Each draw's history is what those before it left, although kernels start before the one ahead has ended."""
    hidden, weights = quarters(batch, HIDDEN, seed=5), [quarters(VOCAB, HIDDEN, seed=6 + i) for i in range(3)]
    inputs, workspace = [draws(hidden, weight, 9) for weight in weights], sample_head_workspace("cuda")
    expected_state, state = inputs[0].to("cpu"), inputs[0].to("cuda")
    codes = torch.zeros(batch, 24, dtype=torch.int64, device="cuda")
    status = torch.zeros(batch, dtype=torch.int32, device="cuda")
    on_gpu, hidden_on_gpu = [weight.cuda() for weight in weights], hidden.cuda()

    def run() -> None:
        for draw in range(24):
            sample_head(hidden_on_gpu, on_gpu[draw % 3], workspace, *state.arguments(codes[:, draw], status)[1:])

    history = state.state.seen.clone()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    state.state.seen.copy_(history)
    graph.replay()
    for draw in range(24):
        expected_state.logits = inputs[draw % 3].logits
        code, _ = expected_state.run(sample_codebook_reference)
        require_equal(f"code of draw {draw}", codes[:, draw], code)

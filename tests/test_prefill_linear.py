"""prefill_linear: plain linears, and every implementation, tile and number of rows against them."""

import ctypes

import pytest
import torch
from torch.nn import functional as F

from moss_kernels import _launch, _library
from moss_kernels.backbone_linear import backbone_linear, split_count
from moss_kernels.prefill_linear import cuda_kernel, prefill_linear
from moss_kernels.prefill_linear.triton_fallback import prefill_linear_triton
from moss_kernels.rms_norm import rms_norm
from moss_kernels.testing.compare import require_equal, require_same_replays

KINDS = ["whole", "gate_up", "partial", "add"]
# Of the full-size backbone, and what fills no tile.
QKV, GATE_UP, OUT, DOWN, UNEVEN = (6144, 2560), (19456, 2560), (2560, 4096), (2560, 9728), (272, 2048)
CASES = [("whole", *QKV), ("gate_up", *GATE_UP), ("partial", *OUT), ("add", *OUT), ("partial", *DOWN), ("add", *DOWN)]
CASES += [("whole", 48, 64), ("gate_up", 48, 64), ("partial", *UNEVEN), ("add", *UNEVEN)]
# Rows and columns.
TILES = {
    "whole": [(64, 144), (64, 192), (64, 240), (128, 144), (128, 192), (128, 240), (192, 192)],
    "gate_up": [(128, 152), (128, 184), (128, 192), (192, 152)],
    "partial": [(64, 160), (128, 160), (192, 80)],
    "add": [(64, width) for width in (104, 120, 144, 160, 184, 200, 216)]
    + [(128, width) for width in (120, 144, 160, 200, 216)],
}
ROWS = [1, 7, 64, 128, 129, 160, 320, 448, 576, 600, 704, 1280]


def make_arguments(kind, rows, n, k, *, dtype=torch.float32, device="cpu"):
    """x, weight, gate_up, add, out of the op; `out` holds NaN unless it is added to."""
    x, weight = torch.randn(rows, k, device=device), torch.randn(n, k, device=device) * k**-0.5
    out = torch.randn(rows, n, device=device).to(dtype)
    if kind != "add":
        shape = {"whole": (rows, n), "gate_up": (rows, n // 2), "partial": (split_count(n, k), rows, n)}[kind]
        out = torch.full(shape, torch.nan, dtype=torch.float32 if kind == "partial" else dtype, device=device)
    return x.to(dtype), weight.to(dtype), kind == "gate_up", kind == "add", out


def result(x, weight, gate_up, add, out):
    """What the call leaves, slices summed, in the dtype of x and weight."""
    product = F.linear(x, weight)
    if add:
        return product + out.to(x.dtype)
    return F.silu(product[:, 0::2]) * product[:, 1::2] if gate_up else product


def total(kind, out):
    return out.sum(0) if kind == "partial" else out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(12, 24), (8, 2048)])
def test_op_is_the_linear(kind, n, k):
    x, weight, gate_up, add, out = arguments = make_arguments(kind, 5, n, k)
    expected = result(*arguments)
    prefill_linear(x, weight, out, gate_up=gate_up, add=add)
    torch.testing.assert_close(total(kind, out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_triton_in_the_interpreter(kind):
    arguments = make_arguments(kind, 33, 20, 2048)
    expected = result(*arguments)
    prefill_linear_triton(*arguments)
    torch.testing.assert_close(total(kind, arguments[-1]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck(kind, rows):
    *arguments, out = make_arguments(kind, rows, 12, 24)
    torch.library.opcheck(torch.ops.moss.prefill_linear.default, (*arguments, out.nan_to_num()))


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "message"),
    [
        ("whole", "x", torch.zeros(7, 24).half(), TypeError, "`x` must be float32 or bfloat16, got float16"),
        ("whole", "x", torch.zeros(24, 7).T, ValueError, "`x` must be contiguous"),
        ("whole", "weight", torch.zeros(12, 25), ValueError, r"`weight` must be \[N, K\] with K = 24"),
        ("whole", "out", torch.zeros(7, 13), ValueError, r"`out` must be \[B, N\] with B = 7, N = 12"),
        ("gate_up", "out", torch.zeros(7, 12), ValueError, r"`out` must be \[B, N/2\] with B = 7, N/2 = 6"),
        ("gate_up", "weight", torch.zeros(13, 24), ValueError, "an even number of rows with gate_up, got 13"),
        ("gate_up", "add", True, ValueError, "`add` must be false with gate_up"),
        ("partial", "out", torch.zeros(2, 7, 12), ValueError, r"`out` must be \[S, B, N\] with S = 1"),
        ("add", "out", torch.zeros(1, 7, 12), ValueError, r"`out` must be \[B, N\] with B = 7, N = 12"),
    ],
)
def test_bad_arguments_are_named(kind, name, value, error, message):
    arguments = dict(zip(("x", "weight", "gate_up", "add", "out"), make_arguments(kind, 7, 12, 24), strict=True))
    with pytest.raises(error, match=message):
        prefill_linear(**arguments | {name: value})


def test_what_the_kernel_takes():
    def takes(n, k, dtype=torch.bfloat16):
        return cuda_kernel.takes(torch.empty(3, k, dtype=dtype), torch.empty(n, k, dtype=dtype))

    assert all(takes(*shape) for shape in (QKV, GATE_UP, OUT, DOWN, UNEVEN, (48, 64)))
    # Outputs, columns, columns of a slice, dtype.
    assert not (takes(40, 64) or takes(48, 96) or takes(48, 2080) or takes(48, 64, torch.float32))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "`struct_size` must be .*, got 8"),
        ("mode", 4, r"`mode` must be 0 \.\. 3, got 4"),
        ("rows", -1, r"`rows` must be 0 \.\. 1073741824, got -1"),
        ("outputs", 8, "`outputs` must be .*, got 8"),
        ("inputs", 128, "`inputs` of 192, got 48 and 128"),
        ("slices", 65, r"`slices` must be 1 \.\. 64, got 65"),
        ("x", None, "`x` must not be null"),
        ("weight", 0x1008, "`weight` must be aligned to 16 bytes, got 0x1008"),
        ("out", 0x1008, "`out` must be aligned to 16 bytes, got 0x1008"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    values = {"mode": 3, "rows": 1, "outputs": 48, "inputs": 192, "slices": 3}
    values |= {"x": 0x1000, "weight": 0x1000, "out": 0x1000}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.PrefillLinearParams), "abi_version": _library.ABI_VERSION}
    params = cuda_kernel.PrefillLinearParams(**header | values | {field: value})
    with pytest.raises(ValueError, match=f"`prefill_linear`: .*{message}"):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


def errors(actual, exact):
    return (actual.double() - exact).square().mean().sqrt().item()


def on_gpu(kind, rows, n, k):
    return make_arguments(kind, rows, n, k, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "n", "k"), CASES)
@pytest.mark.parametrize("rows", [5, 300])
def test_bf16_is_as_close_as_the_eager_linear(kind, n, k, rows):
    arguments = on_gpu(kind, rows, n, k)
    x, weight, gate_up, add, out = arguments
    exact, eager = result(x.double(), weight.double(), gate_up, add, out), result(*arguments)
    cuda_kernel.prefill_linear_cuda(*arguments)
    assert errors(total(kind, out), exact) <= 1.25 * errors(eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_error(kind):
    cuda_kernel.prefill_linear_cuda(*on_gpu(kind, 0, 48, 64))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "n", "k"), CASES)
def test_rows_do_not_depend_on_the_batch_or_the_tile(kind, n, k):
    x, weight, gate_up, add, out = on_gpu(kind, ROWS[-1], n, k)
    stream = out.clone()
    cuda_kernel.prefill_linear_cuda(x, weight, gate_up, add, out)
    for rows in ROWS:
        index = torch.randperm(len(x), device="cuda")[:rows]
        for tile_rows, columns in [(0, 0), *TILES[kind]]:
            part = stream[..., index, :].contiguous()
            options = {"columns": columns, "tile_rows": tile_rows}
            cuda_kernel.prefill_linear_cuda(x[index], weight, gate_up, add, part, **options)
            require_equal(f"{rows} rows, tile of {tile_rows} x {columns}", part, out[..., index, :])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 64, 128])
@pytest.mark.parametrize(("kind", "n", "k"), [case for case in CASES if case[0] != "add"])
def test_bits_are_those_of_backbone_linear(kind, n, k, rows):
    """Frames that go along with a prefill pass are those of a step."""
    x, weight, gate_up, _, out = on_gpu(kind, rows, n, k)
    step = torch.empty_like(out)
    cuda_kernel.prefill_linear_cuda(x, weight, gate_up, False, out)
    backbone_linear(x, weight, step, gate_up=gate_up)
    require_equal(f"{rows} rows", step, out)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [OUT, DOWN, UNEVEN])
def test_adding_is_what_the_norm_makes_of_the_slices(n, k):
    x, weight, _, _, added = on_gpu("add", 300, n, k)
    stream, slices = added.clone(), on_gpu("partial", 300, n, k)[-1]
    cuda_kernel.prefill_linear_cuda(x, weight, False, True, added)
    cuda_kernel.prefill_linear_cuda(x, weight, False, False, slices)
    rms_norm(stream, slices, torch.ones_like(stream[0]), 1e-6, torch.empty_like(stream))
    require_equal("stream", added, stream)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_on_the_gpu(kind, dtype):
    arguments = make_arguments(kind, 200, 40, 2080, dtype=dtype, device="cuda")
    x, weight, gate_up, add, out = arguments
    exact, eager = result(x.double(), weight.double(), gate_up, add, out), result(*arguments)
    prefill_linear_triton(*arguments)
    limit = 2e-6 * exact.abs().max() if dtype == torch.float32 else 1.25 * errors(eager, exact)
    assert errors(total(kind, out), exact) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_replay_of_a_chain_equals_eager(dependent, monkeypatch):
    """Kernels that may start early still wait for the one before: products of products, many times."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    x, weight, _, _, out = on_gpu("whole", 300, 2560, 2560)
    start = x.clone()

    def chain():
        x.copy_(start)
        for _ in range(10):
            prefill_linear(x, weight, out)
            prefill_linear(out, weight, x)

    require_same_replays(chain, x)

"""backbone_linear: plain linears, and every implementation, tile and number of rows against them."""

import ctypes

import pytest
import torch
from torch.nn import functional as F

from moss_kernels import _launch, _library
from moss_kernels.backbone_linear import backbone_linear, cuda_kernel, interleave, split_count, tiles, triton_kernel
from moss_kernels.backbone_linear.tiles import Tile
from moss_kernels.testing.compare import require_equal, require_same_replays

KINDS = ["whole", "gate_up", "partial"]
# Of the full-size backbone: q, k, v; gate and up; the attention's output; the MLP's output.
FULL = {"qkv": ("whole", 6144, 2560), "gate_up": ("gate_up", 19456, 2560), "o": ("partial", 2560, 4096)}
FULL |= {"down": ("partial", 2560, 9728)}
# And what fills no tile of CUDA C++, in one slice or several.
UNEVEN = {"few_qkv": ("whole", 80, 64), "few_gate_up": ("gate_up", 176, 192), "few_o": ("partial", 272, 1024)}
BATCHES = [1, 2, 3, 7, 16, 33, 64, 128]
RUNS = {"cuda": cuda_kernel.backbone_linear_cuda, "triton": triton_kernel.backbone_linear_triton}


def make_arguments(kind, batch, n, k, *, splits=2, dtype=torch.float32, device="cpu"):
    """x, weight, gate_up, out of the op; `out` holds NaN."""
    x, weight = torch.randn(batch, k, device=device), torch.randn(n, k, device=device) * k**-0.5
    shape = {"whole": (batch, n), "gate_up": (batch, n // 2), "partial": (splits, batch, n)}[kind]
    out = torch.full(shape, torch.nan, dtype=torch.float32 if kind == "partial" else dtype, device=device)
    return x.to(dtype), weight.to(dtype), kind == "gate_up", out


def result(x, weight, gate_up, out):
    """[B, N] of what the call stands for, in the dtype of x and weight."""
    product = F.linear(x, weight)
    return F.silu(product[:, 0::2]) * product[:, 1::2] if gate_up else product


def total(out):
    return out.sum(0) if out.dim() == 3 else out


@pytest.mark.parametrize("kind", KINDS)
def test_op_is_the_linear(kind):
    arguments = make_arguments(kind, 7, 12, 24, splits=3)
    x, weight, gate_up, out = arguments
    backbone_linear(x, weight, out, gate_up=gate_up)
    torch.testing.assert_close(total(out), result(*arguments))
    if kind == "partial":
        torch.testing.assert_close(out[1], x[:, 8:16] @ weight[:, 8:16].T)


def test_interleave_and_its_views():
    gate, up = torch.randn(2, 5, 3)
    rows = interleave(gate, up)
    assert torch.equal(rows[0::2], gate) and torch.equal(rows[1::2], up)
    x, out = torch.randn(4, 3), torch.empty(4, 5)
    backbone_linear(x, rows, out, gate_up=True)
    torch.testing.assert_close(out, F.silu(x @ gate.T) * (x @ up.T))


def test_splits_are_those_of_the_shape():
    assert [split_count(n, k) for _, n, k in FULL.values()] == [1, 1, 4, 4]
    assert split_count(64, 160) == 1
    for n, k in ((2560, 2304), (2560, 1022), (64, 4098)):
        assert k % split_count(n, k) == 0


# Uneven in every dimension, several blocks of rows; the copy engine needs rows of whole 16 bytes and whole steps.
SHAPES = [(5, 24, 40), (16, 64, 64), (33, 36, 128), (130, 40, 96)]
THREADS, ENGINE = Tile(32, 32, 4, 2, False), Tile(32, 32, 4, 2, True)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "n", "k"), SHAPES)
@pytest.mark.parametrize("tile", [None, THREADS, ENGINE], ids=["table", "threads", "engine"])
def test_triton_in_the_interpreter(kind, batch, n, k, tile):
    if tile is ENGINE and k % 64:
        k = 64
    arguments = make_arguments(kind, batch, n, k)
    triton_kernel.backbone_linear_triton(*arguments, tile=tile)
    torch.testing.assert_close(total(arguments[-1]), result(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [0, 5])
def test_opcheck(kind, batch):
    x, weight, gate_up, out = make_arguments(kind, batch, 12, 24)
    torch.library.opcheck(torch.ops.moss.backbone_linear.default, (x, weight, gate_up, out.nan_to_num()))


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "message"),
    [
        ("whole", "x", torch.zeros(7, 24).half(), TypeError, "`x` must be float32 or bfloat16, got float16"),
        ("whole", "x", torch.zeros(24, 7).T, ValueError, "`x` must be contiguous"),
        ("whole", "weight", torch.zeros(12, 25), ValueError, r"`weight` must be \[N, K\] with K = 24"),
        ("whole", "weight", torch.zeros(12, 24).bfloat16(), TypeError, "`weight` must be float32, got bfloat16"),
        ("whole", "out", torch.zeros(7, 13), ValueError, r"`out` must be \[B, N\] with B = 7, N = 12"),
        ("gate_up", "out", torch.zeros(7, 12), ValueError, r"`out` must be \[B, N/2\] with B = 7, N/2 = 6"),
        ("gate_up", "weight", torch.zeros(13, 24), ValueError, "an even number of rows with gate_up, got 13"),
        ("partial", "out", torch.zeros(5, 7, 12), ValueError, "slices that divides K = 24, got 5"),
        ("partial", "out", torch.zeros(2, 7, 12).bfloat16(), TypeError, "`out` must be float32, got bfloat16"),
    ],
)
def test_bad_arguments_are_named(kind, name, value, error, message):
    arguments = dict(zip(("x", "weight", "gate_up", "out"), make_arguments(kind, 7, 12, 24), strict=True))
    with pytest.raises(error, match=message):
        backbone_linear(**arguments | {name: value})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_fit_their_slices_and_have_no_last_wave(dtype):
    for batch in (1, 16, 17, 64, 65, 128, 300):
        for _, n, k in FULL.values():
            slice_k = k // split_count(n, k)
            tile = tiles.tile_for(batch, n, slice_k, dtype)
            assert not tile.copy_engine or slice_k % tile.block_k == 0
            if dtype == torch.bfloat16:
                block = tiles.row_block(batch)
                shared = tile.stages * (tile.outputs + block) * tile.block_k * 2
                programs = -(-n // tile.outputs) * split_count(n, k)
                assert programs <= 132 * (232_448 // (shared + 1024)), (batch, n, k)
    assert not tiles.tile_for(1, 2560, 2440, torch.bfloat16).copy_engine


def test_what_the_cuda_kernel_takes():
    def takes(batch, n, k, *, splits=1, dtype=torch.bfloat16):
        x, weight, _, out = make_arguments("partial", batch, n, k, splits=splits, dtype=dtype)
        return cuda_kernel.takes(x, weight, out)

    assert takes(128, 48, 64) and takes(1, 16, 256, splits=4)
    # Rows, outputs, columns, columns of a slice, slices, no outputs, dtype.
    assert not (takes(129, 48, 64) or takes(1, 40, 64) or takes(1, 48, 96) or takes(1, 48, 128, splits=4))
    assert not (takes(1, 48, 65 * 64, splits=65) or takes(1, 0, 64) or takes(1, 48, 64, dtype=torch.float32))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "`struct_size` must be .*, got 8"),
        ("mode", 3, r"`mode` must be 0 \.\. 2, got 3"),
        ("rows", 129, r"`rows` must be 0 \.\. 128, got 129"),
        ("outputs", 8, "`outputs` must be .*, got 8"),
        ("inputs", 128, "`inputs` of 192, got 48 and 128"),
        ("slices", 65, r"`slices` must be 1 \.\. 64, got 65"),
        ("x", None, "`x` must not be null"),
        ("weight", 0x1008, "`weight` must be aligned to 16 bytes, got 0x1008"),
        ("out", 0x1008, "`out` must be aligned to 16 bytes, got 0x1008"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    values = {"mode": 2, "rows": 1, "outputs": 48, "inputs": 192, "slices": 3}
    values |= {"x": 0x1000, "weight": 0x1000, "out": 0x1000}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.BackboneLinearParams), "abi_version": _library.ABI_VERSION}
    params = cuda_kernel.BackboneLinearParams(**header | values | {field: value})
    with pytest.raises(ValueError, match=f"`backbone_linear`: .*{message}"):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


def errors(actual, exact):
    return (actual.double() - exact).square().mean().sqrt().item()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", RUNS)
def test_bf16_is_as_close_as_the_eager_linear(name, batch, implementation):
    kind, n, k = FULL[name]
    arguments = make_arguments(kind, batch, n, k, splits=4, dtype=torch.bfloat16, device="cuda")
    x, weight, gate_up, out = arguments
    exact = result(x.double(), weight.double(), gate_up, out)
    RUNS[implementation](*arguments)
    assert errors(total(out), exact) <= 1.25 * errors(result(*arguments), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FULL, *UNEVEN])
def test_rows_do_not_depend_on_the_batch_or_the_implementation(name):
    """A row alone, in every number of rows and every place: the same bits, so every tile sums alike."""
    kind, n, k = (FULL | UNEVEN)[name]
    x, weight, gate_up, out = make_arguments(kind, 128, n, k, splits=4, dtype=torch.bfloat16, device="cuda")
    triton_kernel.backbone_linear_triton(x, weight, gate_up, out)
    for batch in (*BATCHES, 63, 65, 96, 121, 200):
        index = torch.randperm(128, device="cuda").repeat(2)[:batch]
        for implementation, run in RUNS.items():
            if implementation == "cuda" and batch > cuda_kernel.MAX_ROWS:
                continue
            part = torch.full((*out.shape[:-2], batch, out.shape[-1]), torch.nan, dtype=out.dtype, device="cuda")
            run(x[index], weight, gate_up, part)
            require_equal(f"out of {batch} rows, {implementation}", part, out[..., index, :])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_error(kind):
    cuda_kernel.backbone_linear_cuda(*make_arguments(kind, 0, 48, 128, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "n", "k"), [(5, 48, 80), (33, 300, 256), (200, 96, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_uneven_shapes_on_the_gpu(kind, batch, n, k, dtype):
    arguments = make_arguments(kind, batch, n, k, dtype=dtype, device="cuda")
    x, weight, gate_up, out = arguments
    exact = result(x.double(), weight.double(), gate_up, out)
    triton_kernel.backbone_linear_triton(*arguments)
    limit = 2e-6 * exact.abs().max() if dtype == torch.float32 else 1.25 * errors(result(*arguments), exact)
    assert errors(total(out), exact) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("batch", [33, 128])
@pytest.mark.parametrize("implementation", RUNS)
def test_replay_of_a_chain_equals_eager(dependent, batch, implementation, monkeypatch):
    """Kernels that may start early still wait for the one before: products of products, many times."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    x, weight, _, out = make_arguments("whole", batch, 2560, 2560, dtype=torch.bfloat16, device="cuda")
    start, run = x.clone(), RUNS[implementation]

    def chain():
        x.copy_(start)
        for _ in range(10):
            run(x, weight, False, out)
            run(out, weight, False, x)

    require_same_replays(chain, x)

"""codec_linear: the codec's eager modules, and every implementation against them."""

import ctypes
import itertools
import re
import subprocess

import pytest
import torch
import triton
from torch import nn
from torch.nn import functional as F

from moss_kernels import _launch, _library
from moss_kernels.codec_linear import (
    codec_linear,
    codec_linear_reference,
    cuda_kernel,
    layer_norm_sums,
    row_kernels,
    scratch_size,
    triton_kernel,
)
from moss_kernels.codec_linear.tiles import (
    CudaTile,
    Tile,
    candidates,
    cuda_tile_for,
    cuda_tiles,
    is_wide,
    normed_tiles,
    partial_tiles,
    tile_for,
    wide_tile,
)
from moss_kernels.testing.compare import require_same_replays

KINDS = ["plain", "norm", "norm_gelu", "scale"]
# (N, K) of the full-size decoder: stage 1, then the others, then projections between stages.
SHAPES = [(3840, 1280), (5120, 1280), (1280, 5120), (2304, 768), (768, 768), (768, 3072), (768, 384), (240, 768)]


def make_arguments(kind, m, n, k, *, dtype=torch.float32, stream=None, device="cpu"):
    """Keyword arguments of `codec_linear`; `out` holds a residual stream or NaN, the stream has a mean of its own."""
    stream = stream or dtype
    scaled, normed = kind == "scale", kind.startswith("norm")

    def random(*shape):
        return torch.randn(*shape, device=device)

    x = (random(m, k) * 2 + 1).to(stream if normed else dtype)
    out = random(m, n).to(stream) if scaled else torch.full((m, n), torch.nan, dtype=dtype, device=device)
    arguments = {"x": x, "weight": (random(n, k) * k**-0.5).to(dtype), "out": out, "gelu": kind == "norm_gelu"}
    if normed:
        arguments["norm_weight"] = (1 + random(k) / 4).to(dtype)
        arguments["norm_bias"] = (random(k) / 2).to(dtype)
        arguments["norm_sums"] = layer_norm_sums(*(arguments[p] for p in ("weight", "norm_weight", "norm_bias")))
    if scaled:
        arguments["scale"] = (0.1 + torch.rand(n, device=device) / 2).to(dtype)
    if scaled or normed:
        size = scratch_size(m, n, k, norm=normed)
        arguments["scratch"] = torch.full((size,), torch.nan, dtype=dtype, device=device)
    return arguments


def positional(arguments):
    names = ["x", "weight", "norm_weight", "norm_bias", "norm_sums", "gelu", "scale", "scratch", "out"]
    names += ["partials", "partials_scale"] if "partials" in arguments else []
    return [arguments.get(name) for name in names]


def reference(arguments, dtype=None):
    """The reference on a copy, with all tensors cast to `dtype`."""
    parts = {
        name: value.to(dtype or value.dtype) if torch.is_tensor(value) else value for name, value in arguments.items()
    }
    out = parts.pop("out")
    for name in ("norm_sums", "scratch", "partials", "partials_scale"):
        parts.pop(name, None)
    return codec_linear_reference(**parts, residual=out if "scale" in parts else None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_is_the_eager_modules(kind):
    arguments = make_arguments(kind, 7, 12, 24)
    norm, linear = nn.LayerNorm(24, eps=1e-5), nn.Linear(24, 12, bias=False)
    linear.weight.data = arguments["weight"]
    expected = arguments["x"]
    if kind.startswith("norm"):
        norm.weight.data, norm.bias.data = arguments["norm_weight"], arguments["norm_bias"]
        expected = norm(expected)
    expected = linear(expected)
    if kind == "norm_gelu":
        expected = nn.GELU()(expected)
    if kind == "scale":
        expected = arguments["out"] + arguments["scale"] * expected
    codec_linear(**arguments)
    assert torch.equal(arguments["out"], expected)


def test_a_float32_stream_around_bfloat16_weights():
    arguments = make_arguments("norm", 5, 12, 24, dtype=torch.bfloat16, stream=torch.float32)
    exact = reference(arguments, torch.float64)
    codec_linear(**arguments)
    assert (arguments["out"] - exact).abs().max() < 2**-6 * exact.abs().max()
    arguments = make_arguments("scale", 5, 12, 24, dtype=torch.bfloat16, stream=torch.float32)
    arguments["out"].fill_(256 + 2**-8)  # what bfloat16 would drop
    arguments["weight"].zero_()
    codec_linear(**arguments)
    assert (arguments["out"] == 256 + 2**-8).all()


def test_norm_sums_take_the_norm_out_of_the_product():
    arguments = make_arguments("norm", 6, 10, 32)
    x, weight, norm_weight, norm_bias = (arguments[name] for name in ("x", "weight", "norm_weight", "norm_bias"))
    deviation, mean = torch.std_mean(x, 1, correction=0, keepdim=True)
    deviation = (deviation.square() + 1e-5).sqrt()
    weight_sums, bias_sums = layer_norm_sums(weight, norm_weight, norm_bias)
    product = (x * norm_weight) @ weight.T / deviation - mean / deviation * weight_sums + bias_sums
    torch.testing.assert_close(product, F.layer_norm(x, (32,), norm_weight, norm_bias) @ weight.T)


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        (
            "plain",
            {"weight": torch.zeros(12, 25)},
            ValueError,
            r"`weight` must be \[N, K\] with K = 24, got \(12, 25\)",
        ),
        ("plain", {"x": torch.zeros(24, 7).T}, ValueError, "`x` must be contiguous"),
        ("plain", {"x": torch.zeros(7, 24).half()}, TypeError, "`x` must be float32 or bfloat16, got float16"),
        ("norm", {"norm_sums": None}, ValueError, "must be given together, or none of them"),
        ("norm", {"scale": torch.zeros(12)}, ValueError, "`scale` must be None with a norm"),
        ("norm", {"scratch": torch.zeros(167)}, ValueError, r"`scratch` must be \[n\] with n >= 168, got \(167,\)"),
        ("scale", {"scratch": None}, ValueError, r"`scratch` must be \[n\] with n >= 84, got None"),
        ("scale", {"x": torch.zeros(7, 24).bfloat16()}, TypeError, "`x` must be float32, got bfloat16"),
        ("scale", {"scale": torch.zeros(12).bfloat16()}, TypeError, "`scale` must be float32, got bfloat16"),
        ("scale", {"out": torch.zeros(2, 7, 12)}, ValueError, r"`out` must be \[M, N\] with GELU or `scale`, got \(2"),
        ("norm_gelu", {"out": torch.zeros(2, 7, 12)}, ValueError, r"`out` must be \[M, N\] with GELU or `scale`, got"),
        ("plain", {"out": torch.zeros(5, 7, 12)}, ValueError, "`out` must have slices of K = 24 alike, got 5"),
        ("plain", {"out": torch.zeros(2, 7, 12).bfloat16()}, TypeError, "`out` must be float32, got bfloat16"),
        (
            "norm",
            {"partials": torch.zeros(2, 7, 24)},
            ValueError,
            "`partials_scale` must be given together, with a norm",
        ),
        (
            "plain",
            {"partials": torch.zeros(2, 7, 24), "partials_scale": torch.zeros(24)},
            ValueError,
            "`partials_scale` must be given together, with a norm",
        ),
        (
            "norm",
            {"partials": torch.zeros(2, 7, 12), "partials_scale": torch.zeros(24)},
            ValueError,
            r"`partials` must be \[P, M, K\] with M = 7, K = 24, got \(2, 7, 12\)",
        ),
    ],
)
def test_bad_arguments_are_named(kind, changes, error, message):
    with pytest.raises(error, match=message):
        codec_linear(**make_arguments(kind, 7, 12, 24) | changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [0, 5])
def test_opcheck(kind, m):
    torch.library.opcheck(torch.ops.moss.codec_linear, positional(make_arguments(kind, m, 12, 24)))


def test_torch_compile():
    arguments = make_arguments("norm_gelu", 5, 12, 24)
    expected = reference(arguments)
    torch.compile(codec_linear, fullgraph=True, dynamic=True, backend="aot_eager")(**arguments)
    assert torch.equal(arguments["out"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_fill_the_multiprocessors_or_are_the_smallest(dtype):
    for m in (1, 2, 15, 16, 30, 64, 480, 1024, 30720, 61440):
        for n in (240, 384, 768, 1280, 2304, 3840, 5120):
            tile = tile_for(m, n, 448, dtype)
            assert tile.count(m, n) >= 88 or tile.kind == "stream"
            assert tile.block_m == 16 or tile.block_m < 2 * m


def test_measured_sizes_have_a_tile_for_every_number_of_rows():
    for n, k in ((3840, 1280), (1280, 5120), (2304, 768), (768, 768), (3072, 768), (768, 3072)):
        tiles = [tile_for(m, n, k, torch.bfloat16) for m in (*range(1, 2000), 10**6)]
        assert all(tile.block_m <= 2 * m for m, tile in enumerate(tiles[32:-1], 33))
        assert tiles[0] == tiles[31] != tiles[32]
        assert set(tiles) - set(candidates(torch.bfloat16)) <= {Tile("library")}


def test_wide_tiles_waste_few_rounds():
    """The multiprocessors have work in most of the rounds' places, in the calls that decide the throughput."""
    for m, n, k in ((1536, 3072, 768), (3072, 768, 3072), (6144, 3072, 768), (6144, 768, 3072)):
        tile = cuda_tile_for(m, n, k)
        assert is_wide(tile)
        rounds = -(-(-(-m // tile.rows) * -(-n // tile.columns)) // 132)
        assert m * n >= 0.9 * rounds * 132 * tile.rows * tile.columns, tile
    assert wide_tile(15360, 3072, 768) == CudaTile(128, 192, 1)  # many rounds, each hides what follows the last
    assert wide_tile(6144, 768, 768) == CudaTile(192, 192, 1)  # one round, which nothing could hide
    assert cuda_tile_for(6144, 100, 768) is None
    assert cuda_tile_for(2**20, 3072, 768) is not None and cuda_tile_for(2**20 + 1, 3072, 768) is None


def test_tiles_that_share_their_inputs_run_at_once():
    """Each multiprocessor has room for two blocks of small tiles, or one of large."""
    for n, k in (
        (3840, 1280),
        (1280, 1280),
        (5120, 1280),
        (1280, 5120),
        (2304, 768),
        (768, 768),
        (3072, 768),
        (768, 3072),
    ):
        for m in range(17, 1600):
            tile = cuda_tile_for(m, n, k)
            if tile is None or is_wide(tile):
                continue
            blocks = -(-m // tile.rows) * -(-n // tile.columns) * tile.slices
            assert blocks <= (264 if tile.rows + tile.columns <= 192 else 132), (m, n, k, tile)
            assert k % (64 * tile.slices) == 0


TILES = {
    "stream": Tile("stream", 16, 16, 16, 4, 2),
    "tile": Tile("tile", 16, 16, 32, 4, 2),
    "tile_in_parts": Tile("tile", 16, 128, 32, 4, 2),
    "persistent": Tile("persistent", 16, 64, 32, 4, 2, resident=2),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 24, 40), (16, 16, 32), (33, 17, 64), (70, 200, 48)])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_triton_in_the_interpreter(kind, m, n, k, tile):
    arguments = make_arguments(kind, m, n, k)
    expected = reference(arguments)
    triton_kernel.codec_linear_triton(*positional(arguments), tile=tile)
    torch.testing.assert_close(arguments["out"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_product_in_the_interpreter(kind):
    arguments = make_arguments(kind, 5, 24, 40)
    expected = reference(arguments)
    triton_kernel.codec_linear_library(*positional(arguments))
    torch.testing.assert_close(arguments["out"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
@pytest.mark.parametrize("k", [39, 40, 600, 768])
@pytest.mark.parametrize("wave", [9, 8])
def test_layer_norm_in_the_interpreter(monkeypatch, k, x_dtype, dtype, wave):
    """Rows of one part, of several, and of whole ones; one or two of a warp."""
    monkeypatch.setattr(row_kernels, "NORM_WAVE", wave)
    x, weight, bias = (torch.randn(9, k) * 2 + 1).to(x_dtype), torch.randn(k).to(dtype), torch.randn(k).to(dtype)
    out = torch.full((9, k), torch.nan, dtype=dtype)
    row_kernels.layer_norm(x, weight, bias, out)
    expected = F.layer_norm(x.float(), (k,), weight.float(), bias.float())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter rounds towards 0
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("name", ["x", "norm_weight", "norm_bias"])
def test_what_layer_norm_reads_in_words_is_aligned(name):
    inputs = {"x": (2, 8), "norm_weight": (8,), "norm_bias": (8,)}
    inputs = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in inputs.items()}
    odd = torch.zeros(inputs[name].numel() + 1, dtype=torch.bfloat16)[1:].view(inputs[name].shape)
    with pytest.raises(ValueError, match=f"`{name}` must be aligned to 4 bytes"):
        row_kernels.layer_norm(**inputs | {name: odd}, out=torch.zeros(2, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "`struct_size` must be .*, got 8"),
        ("rows", 33, r"`rows` must be 0 \.\. 32, got 33"),
        ("inputs", 48, "`inputs` a multiple of 32, got 6 and 48"),
        ("x_dtype", 0, "`x_dtype` must be bfloat16, or float32 with a norm"),
        ("weight", None, "`weight` must not be null"),
        ("norm_weight", 0x1000, "`norm_sums` must not be null"),
        ("x", 0x1008, "`x` must be aligned to 16 bytes, got 0x1008"),
        ("tile_columns", 24, r"`slices` must be 1 \.\. 8, got 0"),
        ("cos_sin", 0x1000, "with `cos_sin` there must be tiles of 128 or 192 outputs"),
        ("partial", 1, r"`slices` must be 1 \.\. 8, got 0"),
        ("normed", 0x1000, "with `normed` there must be 768 outputs, bfloat16, in tiles of 96"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    values = {"rows": 1, "outputs": 6, "inputs": 32, "x_dtype": 1, "out_dtype": 1}
    values |= {"x": 0x1000, "weight": 0x1000, "out": 0x1000}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.CodecLinearParams), "abi_version": _library.ABI_VERSION}
    params = cuda_kernel.CodecLinearParams(**header | values | {field: value})
    with pytest.raises(ValueError, match=f"`codec_linear`: .*{message}"):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


def test_the_library_has_a_kernel_for_each_tile(moss_library):
    if torch.cuda.is_available():
        pytest.skip("each is launched by other tests here")
    fields = {"rows": 1, "outputs": 768, "x_dtype": 1, "dependent_launch": 1}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.CodecLinearParams), "abi_version": _library.ABI_VERSION}
    pointers = dict.fromkeys(("x", "weight", "out"), 0x1000)
    tiles = [(tile, {"out_dtype": 1}) for tile in cuda_tiles()]
    tiles += [(tile, {"out_dtype": 0, "partial": 1}) for tile in partial_tiles()]
    norm = dict.fromkeys(("scale", "next_norm_weight", "next_norm_bias", "normed", "moments"), 0x1000)
    tiles += [(tile, {"out_dtype": 1} | norm) for tile in normed_tiles()]
    # Slices of one step, and of more than the kernel for few steps takes.
    for ((rows, columns, slices), kind), steps in itertools.product(tiles, (1, 12)):
        tile = {"tile_rows": rows, "tile_columns": columns, "slices": slices, "inputs": 64 * steps * slices} | kind
        params = cuda_kernel.CodecLinearParams(**header, **fields, **pointers, **tile)
        with pytest.raises(RuntimeError, match="failed with cu"):  # no device; a tile without a kernel: ValueError
            _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


def test_weights_of_few_rows_are_asked_for_before_the_wait(moss_library):
    """In machine code, since the compiler may move loads: all of a thread's first batch, with the norm's."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(moss_library)]
    functions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Function : ")
    kernels = [code for code in functions if "codec_linear_kernelI" in code.split("\n", 1)[0]]
    assert kernels
    for code in kernels:
        columns, batch, norm = map(int, re.search(r"kernelILi\d+ELi(\d+)ELi(\d+)ELb(\d)", code).groups())
        early, late = code.split("ACQBULK", 1)
        assert len(re.findall(r"LDG\S*\.128", early)) == batch * (columns + norm), code.split("\n", 1)[0]
        assert re.search(r"LDG\S*\.(64|128)", late)


def errors(actual, exact):
    return (actual.double() - exact).square().mean().sqrt().item()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 9, 15, 17, 32, 60, 120, 480, 9000])
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_bf16_is_as_close_as_eager_modules(moss_library, kind, n, k, m, stream):
    arguments = make_arguments(kind, m, n, k, dtype=torch.bfloat16, stream=stream, device="cuda")
    exact, eager = reference(arguments, torch.float64), reference(arguments)
    implementations = [triton_kernel.codec_linear_triton, triton_kernel.codec_linear_library]
    names = ("x", "weight", "norm_weight", "gelu", "scale", "out")
    if cuda_kernel.takes(*(arguments.get(name) for name in names)):
        implementations.append(cuda_kernel.codec_linear_cuda)
    for implementation in implementations:
        copy = arguments | {"out": arguments["out"].clone()}
        implementation(*positional(copy))
        assert errors(copy["out"], exact) <= 1.25 * errors(eager, exact), implementation.__name__


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", candidates(torch.bfloat16))
def test_every_tile(kind, tile):
    """Uneven in every dimension."""
    arguments = make_arguments(kind, 147, 304, 400, dtype=torch.bfloat16, device="cuda")
    exact, eager = reference(arguments, torch.float64), reference(arguments)
    triton_kernel.codec_linear_triton(*positional(arguments), tile=tile)
    assert errors(arguments["out"], exact) <= 1.25 * errors(eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", cuda_tiles(), ids=str)
def test_every_cuda_tile(moss_library, monkeypatch, kind, tile):
    """Uneven in rows and columns, and more steps than a block has stages; rows beyond the last stay.

    The bits of a row do not depend on its place.
    """
    m = 331
    arguments = make_arguments(kind, m + 64, 304, 120 * 64, dtype=torch.bfloat16, device="cuda")
    before = arguments["out"].nan_to_num_(7)
    arguments["x"] = arguments["x"][:m]
    exact, eager = (reference(arguments | {"out": before[:m]}, dtype) for dtype in (torch.float64, None))
    monkeypatch.setattr(cuda_kernel, "cuda_tile_for", lambda *sizes: tile)
    results = [before.clone() for _ in range(3)]
    for result in results:
        cuda_kernel.codec_linear_cuda(*positional(arguments | {"out": result[:m]}))
    assert torch.equal(results[0][m:], before[m:])
    assert all(torch.equal(results[0], result) for result in results[1:])
    assert errors(results[0][:m], exact) <= 1.25 * errors(eager, exact)
    turned = before[:m].flip(0)
    cuda_kernel.codec_linear_cuda(*positional(arguments | {"x": arguments["x"].flip(0), "out": turned}))
    assert torch.equal(turned.flip(0), results[0][:m])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", list(filter(is_wide, cuda_tiles())), ids=str)
@pytest.mark.parametrize("k", [64, 384, 1216])
def test_blocks_that_take_several_wide_tiles(moss_library, monkeypatch, kind, tile, k):
    arguments = make_arguments(kind, 9000, 776, k, dtype=torch.bfloat16, device="cuda")
    exact, eager = reference(arguments, torch.float64), reference(arguments)
    monkeypatch.setattr(cuda_kernel, "cuda_tile_for", lambda *sizes: tile)
    cuda_kernel.codec_linear_cuda(*positional(arguments))
    assert errors(arguments["out"], exact) <= 1.25 * errors(eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "scale"])
@pytest.mark.parametrize("tile", list(filter(is_wide, cuda_tiles())), ids=str)
def test_wide_tiles_repeat_and_leave_what_lies_beyond(moss_library, monkeypatch, kind, tile):
    """Up to four tiles a block; launches that follow each other give the same bits, and rows beyond the last stay."""
    m = 20000
    arguments = make_arguments(kind, m + 64, 776, 128, dtype=torch.bfloat16, device="cuda")
    before = arguments["out"].fill_(7)
    arguments["x"] = arguments["x"][:m]
    monkeypatch.setattr(cuda_kernel, "cuda_tile_for", lambda *sizes: tile)
    results = [before.clone() for _ in range(3)]
    for result in results:
        cuda_kernel.codec_linear_cuda(*positional(arguments | {"out": result[:m]}))
    assert (results[0][m:] == 7).all()
    assert all(torch.equal(results[0], result) for result in results[1:])
    exact = reference(arguments | {"out": before[:m]}, torch.float64)
    eager = reference(arguments | {"out": before[:m]})
    assert errors(results[0][:m], exact) <= 1.25 * errors(eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 144, 48), (33, 96, 32), (1000, 2304, 768)])
def test_fp32_on_the_gpu(kind, m, n, k):
    arguments = make_arguments(kind, m, n, k, device="cuda")
    exact = reference(arguments, torch.float64)
    triton_kernel.codec_linear_triton(*positional(arguments))
    assert (arguments["out"] - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 480, 9000])
@pytest.mark.parametrize("dependent", [False, True])
def test_replay_of_a_chain_equals_eager(m, dependent, monkeypatch):
    """Kernels that may start early still wait for the one before: an MLP on its own residual stream, many times."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    up = make_arguments("norm_gelu", m, 3072, 768, dtype=torch.bfloat16, device="cuda")
    down = make_arguments("scale", m, 768, 3072, dtype=torch.bfloat16, device="cuda")
    down |= {"x": up["out"]}
    start = up["x"].clone()

    def chain():
        up["x"].copy_(start)
        for _ in range(10):
            codec_linear(**up)
            codec_linear(**down | {"out": up["x"]})

    require_same_replays(chain, up["x"])

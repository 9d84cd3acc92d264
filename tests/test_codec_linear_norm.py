"""codec_linear with the next norm: the stream and its normalised rows from one call."""

import ctypes

import pytest
import torch
import triton
import triton.language as tl
from test_codec_linear import errors, make_arguments, reference
from torch.nn import functional as F

from moss_kernels import _launch, _library
from moss_kernels.codec_linear import codec_linear, cuda_kernel, leaves_normed, moments_size, triton_kernel
from moss_kernels.codec_linear.tiles import normed_rows, normed_tile_for, normed_tiles
from moss_kernels.testing.compare import require_same_replays

NAMES = ["x", "weight", "norm_weight", "norm_bias", "norm_sums", "gelu", "scale", "scratch", "out", "partials"]
NAMES += ["partials_scale", "next_norm_weight", "next_norm_bias", "normed", "moments"]
WIDTH = 768  # of the kernels


def with_norm(m, n, k, **options):
    arguments = make_arguments("scale", m, n, k, **options)
    weight, device = arguments["weight"], arguments["weight"].device
    arguments["next_norm_weight"] = (1 + torch.randn(n, device=device) / 4).to(weight.dtype)
    arguments["next_norm_bias"] = (torch.randn(n, device=device) / 2).to(weight.dtype)
    arguments["normed"] = torch.full((m, n), torch.nan, dtype=weight.dtype, device=device)
    arguments["moments"] = torch.zeros(moments_size(m), dtype=torch.int32, device=device)
    return arguments


def positional(arguments):
    return [arguments.get(name) for name in NAMES]


def without_norm(arguments):
    return {name: value for name, value in arguments.items() if name not in NAMES[-4:]}


def norm_of(stream, arguments, dtype):
    norm = (arguments[name].to(dtype) for name in ("next_norm_weight", "next_norm_bias"))
    return F.layer_norm(stream.to(dtype), stream.shape[1:], *norm, 1e-5)


@pytest.mark.parametrize(("dtype", "stream"), [(torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_the_stream_and_its_norm_are_the_eager_modules(dtype, stream):
    arguments = with_norm(5, 24, 48, dtype=dtype, stream=stream)
    expected = reference(without_norm(arguments))
    codec_linear(**arguments)
    assert torch.equal(arguments["out"], expected)
    assert torch.equal(arguments["normed"], norm_of(expected, arguments, stream).to(dtype))


@pytest.mark.parametrize("m", [0, 5])
def test_opcheck_with_the_next_norm(m):
    torch.library.opcheck(torch.ops.moss.codec_linear, positional(with_norm(m, 12, 24)))


def test_torch_compile_with_the_next_norm():
    arguments = with_norm(5, 12, 24)
    expected = reference(without_norm(arguments))
    torch.compile(codec_linear, fullgraph=True, dynamic=True, backend="aot_eager")(**arguments)
    torch.testing.assert_close(arguments["normed"], norm_of(expected, arguments, torch.float32))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"moments": None}, ValueError, "`normed`, `moments` must be given together, .* got .*, normed alone"),
        ({"scale": None, "scratch": None}, ValueError, "`normed` must be None without `scale`"),
        ({"normed": torch.zeros(5, 24)}, ValueError, r"`normed` must be \[M, N\] with M = 5, N = 12"),
        ({"next_norm_weight": torch.zeros(12).bfloat16()}, TypeError, "`next_norm_weight` must be float32"),
        ({"next_norm_bias": torch.zeros(24)}, ValueError, r"`next_norm_bias` must be \[N\] with N = 12"),
        ({"moments": torch.zeros(287).int()}, ValueError, r"`moments` must be \[n\] with n >= 288, got \(287,\)"),
        ({"moments": torch.zeros(288)}, TypeError, "`moments` must be int32"),
    ],
)
def test_what_is_wrong_about_the_next_norm_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        codec_linear(**with_norm(5, 12, 24) | changes)


def test_all_tiles_that_leave_normed_rows_run_at_once():
    for k in (768, 3072):
        for m in range(1, 4000):
            if tile := normed_tile_for(m, WIDTH, k):
                assert m == normed_rows(m, WIDTH, k) <= normed_rows(4000, WIDTH, k)
                assert tile.slices == 1
                assert -(-m // tile.rows) * (WIDTH // tile.columns) <= 132, (m, k, tile)
    assert normed_rows(4000, 64, 64) == 0


def test_no_rows_are_left_normed_without_their_kernel():
    weight = torch.zeros(WIDTH, 3072, dtype=torch.bfloat16, device="meta")
    assert normed_tile_for(2048, WIDTH, 3072) is not None
    assert not leaves_normed(2048, weight, torch.bfloat16)


def test_gelu_has_no_kernel_that_leaves_normed_rows():
    x, weight, out = (torch.zeros(1024, WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(3))
    assert cuda_kernel._normed_tile(x, weight[:WIDTH], False, out) is not None
    assert cuda_kernel._normed_tile(x, weight[:WIDTH], True, out) is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("outputs", 384, "there must be 768 outputs, .* got 384 outputs in tiles of 96 and 1 slices"),
        ("tile_columns", 48, "in tiles of 96, .* got 768 outputs in tiles of 48"),
        ("slices", 2, "not in slices, .* and 2 slices"),
        ("out_dtype", 0, "bfloat16, .* `out_dtype` 0"),
        ("gelu", 1, "neither `gelu` nor `cos_sin`, .* `gelu` 1"),
        ("tile_rows", 192, "tiles of 64 or 128 rows, got 192"),
        ("scale", None, "`scale` must not be null"),
        ("next_norm_weight", None, "`next_norm_weight` must not be null"),
        ("next_norm_bias", 0x1008, "`next_norm_bias` must be aligned to 16 bytes, got 0x1008"),
        ("normed", 0x1008, "`normed` must be aligned to 16 bytes, got 0x1008"),
        ("moments", None, "`moments` must not be null"),
        ("moments", 0x1040, "`moments` must be aligned to 128 bytes, got 0x1040"),
    ],
)
def test_the_library_refuses_what_its_kernels_do_not_leave_normed(moss_library, field, value, message):
    values = {"rows": 1, "outputs": 768, "inputs": 128, "x_dtype": 1, "out_dtype": 1}
    values |= {"tile_rows": 64, "tile_columns": 96, "slices": 1}
    pointers = ("x", "weight", "out", "scale", "next_norm_weight", "next_norm_bias", "normed", "moments")
    header = {"struct_size": ctypes.sizeof(cuda_kernel.CodecLinearParams), "abi_version": _library.ABI_VERSION}
    values = header | values | dict.fromkeys(pointers, 0x1000) | {field: value}
    with pytest.raises(ValueError, match=f"`codec_linear`: .*{message}"):
        _library.check_status(cuda_kernel._function()(ctypes.byref(cuda_kernel.CodecLinearParams(**values))))


@pytest.mark.interpreter
def test_triton_leaves_normed_rows_in_the_interpreter():
    arguments = with_norm(33, 24, 40)
    expected = reference(without_norm(arguments))
    triton_kernel.codec_linear_triton(*positional(arguments))
    torch.testing.assert_close(arguments["normed"], norm_of(expected, arguments, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [9, 100, 1000, 2048])
@pytest.mark.parametrize("k", [64, 768, 3072])
@pytest.mark.parametrize("tile", normed_tiles(), ids=str)
def test_normed_rows_of_every_tile(moss_library, monkeypatch, tile, k, m):
    """As close as eager modules. Bits repeat, they do not depend on a row's place, and rows beyond the last stay."""
    monkeypatch.setattr(cuda_kernel, "normed_tile_for", lambda *sizes: tile)
    arguments = with_norm(m, WIDTH, k, dtype=torch.bfloat16, device="cuda")
    exact, eager = (reference(without_norm(arguments), dtype) for dtype in (torch.float64, None))

    def run(rows):
        stream, normed = (torch.full((m + 64, WIDTH), 7, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        stream[:m] = arguments["out"][rows]
        own = {"x": arguments["x"][rows].contiguous(), "out": stream[:m], "normed": normed[:m]}
        cuda_kernel.codec_linear_cuda(*positional(arguments | own))
        assert (stream[m:] == 7).all()
        assert (normed[m:] == 7).all()
        return stream[:m], normed[:m]

    forward = torch.arange(m, device="cuda")
    stream, normed = run(forward)
    assert errors(stream, exact) <= 1.25 * errors(eager, exact)
    apart, right = (norm_of(stream, arguments, dtype) for dtype in (torch.bfloat16, torch.float64))
    assert errors(normed, right) <= 1.05 * errors(apart, right)
    for rows in (forward, forward, forward.flip(0)):
        assert all(torch.equal(part, whole[rows]) for part, whole in zip(run(rows), (stream, normed), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [768, 3072])
@pytest.mark.parametrize("m", [704, 705, 1024, 1025, 1088, 1089, 1408, 1409, 2048, 2049])
def test_normed_rows_around_the_edges_of_the_table(moss_library, k, m):
    """Also where the next norm follows in a kernel of its own."""
    arguments = with_norm(m, WIDTH, k, dtype=torch.bfloat16, device="cuda")
    exact, eager = (reference(without_norm(arguments), dtype) for dtype in (torch.float64, None))
    codec_linear(**arguments)
    stream = arguments["out"]
    assert errors(stream, exact) <= 1.25 * errors(eager, exact)
    apart, right = (norm_of(stream, arguments, dtype) for dtype in (torch.bfloat16, torch.float64))
    assert errors(arguments["normed"], right) <= 1.05 * errors(apart, right)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_replay_of_a_chain_of_normed_rows_equals_eager(moss_library, dependent, monkeypatch):
    """Linears of several tiles share their workspace, and each reads the rows that the one before has normalised."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    chains = []
    for m in (1024, 2048, 1000):
        down = with_norm(m, WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
        down["moments"] = chains[0]["moments"] if chains else torch.zeros(moments_size(2048), device="cuda").int()
        assert leaves_normed(m, down["weight"], torch.bfloat16)
        chains.append(down)
    start = [(down["out"].clone(), down["x"].clone()) for down in chains]

    def run():
        for down, (stream, rows) in zip(chains, start, strict=True):
            down["out"].copy_(stream)
            down["normed"].copy_(rows)
        for _ in range(5):
            for down in chains:
                codec_linear(**down | {"x": down["normed"], "normed": down["x"]})
                codec_linear(**down)

    for down in chains:
        require_same_replays(run, down["out"])
        require_same_replays(run, down["normed"])


@triton.jit
def _hold(flag_ptr, limit):
    """Keeps its multiprocessor until the flag is set."""
    count = 0
    while (tl.load(flag_ptr, volatile=True) == 0) & (count < limit):
        count += 1


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1024, 2048])
def test_normed_rows_while_others_hold_most_multiprocessors(moss_library, m):
    """The blocks of a row do not run at once then: those that leave are stood in for, with the same bits."""
    arguments = with_norm(m, WIDTH, 768, dtype=torch.bfloat16, device="cuda")
    start, others = arguments["out"].clone(), torch.cuda.Stream()
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    results = []
    for held in (False, True, False):
        arguments["out"].copy_(start)
        arguments["normed"].fill_(torch.nan)
        flag.fill_(0 if held else 1)
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(others):
            # Two fill a multiprocessor, so that all but two are full, and those have room for one block each.
            blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count - 2
            _hold[(blocks,)](flag, 1 << 21, num_warps=32)
        torch.cuda._sleep(1_000_000)
        began.record()
        codec_linear(**arguments)
        ended.record()
        ended.synchronize()
        flag.fill_(1)
        torch.cuda.synchronize()
        results.append((arguments["out"].clone(), arguments["normed"].clone()))
        assert (began.elapsed_time(ended) > 0.5) == held  # several waits that end in vain
        assert torch.equal(results[-1][0], results[0][0])
        assert torch.equal(results[-1][1], results[0][1])

"""codec_linear in slices: sums that a linear leaves in memory, and norms that add them to the stream first."""

import pytest
import torch
from test_codec_linear import TILES, errors, make_arguments, positional, reference
from torch.nn import functional as F

from moss_kernels import _launch
from moss_kernels.codec_linear import (
    codec_linear,
    codec_linear_reference,
    cuda_kernel,
    partial_elements,
    partial_slices,
    row_kernels,
    triton_kernel,
)
from moss_kernels.codec_linear.tiles import partial_tile_for, partial_tiles
from moss_kernels.testing.compare import require_same_replays


def with_partials(arguments, slices):
    """The same with partial sums of a linear ahead that the stream in `x` still lacks; the stream is a copy."""
    x = arguments["x"]
    partials = torch.randn(slices, *x.shape, device=x.device)
    scale = (0.1 + torch.rand(x.shape[1], device=x.device) / 2).to(arguments["weight"].dtype)
    return arguments | {"x": x.clone(), "partials": partials, "partials_scale": scale}


def norm_of(arguments):
    return arguments["norm_weight"], arguments["norm_bias"]


def added(arguments, dtype=torch.float64):
    """The stream with the partial sums, rounded as `x` is."""
    x, partials, scale = (arguments[name].to(dtype) for name in ("x", "partials", "partials_scale"))
    return (x + scale * partials.sum(0)).to(arguments["x"].dtype)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_sums_over_slices_that_the_next_norm_adds_are_the_whole(stream):
    down = make_arguments("plain", 5, 24, 48, dtype=torch.bfloat16) | {"out": torch.full((3, 5, 24), torch.nan)}
    codec_linear(**down)
    slices = (down["x"].double().unflatten(1, (3, 16)), down["weight"].double().unflatten(1, (3, 16)))
    torch.testing.assert_close(down["out"].double(), torch.einsum("msk,nsk->smn", *slices), rtol=1e-5, atol=1e-5)
    up = with_partials(make_arguments("norm", 5, 12, 24, dtype=torch.bfloat16, stream=stream), 3)
    up |= {"partials": down["out"]}
    expected = added(up)
    result = reference(up | {"x": expected})
    codec_linear(**up)
    torch.testing.assert_close(up["x"], expected, rtol=2**-7 if stream == torch.bfloat16 else 1e-6, atol=1e-6)
    torch.testing.assert_close(up["out"], result, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added_first", [False, True])
def test_sums_over_slices_of_what_is_normed(stream, added_first):
    """As for q, k and v: the norm, which may add sums itself, comes before them."""
    arguments = make_arguments("norm", 5, 12, 24, dtype=torch.bfloat16, stream=stream)
    arguments |= {"out": torch.full((2, 5, 12), torch.nan)}
    if added_first:
        arguments = with_partials(arguments, 3)
    x, (weight, bias) = added(arguments) if added_first else arguments["x"], norm_of(arguments)
    normed = F.layer_norm(x, (24,), weight.to(stream), bias.to(stream)).bfloat16()
    codec_linear(**arguments)
    slices = (part.double().unflatten(1, (2, 12)) for part in (normed, arguments["weight"]))
    torch.testing.assert_close(arguments["out"].double(), torch.einsum("msk,nsk->smn", *slices), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("m", [0, 5])
def test_opcheck_of_partial_sums(m):
    out = {"out": torch.zeros(3, m, 12)}
    for kind in ("plain", "norm"):
        torch.library.opcheck(torch.ops.moss.codec_linear, positional(make_arguments(kind, m, 12, 24) | out))
    arguments = with_partials(make_arguments("norm", m, 12, 24), 2)
    torch.library.opcheck(torch.ops.moss.codec_linear, positional(arguments))


def test_torch_compile_of_partial_sums():
    arguments = with_partials(make_arguments("norm", 5, 12, 24), 2)
    stream = added(arguments, torch.float32)
    torch.compile(codec_linear, fullgraph=True, dynamic=True, backend="aot_eager")(**arguments)
    torch.testing.assert_close(arguments["x"], stream)
    torch.testing.assert_close(arguments["out"], reference(arguments | {"x": stream}))


def test_partial_sums_of_all_tiles_run_at_once_and_have_room():
    for n, k in ((768, 768), (768, 3072), (3840, 1280), (1280, 1280), (1280, 5120)):
        for m in range(1, 1600):
            if tile := partial_tile_for(m, n, k):
                blocks = -(-m // tile.rows) * -(-n // tile.columns) * tile.slices
                assert blocks <= (264 if tile.rows == 64 else 132), (m, n, k, tile)
                assert k % (64 * tile.slices) == 0
                # Of all that fit into buffers for so many rows, or for some more.
                assert all(tile.slices * m * n <= partial_elements(rows, n, k) for rows in (m, m + 1, 2000))
    assert partial_elements(32, 768, 3072) == partial_elements(2000, 64, 64) == 0


def test_nothing_is_left_to_the_next_norm_without_its_kernel():
    assert partial_tile_for(64, 1280, 5120) is not None
    assert partial_slices(64, torch.zeros(1280, 5120, dtype=torch.bfloat16, device="meta")) == 0


@pytest.mark.interpreter
@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize(("k", "slices"), [(39, 2), (40, 1), (600, 3), (1280, 4)])
def test_layer_norm_of_partial_sums_in_the_interpreter(x_dtype, dtype, k, slices):
    arguments = with_partials(make_arguments("norm", 9, 8, k, dtype=dtype, stream=x_dtype), slices)
    x, weight, bias = (arguments[name] for name in ("x", "norm_weight", "norm_bias"))
    stream, out = added(arguments), torch.full((9, k), torch.nan, dtype=dtype)
    row_kernels.layer_norm(x, weight, bias, out, arguments["partials"], arguments["partials_scale"])
    torch.testing.assert_close(x, stream, rtol=1e-6, atol=1e-6)
    expected = F.layer_norm(stream, (k,), weight.float(), bias.float())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter rounds towards 0
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_triton_adds_partial_sums_in_the_interpreter(tile):
    arguments = with_partials(make_arguments("norm_gelu", 33, 24, 40), 3)
    stream = added(arguments, torch.float32)
    triton_kernel.codec_linear_triton(*positional(arguments), tile=tile)
    torch.testing.assert_close(arguments["x"], stream)
    torch.testing.assert_close(arguments["out"], reference(arguments | {"x": stream}), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [49, 64])
def test_sums_for_queries_keys_and_values(moss_library, m):
    """The norm rounds what the product takes; the sums are those of it, and leave the stream as the norm leaves it."""
    arguments = make_arguments("norm", m, 3840, 1280, dtype=torch.bfloat16, device="cuda")
    slices = partial_slices(m, arguments["weight"])
    assert slices > 1
    arguments = with_partials(arguments | {"out": torch.full((slices, m, 3840), torch.nan, device="cuda")}, 5)
    stream, normed = arguments["x"].clone(), torch.empty(m, 1280, dtype=torch.bfloat16, device="cuda")
    row_kernels.layer_norm(stream, *norm_of(arguments), normed, arguments["partials"], arguments["partials_scale"])
    codec_linear(**arguments)
    assert torch.equal(arguments["x"], stream)
    parts = (part.double().unflatten(1, (slices, -1)) for part in (normed, arguments["weight"]))
    exact = torch.einsum("msk,nsk->smn", *parts)
    assert (arguments["out"] - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 331])
@pytest.mark.parametrize("steps", [1, 5, 30])
@pytest.mark.parametrize("tile", partial_tiles(), ids=str)
def test_partial_sums_of_every_tile(moss_library, monkeypatch, tile, steps, m):
    """Uneven in rows and columns, and fewer and more steps than a block has stages; what lies beyond stays, and bits
    repeat.

    The bits of a row do not depend on its place.
    """
    arguments = make_arguments("plain", m, 304, steps * 64 * tile.slices, dtype=torch.bfloat16, device="cuda")
    x, weight, beyond = arguments["x"], arguments["weight"], 640
    slices = (part.double().unflatten(1, (tile.slices, -1)) for part in (x, weight))
    exact = torch.einsum("msk,nsk->smn", *slices)
    monkeypatch.setattr(cuda_kernel, "partial_tile_for", lambda *sizes: tile)
    results = [torch.full((exact.numel() + beyond,), torch.nan, device="cuda") for _ in range(3)]
    for result in results:
        codec_linear(x, weight, result[:-beyond].view_as(exact))
        assert result[-beyond:].isnan().all()
        assert torch.equal(result[:-beyond], results[0][:-beyond])
    sums = results[0][:-beyond].view_as(exact)
    assert (sums - exact).norm() <= 1e-5 * exact.norm()
    turned = torch.empty_like(sums)
    codec_linear(x.flip(0), weight, turned)
    assert torch.equal(turned.flip(1), sums)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [768, 1280])
@pytest.mark.parametrize("slices", [1, *sorted({tile.slices for tile in partial_tiles()})])
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_a_norm_adds_partial_sums(stream, slices, k):
    """As close as eager modules; a row's bits do not depend on the others."""
    arguments = make_arguments("norm", 301, 64, k, dtype=torch.bfloat16, stream=stream, device="cuda")
    arguments = with_partials(arguments, slices)
    expected, names = added(arguments), ("norm_weight", "norm_bias")
    weight, bias = (arguments[name] for name in names)

    def run(rows):
        x, partials = arguments["x"][rows].clone(), arguments["partials"][:, rows].contiguous()
        out = torch.full((len(x), k), torch.nan, dtype=torch.bfloat16, device="cuda")
        row_kernels.layer_norm(x, weight, bias, out, partials, arguments["partials_scale"])
        return x, out

    x, out = run(slice(None))
    # A sum near the middle of two values may round either way.
    assert (x != expected).float().mean() < (1e-3 if stream == torch.bfloat16 else 1)
    assert (x - expected).norm() <= (1e-4 if stream == torch.bfloat16 else 1e-6) * expected.norm()
    exact = F.layer_norm(x.double(), (k,), weight.double(), bias.double())
    eager = F.layer_norm(x, (k,), weight.to(stream), bias.to(stream)).bfloat16()
    assert errors(out, exact) <= 1.05 * errors(eager, exact)
    for rows in (slice(0, 1), slice(97, 200), slice(300, 301)):
        assert all(torch.equal(part, whole[rows]) for part, whole in zip(run(rows), (x, out), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "d"), [(17, 1280), (64, 1280), (150, 1280), (100, 768), (384, 768), (512, 768)])
@pytest.mark.parametrize("dependent", [False, True])
def test_replay_of_a_chain_of_partial_sums_equals_eager(moss_library, m, d, dependent, monkeypatch):
    """The sums of each linear lie where those of the one before did, which the norm between them has read."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    up = make_arguments("norm_gelu", m, 4 * d, d, dtype=torch.bfloat16, device="cuda")
    down = make_arguments("scale", m, d, 4 * d, dtype=torch.bfloat16, device="cuda")
    slices = partial_slices(m, down["weight"])
    assert slices > 1
    start, sums = up["x"].clone(), torch.empty(slices, m, d, device="cuda")

    def chain():
        up["x"].copy_(start)
        sums.zero_()
        for _ in range(10):
            codec_linear(**up, partials=sums, partials_scale=down["scale"])
            codec_linear(up["out"], down["weight"], sums)

    require_same_replays(chain, up["x"])
    eager = start.double()
    for _ in range(9):
        parts = {name: up[name].double() for name in ("weight", "norm_weight", "norm_bias")}
        hidden = codec_linear_reference(eager, **parts, gelu=True)
        eager = eager + down["scale"].double() * F.linear(hidden, down["weight"].double())
    assert (up["x"] - eager).norm() <= 0.02 * eager.norm()

"""codec_linear that rotates the q and k among its outputs, against the same without, rotated by the reference."""

import pytest
import torch
from test_codec_linear import make_arguments, positional

from moss_kernels.codec_linear import codec_linear, cuda_kernel
from moss_kernels.codec_linear.arguments import CodecLinearArguments
from moss_kernels.codec_linear.tiles import CudaTile, wide_tile
from moss_kernels.ring_attention import rotate_interleaved


def with_rotation(arguments, heads):
    """The same whose outputs are q, k and v of so many heads, each row's with angles of its own."""
    m, n = arguments["out"].shape
    angle = 6.3 * torch.rand(m, n // (6 * heads), device=arguments["x"].device)
    return arguments | {"cos_sin": torch.stack((angle.cos(), angle.sin()), -1)}


def require_rotated(out, plain, cos_sin):
    """Bit by bit: pairs of q and k turned, all else as it was."""
    q, k, v = plain.unflatten(-1, (3, -1, 2 * cos_sin.shape[1])).unbind(1)
    q, k = (rotate_interleaved(x, cos_sin) for x in (q, k))
    assert torch.equal(out, torch.stack((q, k, v), 1).flatten(1))


@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_and_k_are_rotated(kind, dtype):
    arguments = make_arguments(kind, 7, 3 * 2 * 8, 24, dtype=dtype)
    plain = torch.empty_like(arguments["out"])
    codec_linear(**arguments | {"out": plain})
    turned = with_rotation(arguments, 2)
    codec_linear(**turned)
    require_rotated(turned["out"], plain, turned["cos_sin"])


def test_opcheck_and_torch_compile():
    arguments = with_rotation(make_arguments("plain", 5, 48, 24), 2)
    torch.library.opcheck(torch.ops.moss.codec_linear, positional(arguments), {"cos_sin": arguments["cos_sin"]})
    expected = torch.empty_like(arguments["out"])
    codec_linear(**arguments | {"out": expected})
    torch.compile(codec_linear, fullgraph=True, dynamic=True, backend="aot_eager")(**arguments)
    assert torch.equal(arguments["out"], expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cos_sin", torch.zeros(7, 5, 2), r"`out` must have 3 \* H \* D columns, D = 10, got 48"),
        ("cos_sin", torch.zeros(6, 4, 2), r"`cos_sin` must .*M = 7"),
        ("gelu", True, "`cos_sin` must be None with GELU"),
    ],
)
def test_a_wrong_rotation_is_named(name, value, message):
    arguments = with_rotation(make_arguments("plain", 7, 48, 24), 2)
    with pytest.raises(ValueError, match=f"`codec_linear`: {message}"):
        codec_linear(**arguments | {name: value})


@pytest.mark.parametrize("m", [1, 33, 480, 960, 1536, 3840, 30720])
def test_tiles_that_rotate_have_whole_heads(m):
    tile = wide_tile(m, 2304, 768, rotated=True)
    blocks = -(-m // tile.rows) * (2304 // tile.columns)
    assert tile.columns == 128 or (tile.columns == 192 and (tile.rows == 192 or blocks <= 132))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("heads", [2, 12])
@pytest.mark.parametrize("m", [1, 331, 9000])
@pytest.mark.parametrize("tile", [(128, 128), (192, 192), (128, 192)])
def test_q_and_k_are_rotated_on_the_gpu(moss_library, monkeypatch, kind, heads, m, tile):
    """Uneven in rows, q, k and v beginning within tiles, blocks that take one tile and several."""
    if tile == (128, 192) and m == 9000:
        pytest.skip("there is no such kernel for more than one round")
    tile = CudaTile(*tile, 1)
    arguments = make_arguments(kind, m, 3 * 64 * heads, 64 * heads, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(cuda_kernel, "cuda_tile_for", lambda *sizes: tile)
    monkeypatch.setattr(cuda_kernel, "wide_tile", lambda *sizes, rotated: tile)
    plain = torch.empty_like(arguments["out"])
    cuda_kernel.codec_linear_cuda(*positional(arguments | {"out": plain}))
    turned = with_rotation(arguments, heads)
    cuda_kernel.codec_linear_cuda(*CodecLinearArguments(*positional(turned), cos_sin=turned["cos_sin"]))
    require_rotated(turned["out"], plain, turned["cos_sin"])

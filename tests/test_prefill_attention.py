"""prefill_attention against float64, in every implementation; what must not matter in its inputs is NaN."""

import pytest
import torch

from moss_kernels.prefill_attention import TILE, prefill_attention, prefill_attention_reference, triton_kernel
from moss_kernels.testing.backbone import PagedInputs
from moss_kernels.testing.compare import require_equal

# Tokens of each prompt, around pages and tiles; None is a tile of padding.
COUNTS = (17, None, 1, 40, 15, 0, 33, 16)
STARTS = (0, 21)
NAMES = [argument.name for argument in torch.ops.moss.prefill_attention.default._schema.arguments]
# Key heads, query heads for each, head_dim and page size: pages larger and smaller than a tile, and of odd sizes.
SIZES = [(2, 3, 16, 16), (1, 4, 32, 64), (3, 1, 64, 5), (1, 20, 16, 1)]


def make_inputs(
    counts=COUNTS,
    *,
    start=0,
    kv_heads=2,
    group=3,
    head_dim=16,
    page_size=16,
    dtype=torch.float32,
    device="cpu",
):
    """All arguments of the op, in order."""
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    held = [(None if count is None else start + count, count is not None) for count in counts]
    pages = PagedInputs.make(held, **sizes, dtype=dtype, device=device)
    tiles = [
        (row, start + first if count else 0, min(TILE, count - first))
        for row, count in zip(pages.row_map.tolist(), (count or 0 for count in counts), strict=True)
        for first in range(0, max(count, 1), TILE)
    ]
    tables, tiles = torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3).split([1, 2], 1)
    q = torch.randn(len(tiles), TILE, kv_heads * group * head_dim, device=device)
    q[torch.arange(TILE, device=device) >= tiles[:, 1:]] = torch.nan
    q = q.flatten(0, 1).to(dtype)
    tables, tiles = pages.page_table[tables[:, 0].long()], tiles.contiguous()
    return [q, pages.key_pages[0], pages.value_pages[0], tables, tiles, torch.full_like(q, torch.nan)]


def exact_attention(q, key_pages, value_pages, page_tables, tiles, out):
    """[M, Hq*D] float64: query by query, over the keys that it sees."""
    heads, _, head_dim = key_pages.shape[1:]
    q, key_pages, value_pages = (tensor.cpu().double() for tensor in (q, key_pages, value_pages))
    result = torch.zeros(q.shape, dtype=torch.float64)
    for tile, (first, count) in enumerate(tiles.tolist()):
        pages = page_tables[tile].cpu().long()
        keys, values = (store[pages].transpose(1, 2).flatten(0, 1) for store in (key_pages, value_pages))
        for step in range(count):
            query, seen = tile * TILE + step, first + step + 1
            scores = torch.einsum("hgd,nhd->hgn", q[query].view(heads, -1, head_dim), keys[:seen]) / head_dim**0.5
            result[query] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values[:seen]).flatten()
    return result


def error(out, exact):
    """Largest error relative to the largest value; infinite if any output is NaN."""
    return ((out.cpu().double() - exact).abs().max() / exact.abs().max()).nan_to_num(torch.inf).item()


def require_exact(run, arguments, **options):
    """float32: the output follows float64, and is 0 beyond each tile's queries."""
    run(*arguments, **options)
    *_, tiles, out = arguments
    assert error(out, exact_attention(*arguments)) < 5e-6
    padding = torch.arange(TILE) >= tiles[:, 1:].cpu()
    assert (out.cpu()[padding.flatten()] == 0).all()


def require_each_alone(run, arguments, **options):
    """A tile by itself, and with its neighbours in another order, has the bits that it has among all."""
    q, keys, values, tables, tiles, out = arguments
    run(*arguments, **options)
    together = out.view(len(tiles), TILE, -1)
    orders = [[tile] for tile in range(len(tiles))] + [list(reversed(range(len(tiles)))), [3, 0, 6]]
    for order in orders:
        queries = q.view(together.shape)[order].flatten(0, 1)
        part = torch.full_like(queries, torch.nan)
        run(queries, keys, values, tables[order], tiles[order], part, **options)
        require_equal(f"tiles {order}", part, together[order].flatten(0, 1))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
def test_op_follows_float64(kv_heads, group, head_dim, page_size, start):
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    require_exact(prefill_attention, make_inputs(start=start, **sizes))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
def test_triton_in_the_interpreter(kv_heads, group, head_dim, page_size, start):
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    require_exact(triton_kernel.prefill_attention_triton, make_inputs(start=start, **sizes))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("page_size", [64, 16])
def test_tiles_of_bf16_in_the_interpreter(page_size):
    """The tile sizes that bfloat16 uses, on float32: the interpreter has no bfloat16 products."""
    arguments = make_inputs((150, 1, 65, None, 160), start=7, group=4, page_size=page_size)
    require_exact(triton_kernel.prefill_attention_triton, arguments, config=triton_kernel.CONFIGS[torch.bfloat16])


@pytest.mark.parametrize("start", STARTS)
def test_a_tile_does_not_depend_on_the_others(start):
    require_each_alone(prefill_attention, make_inputs(start=start))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_tile_does_not_depend_on_the_others_in_the_interpreter():
    require_each_alone(triton_kernel.prefill_attention_triton, make_inputs(start=21))


@pytest.mark.parametrize("counts", [(3, 0, 4), ()])
def test_opcheck(counts):
    arguments = [x.nan_to_num() if torch.is_tensor(x) else x for x in make_inputs(counts)]
    torch.library.opcheck(torch.ops.moss.prefill_attention.default, tuple(arguments))


def _wrong(name, error, message, value):
    return pytest.param(name, error, message, value, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "error", "message", "value"),
    [
        _wrong("q", TypeError, "float32 or bfloat16, got float16", lambda x: x.half()),
        _wrong("q", ValueError, r"16\*T = 208 rows, got 207", lambda x: x[1:]),
        _wrong("q", ValueError, r"multiple of H\*D = 32 columns, got 95", lambda x: x[:, 1:].contiguous()),
        _wrong("key_pages", TypeError, "float32, got bfloat16", lambda x: x.bfloat16()),
        _wrong("value_pages", ValueError, "contiguous", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        _wrong("page_tables", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("tiles", ValueError, r"\[T, 2\] with T = 13, got \(13, 1\)", lambda x: x[:, 1:]),
        _wrong("tiles", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("out", ValueError, r"M = 208, Hq\*D = 96, got \(207, 96\)", lambda x: x[1:]),
    ],
)
def test_wrong_argument_is_named(name, error, message, value):
    arguments = dict(zip(NAMES, make_inputs(), strict=True))
    arguments[name] = value(arguments[name])
    if name == "q" and "got float16" not in message:
        arguments["out"] = value(arguments["out"])
    with pytest.raises(error, match=rf"`prefill_attention`: `{name}` must .*{message}"):
        prefill_attention(**arguments)


def test_pages_without_heads_are_refused():
    arguments = make_inputs()
    arguments[1] = arguments[2] = torch.zeros(9, 0, 16, 16)
    with pytest.raises(ValueError, match=r"`q` must have a multiple of H\*D = 0 columns, got 96"):
        prefill_attention(*arguments)


def test_triton_names_the_sizes_it_takes():
    with pytest.raises(NotImplementedError, match="head_dim of 16, 32, 64, 128, got 20"):
        triton_kernel.prefill_attention_triton(*make_inputs(head_dim=20))


FULL = {"kv_heads": 8, "group": 4, "head_dim": 128, "page_size": 64}
LONG = (149, 150, 1, 63, 64, 65, None, 160)


@pytest.mark.gpu
@pytest.mark.parametrize("start", [*STARTS, 512])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), [*SIZES, (8, 4, 128, 64)])
def test_triton_on_the_gpu(kv_heads, group, head_dim, page_size, start):
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    require_exact(triton_kernel.prefill_attention_triton, make_inputs(start=start, **sizes, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 512])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), [*SIZES, (8, 4, 128, 64), (2, 4, 128, 48)])
def test_bf16_errs_at_most_twice_as_much_as_the_reference(kv_heads, group, head_dim, page_size, start):
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    arguments = make_inputs(LONG, start=start, **sizes, dtype=torch.bfloat16, device="cuda")
    out = arguments[-1]
    exact = exact_attention(*arguments)
    prefill_attention_reference(*arguments)
    allowed = error(out, exact)
    out.fill_(torch.nan)
    triton_kernel.prefill_attention_triton(*arguments)
    # The weights are rounded as well, as any tensor core attention rounds them.
    assert error(out, exact) <= 2 * allowed + 2**-9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 512])
def test_a_tile_does_not_depend_on_the_others_on_the_gpu(dtype, start):
    arguments = make_inputs(LONG, start=start, **FULL, dtype=dtype, device="cuda")
    require_each_alone(triton_kernel.prefill_attention_triton, arguments)


@pytest.mark.gpu
def test_replays_equal_eager():
    """A graph reads tiles, tables and queries anew in each replay."""
    arguments = make_inputs(LONG, **FULL, dtype=torch.bfloat16, device="cuda")
    q, _, _, tables, tiles, out = arguments
    prefill_attention(*arguments)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(*arguments)
    held = [tensor.clone() for tensor in (q, tables, tiles)]
    tiles.zero_()
    graph.replay()
    assert (out == 0).all()
    for tensor, value in zip((q, tables, tiles), held, strict=True):
        tensor.copy_(value)
    graph.replay()
    require_equal("out", out, expected)

"""paged_attention against float64, in every implementation; what must not matter in its inputs is NaN."""

import pytest
import torch

from moss_kernels import _launch
from moss_kernels.paged_attention import AttentionScratch, paged_attention, paged_attention_reference, triton_kernel
from moss_kernels.paged_attention.reference import MAX_SPLITS, MIN_SPLIT
from moss_kernels.testing.backbone import PagedInputs
from moss_kernels.testing.compare import require_equal

# Keys stored, the newest included: one, around pages and splits, many splits, and splits that have doubled.
KEYS = [1, 15, 16, 17, 127, 128, 129, 300, MIN_SPLIT * MAX_SPLITS, MIN_SPLIT * MAX_SPLITS + 1]
ROWS = [(keys, True) for keys in KEYS] + [(None, False), (33, False)]
ROWS = ROWS[5:] + ROWS[:5]
NAMES = [argument.name for argument in torch.ops.moss.paged_attention.default._schema.arguments]


def make_inputs(rows=ROWS, *, kv_heads=2, group=3, head_dim=16, page_size=16, dtype=torch.float32, device="cpu"):
    """q and pages whose rows hold their newest key already; q of inactive rows is NaN."""
    pages = PagedInputs.make(
        rows, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    pages.positions -= 1
    pages.positions[-1] = 0
    q = 1.5 * torch.randn(len(rows), group * kv_heads * head_dim, device=device)
    q[~pages.active] = torch.nan
    return q.to(dtype), pages


def make_scratch(q, pages):
    kv_heads, head_dim = pages.key_pages.shape[2], pages.key_pages.shape[4]
    scratch = AttentionScratch.allocate(len(q) + 1, q.shape[1] // head_dim, kv_heads, head_dim, q.device)
    scratch.partials.fill_(torch.nan)
    return scratch


def attend(run, q, pages, **options):
    """Output of an implementation, which leaves its counters as it found them."""
    scratch, out = make_scratch(q, pages), torch.full_like(q, torch.nan)
    run(q, *pages.layer(), out, scratch.partials, scratch.arrived, **options)
    assert not scratch.arrived.any()
    return out


def exact_attention(q, pages):
    """[B, Hq*D] float64: each row's keys put in order, then plain attention; 0 in inactive rows."""
    key_pages, value_pages, page_table, positions, row_map, active = (x.cpu() for x in pages.layer())
    kv_heads, head_dim = key_pages.shape[1], key_pages.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for batch_row in active.nonzero()[:, 0].tolist():
        row = int(row_map[batch_row])
        count = int(positions[row]) + 1
        keys, values = (
            store[page_table[row].long()].transpose(1, 2).flatten(0, 1)[:count].double()
            for store in (key_pages, value_pages)
        )
        queries = q[batch_row].cpu().double().view(kv_heads, -1, head_dim)
        weights = (torch.einsum("hgd,nhd->hgn", queries, keys) / head_dim**0.5).softmax(-1)
        out[batch_row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten()
    return out


def error(out, exact):
    """Largest error relative to the largest value; infinite if any output is NaN."""
    return ((out.cpu().double() - exact).abs().max() / exact.abs().max()).nan_to_num(torch.inf).item()


def op(*arguments):
    torch.ops.moss.paged_attention(*arguments)


SIZES = [(2, 3, 16, 16), (1, 4, 32, 64), (3, 1, 64, 32)]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
def test_op_follows_float64(kv_heads, group, head_dim, page_size):
    q, pages = make_inputs(kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size)
    out = attend(op, q, pages)
    assert error(out, exact_attention(q, pages)) < 5e-6
    assert (out[~pages.active] == 0).all()


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
def test_triton_in_the_interpreter(kv_heads, group, head_dim, page_size):
    q, pages = make_inputs(kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size)
    out = attend(triton_kernel.paged_attention_triton, q, pages)
    assert error(out, exact_attention(q, pages)) < 5e-6
    assert (out[~pages.active] == 0).all()


@pytest.mark.interpreter
def test_programs_that_share_the_splits_do_not_show():
    q, pages = make_inputs([(300, True), (MIN_SPLIT * MAX_SPLITS + 1, True)], kv_heads=1, page_size=64)
    expected = attend(triton_kernel.paged_attention_triton, q, pages, programs=1)
    for programs in (2, 3, 16):
        out = attend(triton_kernel.paged_attention_triton, q, pages, programs=programs)
        require_equal(f"out of {programs} programs", out, expected)


@pytest.mark.interpreter
def test_all_padding_in_the_interpreter():
    q, pages = make_inputs([(None, False), (20, False)])
    assert (attend(triton_kernel.paged_attention_triton, q, pages) == 0).all()


def test_all_padding():
    q, pages = make_inputs([(None, False), (20, False)])
    assert (attend(op, q, pages) == 0).all()


def test_opcheck():
    q, pages = make_inputs(ROWS[-3:])
    scratch = make_scratch(q, pages)
    tensors = (q, *pages.layer(), torch.zeros_like(q), scratch.partials, scratch.arrived)
    torch.library.opcheck(torch.ops.moss.paged_attention.default, tuple(x.nan_to_num() for x in tensors))


def _wrong(name, error, message, value):
    return pytest.param(name, error, message, value, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "error", "message", "value"),
    [
        _wrong("q", TypeError, "float32 or bfloat16, got float16", lambda x: x.half()),
        _wrong("q", ValueError, r"multiple of H\*D = 32 columns, got 95", lambda x: x[:, 1:].contiguous()),
        _wrong("key_pages", TypeError, "float32, got bfloat16", lambda x: x.bfloat16()),
        _wrong("positions", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("out", ValueError, r"Hq\*D = 96", lambda x: x[:, 1:].contiguous()),
        _wrong("partials", ValueError, r"\[R, H, 16, G, D\+2\]", lambda x: x[:, :, 1:].contiguous()),
        _wrong("partials", ValueError, "at least B = 3 rows, got 2", lambda x: x[:2]),
        _wrong("arrived", TypeError, "int32, got int64", lambda x: x.long()),
    ],
)
def test_wrong_argument_is_named(name, error, message, value):
    q, pages = make_inputs(ROWS[-3:])
    scratch = make_scratch(q, pages)
    tensors = (q, *pages.layer(), torch.zeros_like(q), scratch.partials, scratch.arrived)
    arguments = dict(zip(NAMES, tensors, strict=True))
    arguments[name] = value(arguments[name])
    if "rows" in message:
        arguments["arrived"] = arguments["arrived"][:2]
    with pytest.raises(error, match=rf"`paged_attention`: `{name}` must .*{message}"):
        torch.ops.moss.paged_attention(*arguments.values())


def test_triton_names_the_sizes_it_takes():
    q, pages = make_inputs(ROWS[-3:], head_dim=20)
    with pytest.raises(NotImplementedError, match="head_dim of 16, 32, 64, 128, got 20"):
        attend(triton_kernel.paged_attention_triton, q, pages)


FULL = {"kv_heads": 8, "group": 4, "head_dim": 128, "page_size": 64}


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), [*SIZES, (8, 4, 128, 64)])
def test_triton_on_the_gpu(kv_heads, group, head_dim, page_size):
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    q, pages = make_inputs(**sizes, device="cuda")
    out = attend(triton_kernel.paged_attention_triton, q, pages)
    assert error(out, exact_attention(q, pages)) < 5e-6
    assert (out[~pages.active] == 0).all()


@pytest.mark.gpu
def test_bf16_errs_at_most_twice_as_much_as_the_reference():
    for keys in KEYS:
        q, pages = make_inputs([(keys, True)], **FULL, dtype=torch.bfloat16, device="cuda")
        exact = exact_attention(q, pages)
        rounding = error(attend(lambda *tensors: paged_attention_reference(*tensors[:-2]), q, pages), exact)
        # The weights are rounded as well, as any tensor core attention rounds them.
        assert error(attend(triton_kernel.paged_attention_triton, q, pages), exact) <= 2 * rounding + 2**-9, keys


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch(dtype):
    rows = [(1 + 37 * n % 3000, True) for n in range(128)]
    q, pages = make_inputs(rows, **FULL, dtype=dtype, device="cuda")
    together = attend(triton_kernel.paged_attention_triton, q, pages)
    for batch in (1, 2, 3, 7, 16, 33, 64, 128):
        index = torch.randperm(128)[:batch].tolist()
        out = attend(triton_kernel.paged_attention_triton, q[index], pages.take(index))
        require_equal(f"out of {batch} rows", out, together[index])


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_replays_equal_eager(dependent, monkeypatch):
    """The programs of a row arrive in any order, many times over, with one scratch."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    q, pages = make_inputs([(1 + 61 * n % 2500, True) for n in range(64)], **FULL, dtype=torch.bfloat16, device="cuda")
    expected = attend(triton_kernel.paged_attention_triton, q, pages)
    scratch, outs = make_scratch(q, pages), [torch.empty_like(q) for _ in range(4)]

    def chain():
        for out in outs:
            paged_attention(q, *pages.layer(), out, scratch)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(50):
        for out in outs:
            out.zero_()
        graph.replay()
        for out in outs:
            require_equal("out", out, expected)
    assert not scratch.arrived.any()

"""paged_attention against float64, in every implementation; what must not matter in its inputs is NaN."""

import dataclasses
from functools import partial

import pytest
import torch

from moss_kernels import _launch
from moss_kernels.kv_append import kv_append, kv_append_reference
from moss_kernels.paged_attention import (
    AttentionScratch,
    cuda_kernel,
    paged_attention,
    paged_attention_reference,
    triton_kernel,
)
from moss_kernels.paged_attention.reference import MAX_SPLITS, MIN_SPLIT
from moss_kernels.testing.backbone import PagedInputs
from moss_kernels.testing.compare import require_equal
from moss_runtime.model.backbone import rope_tables

# Tokens stored before the new one: none, around pages and splits, many splits, and splits that have doubled.
STORED = [0, 15, 16, 17, 127, 128, 129, 300, MIN_SPLIT * MAX_SPLITS - 1, MIN_SPLIT * MAX_SPLITS]
ROWS = [(tokens, True) for tokens in STORED[5:]] + [(None, False), (33, False)]
ROWS += [(tokens, True) for tokens in STORED[:5]]
NAMES = [argument.name for argument in torch.ops.moss.paged_attention.default._schema.arguments][:-1]
EPS, LONGEST = 1e-6, 3100


def make_inputs(rows=ROWS, *, kv_heads=2, group=3, head_dim=16, page_size=16, dtype=torch.float32, device="cpu"):
    """(qkv, q_norm, k_norm, eps, cos_sin) and pages; inputs of inactive rows are NaN."""
    pages = PagedInputs.make(
        rows, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    qkv = torch.randn(len(rows), (group + 2) * kv_heads * head_dim, device=device)
    qkv[~pages.active] = torch.nan
    norms = (1.5 + torch.randn(2, head_dim, device=device) / 4).to(dtype)
    tables = rope_tables(torch.arange(LONGEST, device=device)[None], head_dim, 1e4, dtype)
    return (qkv.to(dtype), *norms, EPS, torch.cat(tables, -1)[0, 0]), pages


def query_width(token, pages):
    return token[0].shape[1] - 2 * pages.key_pages.shape[2] * pages.key_pages.shape[4]


def make_scratch(token, pages):
    kv_heads, head_dim = pages.key_pages.shape[2], pages.key_pages.shape[4]
    heads = query_width(token, pages) // head_dim, kv_heads, head_dim
    scratch = AttentionScratch.allocate(len(token[0]) + 1, *heads, token[0].device)
    scratch.partials.fill_(torch.nan)
    return scratch


def make_arguments(token, pages):
    """All arguments of the op but `settled`, in order."""
    out = token[0].new_full((len(token[0]), query_width(token, pages)), torch.nan)
    scratch = make_scratch(token, pages)
    return [*token, *pages.layer(), out, scratch.partials, scratch.arrived]


def attend(run, token, pages, **options):
    """Output of an implementation on a copy of the pages, and the copy; counters are left as they were found."""
    pages = pages.clone()
    arguments = make_arguments(token, pages)
    run(*arguments, **options)
    assert not arguments[-1].any()
    return arguments[-3], pages


def exact_attention(token, pages):
    """[B, Hq*D] float64 and pages in the dtype of the inputs: each row's keys in order, then plain attention.

    Queries and the new key have the rounding of eager modules.
    """
    token = [x.cpu() if torch.is_tensor(x) else x for x in token]
    pages = PagedInputs(*(x.cpu().clone() for x in vars(pages).values()))
    q = torch.zeros(len(token[0]), query_width(token, pages), dtype=token[0].dtype)
    kv_append_reference(*token, *pages.layer(), q)
    key_pages, value_pages, page_table, positions, row_map, active = pages.layer()
    kv_heads, head_dim = key_pages.shape[1], key_pages.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for batch_row in active.nonzero()[:, 0].tolist():
        row = int(row_map[batch_row])
        count = int(positions[row]) + 1
        keys, values = (
            store[page_table[row].long()].transpose(1, 2).flatten(0, 1)[:count].double()
            for store in (key_pages, value_pages)
        )
        queries = q[batch_row].double().view(kv_heads, -1, head_dim)
        weights = (torch.einsum("hgd,nhd->hgn", queries, keys) / head_dim**0.5).softmax(-1)
        out[batch_row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten()
    return out, pages


def error(out, exact):
    """Largest error relative to the largest value; infinite if any output is NaN."""
    return ((out.cpu().double() - exact).abs().max() / exact.abs().max()).nan_to_num(torch.inf).item()


def require_exact(run, token, pages, **options):
    """float32: output and pages follow float64, and an inactive row gives 0 and changes no page."""
    (out, written), (exact, expected) = attend(run, token, pages, **options), exact_attention(token, pages)
    assert error(out, exact) < 5e-6
    assert (out[~pages.active] == 0).all()
    for name in ("key_pages", "value_pages"):
        got = getattr(written, name).cpu()
        torch.testing.assert_close(got, getattr(expected, name), rtol=2e-6, atol=2e-6, equal_nan=True)
    for name in ("page_table", "positions", "row_map", "active"):
        require_equal(name, getattr(written, name), getattr(pages, name))


def op(*arguments, settled=False):
    torch.ops.moss.paged_attention(*arguments, settled)


SIZES = [(2, 3, 16, 16), (1, 4, 32, 64), (3, 1, 64, 32)]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
def test_op_follows_float64(kv_heads, group, head_dim, page_size):
    require_exact(op, *make_inputs(kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
def test_triton_in_the_interpreter(kv_heads, group, head_dim, page_size):
    inputs = make_inputs(kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size)
    require_exact(triton_kernel.paged_attention_triton, *inputs)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_programs_that_share_the_splits_do_not_show():
    inputs = make_inputs([(300, True), (MIN_SPLIT * MAX_SPLITS, True)], kv_heads=1, page_size=64)
    expected, _ = attend(triton_kernel.paged_attention_triton, *inputs, programs=1)
    for programs in (2, 3, 16):
        out, _ = attend(triton_kernel.paged_attention_triton, *inputs, programs=programs)
        require_equal(f"out of {programs} programs", out, expected)


@pytest.mark.interpreter
def test_all_padding_in_the_interpreter():
    require_padding(triton_kernel.paged_attention_triton)


def test_all_padding():
    require_padding(op)


def require_padding(run):
    token, pages = make_inputs([(None, False), (20, False)])
    out, written = attend(run, token, pages)
    assert (out == 0).all()
    for name in ("key_pages", "value_pages"):
        require_equal(name, getattr(written, name).nan_to_num(7), getattr(pages, name).nan_to_num(7))


def test_settled_inputs_change_nothing():
    token, pages = make_inputs()
    expected, _ = attend(op, token, pages)
    out, _ = attend(partial(op, settled=True), token, pages)
    require_equal("out", out, expected)


def test_opcheck():
    arguments = [x.nan_to_num() if torch.is_tensor(x) else x for x in make_arguments(*make_inputs(ROWS[-3:]))]
    torch.library.opcheck(torch.ops.moss.paged_attention.default, (*arguments, False))


def _wrong(name, error, message, value):
    return pytest.param(name, error, message, value, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "error", "message", "value"),
    [
        _wrong("qkv", TypeError, "float32 or bfloat16, got float16", lambda x: x.half()),
        _wrong("qkv", ValueError, r"\(Hq\+2\*H\)\*D = 160, got \(3, 159\)", lambda x: x[:, 1:].contiguous()),
        _wrong("key_pages", TypeError, "float32, got bfloat16", lambda x: x.bfloat16()),
        _wrong("positions", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("out", ValueError, r"multiple of H\*D = 32 columns, got 95", lambda x: x[:, 1:].contiguous()),
        _wrong("partials", ValueError, r"\[R, H, 16, G, D\+2\]", lambda x: x[:, :, 1:].contiguous()),
        _wrong("partials", ValueError, "at least B = 3 rows, got 2", lambda x: x[:2]),
        _wrong("arrived", TypeError, "int32, got int64", lambda x: x.long()),
    ],
)
def test_wrong_argument_is_named(name, error, message, value):
    arguments = dict(zip(NAMES, make_arguments(*make_inputs(ROWS[-3:])), strict=True))
    arguments[name] = value(arguments[name])
    if "rows" in message:
        arguments["arrived"] = arguments["arrived"][:2]
    with pytest.raises(error, match=rf"`paged_attention`: `{name}` must .*{message}"):
        torch.ops.moss.paged_attention(*arguments.values(), False)


def test_triton_names_the_sizes_it_takes():
    inputs = make_inputs(ROWS[-3:], head_dim=20)
    with pytest.raises(NotImplementedError, match="head_dim of 16, 32, 64, 128, got 20"):
        attend(triton_kernel.paged_attention_triton, *inputs)


FULL = {"kv_heads": 8, "group": 4, "head_dim": 128, "page_size": 64}


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), [*SIZES, (8, 4, 128, 64)])
def test_triton_on_the_gpu(kv_heads, group, head_dim, page_size):
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    require_exact(triton_kernel.paged_attention_triton, *make_inputs(**sizes, device="cuda"))


KERNELS = {"triton": triton_kernel.paged_attention_triton, "cuda": cuda_kernel.paged_attention_cuda}
# Sizes of the CUDA C++ kernel besides FULL: smaller groups, pages as small as a tile and larger than a split.
CUDA_SIZES = [(2, 1, 16), (1, 3, 64), (3, 2, 128), (2, 4, 32)]


def double(token, pages):
    """The same inputs in float64."""
    wide = {name: getattr(pages, name).double() for name in ("key_pages", "value_pages")}
    return [x.double() if torch.is_tensor(x) else x for x in token], dataclasses.replace(pages, **wide)


def require_accurate(run, token, pages):
    """bfloat16: errs at most twice as much as the reference; returns what `attend` returns."""
    exact, _ = exact_attention(*double(token, pages))
    reference, _ = attend(lambda *arguments: paged_attention_reference(*arguments[:-2]), token, pages)
    out, written = attend(run, token, pages)
    # The weights are rounded as well, as any tensor core attention rounds them.
    assert error(out, exact) <= 2 * error(reference, exact) + 2**-9
    return out, written


def require_stored(written, token, pages):
    """Pages hold what the reference stores: values bit by bit, keys up to a rounding."""
    expected = pages.clone()
    q = token[0].new_empty(len(token[0]), query_width(token, pages))
    kv_append_reference(*token, *expected.layer(), q)
    require_equal("value_pages", written.value_pages.nan_to_num(), expected.value_pages.nan_to_num())
    torch.testing.assert_close(written.key_pages, expected.key_pages, rtol=2**-6, atol=2**-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bf16_errs_at_most_twice_as_much_as_the_reference(kernel, stored):
    require_accurate(KERNELS[kernel], *make_inputs([(stored, True)], **FULL, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "page_size"), CUDA_SIZES)
def test_cuda_sizes(kv_heads, group, page_size):
    sizes = {"kv_heads": kv_heads, "group": group, "page_size": page_size, "head_dim": 128}
    token, pages = make_inputs(**sizes, dtype=torch.bfloat16, device="cuda")
    out, written = require_accurate(KERNELS["cuda"], token, pages)
    assert (out[~pages.active] == 0).all()
    require_stored(written, token, pages)
    for parts in (1, 2, 4, 8, 16):
        shared, _ = attend(KERNELS["cuda"], token, pages, parts=parts)
        require_equal(f"out of {parts} parts", shared, out)


@pytest.mark.parametrize(
    ("sizes", "dtype", "taken"),
    [
        ({}, torch.bfloat16, True),
        ({}, torch.float32, False),
        ({"head_dim": 64}, torch.bfloat16, False),
        ({"group": 5}, torch.bfloat16, False),
        ({"page_size": 8}, torch.bfloat16, False),
        ({"page_size": 48}, torch.bfloat16, False),
    ],
)
def test_what_cuda_takes(sizes, dtype, taken):
    token, pages = make_inputs(ROWS[-1:], **FULL | {"kv_heads": 1} | sizes, dtype=dtype)
    out = torch.empty(1, query_width(token, pages))
    assert cuda_kernel.takes(token[0], pages.layer()[0], out) == taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("triton", torch.float32), ("triton", torch.bfloat16), ("cuda", torch.bfloat16)]
)
def test_rows_do_not_depend_on_the_batch(kernel, dtype):
    run = KERNELS[kernel]
    token, pages = make_inputs([(37 * n % 3000, True) for n in range(128)], **FULL, dtype=dtype, device="cuda")
    together, written = attend(run, token, pages)
    for batch in (1, 2, 3, 7, 16, 33, 64, 128):
        index = torch.randperm(128)[:batch].tolist()
        part = (token[0][index], *token[1:])
        out, part_written = attend(run, part, pages.take(index))
        require_equal(f"out of {batch} rows", out, together[index])
    for name in ("key_pages", "value_pages"):
        require_equal(name, getattr(part_written, name).nan_to_num(), getattr(written, name).nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_stores_what_kv_append_stores(kernel):
    token, pages = make_inputs([(37 * n % 3000, True) for n in range(64)], **FULL, dtype=torch.bfloat16, device="cuda")
    _, written = attend(KERNELS[kernel], token, pages)
    kv_append(*token, *pages.layer(), torch.empty(64, 32 * 128, dtype=torch.bfloat16, device="cuda"))
    require_equal("value_pages", written.value_pages.nan_to_num(), pages.value_pages.nan_to_num())
    # The norms may sum in another order, so that a value near the middle of two rounds either way.
    torch.testing.assert_close(written.key_pages, pages.key_pages, rtol=2**-7, atol=2**-7, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("kernel", [*KERNELS, "settled"])
def test_replays_equal_eager(kernel, dependent, monkeypatch):
    """The programs of a row arrive in any order, many times over, with one scratch."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    # What a launch writes besides `out` is a token that none of the next reads from its page.
    run = KERNELS.get(kernel) or partial(KERNELS["cuda"], settled=True)
    rows = [(61 * n % 2500, True) for n in range(64)]
    for batch in (64, 5):
        token, pages = make_inputs(rows[:batch], **FULL, dtype=torch.bfloat16, device="cuda")
        expected, _ = attend(run, token, pages)
        scratch, outs = make_scratch(token, pages), [torch.empty_like(expected) for _ in range(4)]
        chain = partial(run_chain, run, token, pages, outs, scratch)
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


def run_chain(run, token, pages, outs, scratch):
    for out in outs:
        run(*token, *pages.layer(), out, scratch.partials, scratch.arrived)


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
def test_the_op_takes_the_cuda_kernel(settled):
    token, pages = make_inputs([(300, True)], **FULL, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, query_width(token, pages), dtype=torch.bfloat16, device="cuda")
    paged_attention(*token, *pages.layer(), out, make_scratch(token, pages), settled=settled)
    expected, _ = attend(KERNELS["cuda"], token, pages)
    require_equal("out", out, expected)

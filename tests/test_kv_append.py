"""kv_append against torch's norm and complex products in float64, and what it must leave alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from moss_kernels.kv_append import kv_append, triton_kernel
from moss_kernels.testing.backbone import PagedInputs
from moss_kernels.testing.compare import require_equal
from moss_runtime.model.backbone import rope_tables

EPS = 1e-6
LONGEST = 300
# (tokens held, active): first and last place of a page, a paused row in the middle, padding.
ROWS = [(0, True), (15, True), (None, False), (16, True), (40, False), (255, True), (None, False), (30, True)]
GROUP, KV_HEADS = 3, 2
NAMES = [argument.name for argument in torch.ops.moss.kv_append.default._schema.arguments]


def make_arguments(
    rows=ROWS, *, kv_heads=KV_HEADS, group=GROUP, head_dim=16, page_size=16, dtype=torch.float32, device="cpu"
):
    """Arguments by name. Inputs of inactive rows are NaN."""
    pages = PagedInputs.make(
        rows, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    qkv = torch.randn(len(rows), (group + 2) * kv_heads * head_dim, device=device) * 2
    qkv[~pages.active] = torch.nan
    norms = (1 + torch.randn(2, head_dim, device=device) / 4).to(dtype)
    tables = rope_tables(torch.arange(LONGEST, device=device)[None], head_dim, 1e4, dtype)
    cos_sin = torch.cat(tables, -1)[0, 0]
    q_out = torch.full((len(rows), group * kv_heads * head_dim), 7.0, dtype=dtype, device=device)
    return dict(zip(NAMES, (qkv.to(dtype), *norms, EPS, cos_sin, *pages.layer(), q_out), strict=True))


def eager(arguments, dtype):
    """q, k, v of every row, in a dtype: [B, heads, D] each."""
    kv_heads, head_dim = arguments["key_pages"].shape[1], arguments["key_pages"].shape[3]
    heads = arguments["qkv"].to(dtype).unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    position = arguments["positions"][arguments["row_map"].long()].long()
    turn = torch.complex(*arguments["cos_sin"].to(dtype)[position][:, None].chunk(2, -1))
    rotated = []
    for x, name in ((q, "q_norm"), (k, "k_norm")):
        normed = F.rms_norm(x, [head_dim], arguments[name].to(dtype), EPS)
        turned = torch.complex(*normed.chunk(2, -1)) * turn
        rotated.append(torch.cat((turned.real, turned.imag), -1))
    return *rotated, v


def require_appended(run, arguments, *, tolerance):
    """The new tokens are stored and nothing else has changed; the largest error of q and k is within the tolerance."""
    before = {name: x.clone() for name, x in arguments.items() if torch.is_tensor(x)}
    q, k, v = eager(arguments, torch.float64)
    run(*arguments.values())
    page_size, active = arguments["key_pages"].shape[2], arguments["active"]
    expected_pages = {name: before[name].double() for name in ("key_pages", "value_pages")}
    for batch_row in active.nonzero()[:, 0].tolist():
        row = int(arguments["row_map"][batch_row])
        position = int(arguments["positions"][row])
        page = int(arguments["page_table"][row, position // page_size])
        expected_pages["key_pages"][page, :, position % page_size] = k[batch_row]
        expected_pages["value_pages"][page, :, position % page_size] = v[batch_row]
    for name, expected in expected_pages.items():
        torch.testing.assert_close(arguments[name].double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    q_out = arguments["q_out"]
    torch.testing.assert_close(q_out[active].double(), q[active].flatten(1), rtol=tolerance, atol=tolerance)
    assert (q_out[~active] == 7).all()
    for name, x in before.items():
        if name not in ("key_pages", "value_pages", "q_out"):
            assert torch.equal(x.nan_to_num(), arguments[name].nan_to_num()), name


SIZES = [(GROUP, KV_HEADS, 16, 16), (4, 1, 32, 64), (1, 2, 12, 16)]


@pytest.mark.parametrize(("group", "kv_heads", "head_dim", "page_size"), SIZES)
def test_op_follows_float64(group, kv_heads, head_dim, page_size):
    arguments = make_arguments(group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    require_appended(torch.ops.moss.kv_append, arguments, tolerance=2e-6)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("group", "kv_heads", "head_dim", "page_size"), SIZES)
def test_triton_in_the_interpreter(group, kv_heads, head_dim, page_size):
    arguments = make_arguments(group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    require_appended(triton_kernel.kv_append_triton, arguments, tolerance=2e-6)


@pytest.mark.parametrize("run", [torch.ops.moss.kv_append, kv_append])
def test_all_padding_changes_nothing(run):
    arguments = make_arguments([(None, False), (3, False), (None, False)])
    require_appended(run, arguments, tolerance=0)


def test_an_inactive_row_may_name_the_pool_row_of_an_active_one():
    arguments = make_arguments([(0, True), (None, False)])
    arguments["row_map"][1] = arguments["row_map"][0]
    require_appended(torch.ops.moss.kv_append, arguments, tolerance=2e-6)


def test_opcheck():
    arguments = [x.nan_to_num() if torch.is_tensor(x) else x for x in make_arguments().values()]
    torch.library.opcheck(torch.ops.moss.kv_append.default, tuple(arguments))


def _wrong(name, error, message, value):
    return pytest.param(name, error, message, value, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "error", "message", "value"),
    [
        _wrong("qkv", TypeError, "float32 or bfloat16, got float16", lambda x: x.half()),
        _wrong("qkv", ValueError, r"\(Hq\+2\*H\)\*D = 160, got \(8, 159\)", lambda x: x[:, 1:].contiguous()),
        _wrong("qkv", ValueError, "contiguous", lambda x: x.T.contiguous().T),
        _wrong("q_norm", ValueError, "D = 16", lambda x: x[:8]),
        _wrong("k_norm", TypeError, "float32, got bfloat16", lambda x: x.bfloat16()),
        _wrong("cos_sin", ValueError, r"\[L, D\]", lambda x: x[:, :8].contiguous()),
        _wrong("value_pages", ValueError, "Z = 16", lambda x: x[:, :, :8].contiguous()),
        _wrong("page_table", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("positions", ValueError, r"S\+1 = 7", lambda x: x[1:]),
        _wrong("row_map", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("active", TypeError, "bool, got int32", lambda x: x.int()),
        _wrong("active", ValueError, "B = 8", lambda x: x[1:]),
        _wrong("q_out", ValueError, r"multiple of H\*D = 32 columns, got 95", lambda x: x[:, 1:].contiguous()),
    ],
)
def test_wrong_argument_is_named(name, error, message, value):
    arguments = make_arguments()
    with pytest.raises(error, match=rf"`kv_append`: `{name}` must .*{message}"):
        kv_append(**arguments | {name: value(arguments[name])})


FULL = {"group": 4, "kv_heads": 8, "head_dim": 128, "page_size": 64}


@pytest.mark.gpu
def test_bf16_on_the_gpu():
    # Values of up to 8 after the norm: three roundings, one of them after a sum.
    arguments = make_arguments(**FULL, dtype=torch.bfloat16, device="cuda")
    require_appended(triton_kernel.kv_append_triton, arguments, tolerance=8 * 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch(dtype):
    arguments = make_arguments([(2 * n, True) for n in range(128)], **FULL, dtype=dtype, device="cuda")
    alone = {name: x.clone() if torch.is_tensor(x) else x for name, x in arguments.items()}
    triton_kernel.kv_append_triton(*arguments.values())
    for start, end in ((0, 1), (1, 3), (3, 36), (36, 128)):
        rows = {name: alone[name][start:end].clone() for name in ("qkv", "row_map", "active", "q_out")}
        triton_kernel.kv_append_triton(*(alone | rows).values())
        require_equal("q_out", rows["q_out"], arguments["q_out"][start:end])
    for name in ("key_pages", "value_pages"):
        require_equal(name, alone[name].nan_to_num(), arguments[name].nan_to_num())


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_elements():
    arguments = make_arguments([(5, True)], **FULL, dtype=torch.bfloat16, device="cuda")
    count = math.ceil(2**31 / arguments["key_pages"][0].numel()) + 2
    large = torch.zeros(2, count, *arguments["key_pages"].shape[1:], dtype=torch.bfloat16, device="cuda")
    far = {"key_pages": large[0], "value_pages": large[1]}
    far["page_table"] = torch.full_like(arguments["page_table"], count - 2)
    far["q_out"] = arguments["q_out"].clone()
    triton_kernel.kv_append_triton(*arguments.values())
    triton_kernel.kv_append_triton(*(arguments | far).values())
    page = int(arguments["page_table"][0, 0])
    require_equal("key", far["key_pages"][count - 2, :, 5], arguments["key_pages"][page, :, 5])
    require_equal("value", far["value_pages"][count - 2, :, 5], arguments["value_pages"][page, :, 5])
    assert not large[:, : count - 2].any()

"""ring_attention against float64, in every implementation; what must not matter in its inputs is NaN."""

import ctypes
import dataclasses
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import triton

from moss_kernels import _library, ring_attention
from moss_kernels.ring_attention import (
    cuda_kernel,
    ring_attention_reference,
    takes_slices,
    triton_kernel,
    wants_rotated,
)
from moss_kernels.ring_kv_write import ring_kv_write_reference
from moss_kernels.testing.compare import implementation, require_equal
from moss_kernels.testing.ring import CODEC_STAGES, RING_CASES, RingInputs

ROOT = Path(__file__).parents[1]
NULL = 5
# (slot, valid tokens, offset): a full ragged batch with a young, an idle and a padding row, far and near offsets.
ROWS = [(2, 40, 123_456), (0, 17, 3), (4, 1, 70), (3, 0, 9), (NULL, 0, 0), (1, 33, 1_000_003)]
SHAPE = {"slots": NULL, "tokens": 40, "heads": 2, "head_dim": 16}
NAMES = [argument.name for argument in torch.ops.moss.ring_attention.default._schema.arguments]


def make_inputs(rows=ROWS, *, capacity=70, window=70, in_ring=False, **changes) -> RingInputs:
    inputs = RingInputs.make(rows, capacity=capacity, window=window, **SHAPE | changes)
    if in_ring:
        ring_kv_write_reference(*inputs.step)
    return inputs


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error relative to the largest value; infinite if any output is NaN."""
    difference = (out.cpu().double() - exact).abs().max() / exact.abs().max()
    return difference.nan_to_num(torch.inf).item()


def require_exact(attention, inputs: RingInputs, *, in_ring: bool, device="cpu") -> None:
    exact = inputs.exact_attention(chunk_in_ring=in_ring)
    out = inputs.to(device).attend(attention, chunk_in_ring=in_ring)
    assert error(out, exact) < 5e-6  # scores of up to 20: half an ulp is 1e-6, and so is the error of a weight
    beyond = torch.arange(out.shape[1]) >= inputs.valid[:, None]
    assert (out.cpu()[beyond] == 0).all()


SIZES = [(70, 70), (70, 31), (13, 13), (1, 1)]  # capacity, window: many tiles, head-room, oversized chunks


@pytest.mark.parametrize("in_ring", [False, True])
@pytest.mark.parametrize(("capacity", "window"), SIZES)
def test_op_follows_float64(capacity, window, in_ring):
    require_exact(ring_attention, make_inputs(capacity=capacity, window=window, in_ring=in_ring), in_ring=in_ring)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("in_ring", [False, True])
@pytest.mark.parametrize(("capacity", "window"), SIZES)
def test_triton_in_the_interpreter(capacity, window, in_ring):
    inputs = make_inputs(capacity=capacity, window=window, in_ring=in_ring)
    require_exact(triton_kernel.ring_attention_triton, inputs, in_ring=in_ring)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tokens", [3, 32, 40, 150])
def test_tiles_of_bf16_in_the_interpreter(monkeypatch, tokens):
    """The tile sizes that bfloat16 uses, on float32: the interpreter has no bfloat16 products."""
    config = triton_kernel._config
    monkeypatch.setattr(triton_kernel, "_config", lambda dtype, tokens: config(torch.bfloat16, tokens))
    rows = [(slot, min(valid, tokens), offset) for slot, valid, offset in ROWS] + [(3, tokens, 200)]
    for in_ring in (False, True):
        inputs = make_inputs(rows, capacity=140, window=133, tokens=tokens, in_ring=in_ring)
        require_exact(triton_kernel.ring_attention_triton, inputs, in_ring=in_ring)


@pytest.mark.gpu
@pytest.mark.parametrize("in_ring", [False, True])
@pytest.mark.parametrize(("capacity", "window"), [*SIZES, (400, 400)])
@pytest.mark.parametrize("head_dim", triton_kernel.HEAD_DIMS)
def test_triton_on_the_gpu(head_dim, capacity, window, in_ring):
    rows = [(slot, 5 * valid, offset) for slot, valid, offset in ROWS]
    inputs = make_inputs(rows, capacity=capacity, window=window, tokens=200, head_dim=head_dim, in_ring=in_ring)
    require_exact(triton_kernel.ring_attention_triton, inputs, in_ring=in_ring, device="cuda")


def bf16_shapes():
    """Every stage of the codec with 1, 2, 3 and 15 frames."""
    return [(rate * frames, heads, window) for rate, heads, window in CODEC_STAGES for frames in (1, 2, 3, 15)]


def require_same_rotated(inputs: RingInputs, attended: torch.Tensor) -> None:
    """The op gives `attended` and the rings of `ring_kv_write_reference`, bit by bit, for q and k rotated before it."""
    expected, turned = inputs.to("cpu"), inputs.to("cpu").rotated().to(inputs.qkv.device)
    ring_kv_write_reference(*expected.step)
    require_equal("out of settled inputs", turned.attend(partial(ring_attention, settled=True)), attended)
    require_equal("out", turned.attend(partial(ring_attention, write=True)), attended)
    for name in ("ring_k", "ring_v"):
        require_equal(name, getattr(turned, name).nan_to_num(), getattr(expected, name).nan_to_num())


def require_write_after(inputs: RingInputs, attended: torch.Tensor, device="cpu") -> None:
    """The op with `write` gives `attended`, and the rings that `ring_kv_write_reference` gives."""
    expected, inputs = inputs.to("cpu").whole(), inputs.to(device)
    ring_kv_write_reference(*expected.step)
    require_equal("out of settled inputs", inputs.attend(partial(ring_attention, settled=True)), attended)
    require_equal("out", inputs.attend(partial(ring_attention, write=True)), attended)
    for name in ("ring_k", "ring_v"):
        require_equal(name, getattr(inputs, name).nan_to_num(), getattr(expected, name).nan_to_num())


@pytest.mark.parametrize("capacity", [70, 13])
def test_write_follows_the_attention(capacity):
    inputs = make_inputs(capacity=capacity, window=capacity)
    require_write_after(inputs, inputs.attend(ring_attention))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slices", [1, 3])
def test_slices_are_added_and_rounded_first(slices, dtype):
    inputs = make_inputs(dtype=dtype).sliced(slices)
    require_write_after(inputs, inputs.whole().attend(ring_attention))


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [125, 250, 1])
@pytest.mark.parametrize("slices", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [67, 88, 89, 176, 177, 220])
def test_slices_added_on_the_gpu(moss_library, heads, slices, capacity):
    """From the fewest to the most heads, with either depth of copies: the bits of slices that were added before."""
    rows = [(slot, min(valid, 1), offset) for slot, valid, offset in ROWS]
    inputs = make_inputs(
        rows, capacity=capacity, window=capacity, tokens=1, heads=heads, head_dim=64, dtype=torch.bfloat16
    )
    inputs = inputs.sliced(slices)
    assert cuda_kernel.takes(inputs.qkv, inputs.cos_sin, inputs.ring_k, capacity, False)
    require_write_after(inputs, inputs.whole().to("cuda").attend(ring_attention), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "tokens", "slices"), [(67, 1, 5), (66, 1, 2), (67, 2, 2), (221, 1, 2), (2, 40, 2)])
def test_slices_that_no_kernel_adds(moss_library, heads, tokens, slices):
    inputs = make_inputs(tokens=max(tokens, 40), heads=heads, head_dim=64, dtype=torch.bfloat16)
    inputs = dataclasses.replace(
        inputs, qkv=inputs.qkv[:, :tokens].contiguous(), cos_sin=inputs.cos_sin[:, :tokens].contiguous(),
        valid=inputs.valid.clamp(max=tokens),
    ).sliced(slices)  # fmt: skip
    assert not cuda_kernel.takes(inputs.qkv, inputs.cos_sin, inputs.ring_k, inputs.window, False)
    require_write_after(inputs, inputs.whole().to("cuda").attend(ring_attention), "cuda")


@pytest.mark.parametrize(
    ("batch", "tokens", "slices", "taken"),
    [(34, 1, 4, True), (110, 1, 1, True), (33, 1, 4, False), (111, 1, 4, False), (64, 2, 4, False), (64, 1, 5, False)],
)
def test_which_slices_are_taken(batch, tokens, slices, taken):
    qkv = torch.empty(slices, batch, tokens, 3 * 12 * 64, device="meta")
    cos_sin = torch.empty(batch, tokens, 32, 2, device="meta")
    ring = torch.empty(batch + 1, 12, 250, 64, dtype=torch.bfloat16, device="meta")
    assert cuda_kernel.takes(qkv, cos_sin, ring, 250, False) == taken
    assert cuda_kernel.takes_slices(batch, tokens, ring) == (taken or slices > 4)
    assert not cuda_kernel.takes(qkv, None, ring, 250, False)
    assert not takes_slices(batch, tokens, ring)  # not on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [(2, tokens) for tokens in (1, 2, 15, 16, 17, 30, 32, 40, 256, 257, 480)]
    + [(heads, tokens) for heads in (40, 80) for tokens in (1, 15, 17, 32, 40)]
    + [(60, 15), (70, 1), (80, 2), (100, 1), (100, 16), (140, 1), (140, 2), (140, 3), (140, 16)]
    + [(190, 1), (190, 2), (190, 3), (191, 16), (231, 3), (230, 4), (230, 5)],
)
@pytest.mark.parametrize(("capacity", "window"), [*SIZES, (125, 125), (400, 400), (33, 33), (417, 417), (420, 418)])
def test_few_rows_and_short_chunks_on_the_gpu(moss_library, heads, tokens, capacity, window):
    """In CUDA C++ attention and write are one kernel, elsewhere two; the same bits with and without the write. How many
    heads there are in all rows decides which kernel it is."""
    rows = [(slot, min(valid * max(1, tokens // 40), tokens), offset) for slot, valid, offset in ROWS if slot != 3]
    inputs = make_inputs(
        [*rows, (3, tokens, 200)], capacity=capacity, window=window, tokens=tokens, heads=heads, head_dim=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    exact = inputs.exact_attention()
    rounding = error(inputs.attend(ring_attention_reference), exact)
    attended = inputs.to("cuda").attend(ring_attention)
    assert error(attended, exact) <= 2 * rounding
    require_write_after(inputs, attended, "cuda")


def inputs_with_scores(scores: torch.Tensor, tokens: int, heads: int) -> RingInputs:
    """A row whose keys in the ring and in the chunk have nearly these scores in log2 [keys] with any query."""
    held = len(scores) - tokens
    sizes = {"slots": 1, "tokens": tokens, "heads": heads, "head_dim": 64, "capacity": held, "window": held}
    inputs = make_inputs([(0, tokens, held)], **sizes, dtype=torch.bfloat16)
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1))
    direction *= (64**0.5 * math.log(2)) ** 0.5 / direction.norm()
    keys = (scores[:, None] * direction).bfloat16()
    q, k, _ = inputs.qkv.unflatten(-1, (3, heads, 64)).unbind(2)
    q.copy_(direction), k.copy_(keys[held:, None]), inputs.ring_k[0].copy_(keys[:held])
    inputs.cos_sin.copy_(torch.tensor([1.0, 0.0]))
    return inputs


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [(-90, 90), (90, -90), (-90, -60), (-60, -90), (0, 0), (-500, -400), (300, 500)])
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [(2, 200), (80, 200), (500, 16), (600, 16), (600, 32), (1100, 9), (500, 1), (600, 2), (1100, 2), (1400, 4)],
)
def test_scores_of_any_size_on_the_gpu(moss_library, heads, tokens, scores):
    """Rising, falling, of either sign: weights must not overflow or all vanish. They are rounded, as results are."""
    inputs = inputs_with_scores(torch.linspace(*scores, 400), tokens, heads)
    exact = inputs.exact_attention()
    rounding = error(inputs.attend(ring_attention_reference), exact)
    for chunk in (inputs, inputs.rotated()):
        assert error(chunk.to("cuda").attend(ring_attention), exact) <= 2.2 * rounding


@pytest.mark.parametrize(
    ("batch", "tokens", "taken", "wanted"),
    [(5, 33, True, False), (33, 32, True, False), (33, 33, False, False), (33, 48, False, False), (33, 49, False, True),
     (1, 256, True, False), (2, 256, False, True)],
)  # fmt: skip
def test_which_chunks_are_taken_and_which_had_better_be_rotated(batch, tokens, taken, wanted):
    """Short ones and those of few rows, which clusters share, are taken as they are; those rotated before always."""
    qkv = torch.empty(batch, tokens, 3 * 12 * 64, dtype=torch.bfloat16, device="meta")
    cos_sin = torch.empty(batch, tokens, 32, 2, device="meta")
    ring = torch.empty(batch + 1, 12, 400, 64, dtype=torch.bfloat16, device="meta")
    assert cuda_kernel.takes(qkv, cos_sin, ring, 400, False) == taken
    assert cuda_kernel.wants_rotated(batch, tokens, ring, 400) == wanted
    assert cuda_kernel.takes(qkv, None, ring, 400, False)


def test_nothing_is_rotated_for_the_cpu():
    assert not wants_rotated(64, 480, torch.empty(65, 12, 400, 64, dtype=torch.bfloat16), 400)


@pytest.mark.parametrize("capacity", [70, 13])
def test_a_chunk_that_is_rotated_already(capacity):
    inputs = make_inputs(capacity=capacity, window=capacity)
    require_same_rotated(inputs, inputs.attend(ring_attention_reference))


@pytest.mark.gpu
@pytest.mark.parametrize(("capacity", "window"), [(400, 400), (70, 31), (13, 13)])
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [(40, 480), (44, 257), (81, 120), (133, 66), (66, 64), (20, 49), (1, 1), (2, 17), (3, 40), (1, 480)],
)
def test_chunks_that_are_rotated_already_on_the_gpu(moss_library, heads, tokens, capacity, window):
    """Also so many that a block takes several tiles of queries or several heads, the last of them not all it could, and
    one after the other. Queries, keys and values that do not count are NaN."""
    rows = [(slot, valid * tokens // 40, offset) for slot, valid, offset in ROWS]
    inputs = make_inputs(
        rows, capacity=capacity, window=window, tokens=tokens, heads=heads, head_dim=64, dtype=torch.bfloat16
    ).to("cuda")
    floats = {name: getattr(inputs, name).float() for name in ("qkv", "ring_k", "ring_v")}
    exact = dataclasses.replace(inputs, **floats).attend(ring_attention_reference).cpu().double()
    rounding = error(inputs.attend(ring_attention_reference), exact)
    attended = inputs.rotated().attend(ring_attention)
    assert error(attended, exact) <= 2 * rounding
    assert not attended[torch.arange(tokens, device="cuda") >= inputs.valid[:, None]].any()
    require_same_rotated(inputs, attended)


def test_products_of_long_chunks_follow_each_other(moss_library):
    """In machine code, since the assembler waits after each one where it runs short of registers."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(moss_library)]
    functions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Function : ")
    (code,) = (code for code in functions if "ring_attention_wide_kernel" in code.split("\n", 1)[0])
    products = re.findall(r"HGMMA.*", code)
    assert 0 < sum("gsb0" in product for product in products) < len(products) / 2  # those that are waited for


@pytest.mark.gpu
@pytest.mark.parametrize("in_ring", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "window"), bf16_shapes())
def test_bf16_errs_at_most_twice_as_much_as_the_reference(tokens, heads, window, in_ring):
    rows = [(2, tokens, 123_456), (0, (tokens + 1) // 2, 3), (4, 1, window - 1), (3, 0, 9), (NULL, 0, 0)]
    inputs = make_inputs(
        rows, capacity=window, window=window, tokens=tokens, heads=heads, head_dim=64, in_ring=in_ring,
        dtype=torch.bfloat16,
    )  # fmt: skip
    exact = inputs.exact_attention(chunk_in_ring=in_ring)
    rounding = error(inputs.attend(ring_attention_reference, chunk_in_ring=in_ring), exact)
    out = inputs.to("cuda").attend(triton_kernel.ring_attention_triton, chunk_in_ring=in_ring)
    assert error(out, exact) <= 2 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in RING_CASES if case.batch == 64], ids=lambda case: case.name)
def test_rows_do_not_depend_on_the_batch(case, dtype):
    """Of the Triton kernel; the op may take another one for few rows."""
    inputs = case.inputs("cuda", dtype)
    together = inputs.attend(triton_kernel.ring_attention_triton)
    for rows in (slice(0, 1), slice(17, 24), slice(63, 64)):
        part = {name: getattr(inputs, name)[rows] for name in ("qkv", "cos_sin", "slots", "valid")}
        alone = dataclasses.replace(inputs, **part).attend(triton_kernel.ring_attention_triton)
        require_equal("out", alone, together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "heads"), [(1, 20), (2, 200), (4, 450), (20, 12), (60, 12), (480, 2), (480, 30), (66, 200)]
)
def test_a_row_keeps_its_bits_whatever_the_others_are(tokens, heads):
    """Of the kernels in CUDA C++, at one number of rows."""
    rows = [(2, tokens, 123_457), (0, tokens, 7), (4, tokens - 1, 400)]
    sizes = {"tokens": tokens, "heads": heads, "head_dim": 64, "capacity": 400, "window": 400}
    first = make_inputs(rows, **sizes, dtype=torch.bfloat16).to("cuda")
    other = make_inputs([rows[0], (3, tokens // 2, 99), (NULL, 0, 0)], **sizes, dtype=torch.bfloat16, seed=1).to("cuda")
    other.qkv[0], other.cos_sin[0] = first.qkv[0], first.cos_sin[0]
    other.ring_k[2], other.ring_v[2] = first.ring_k[2], first.ring_v[2]
    if not cuda_kernel.takes(first.qkv, first.cos_sin, first.ring_k, first.window, False):
        first, other = first.rotated(), other.rotated()
    expected = first.attend(cuda_kernel.ring_attention_cuda)[0]
    require_equal("out", other.attend(cuda_kernel.ring_attention_cuda)[0], expected)


@pytest.mark.gpu
def test_rings_beyond_two_to_the_31_elements():
    slots, heads, capacity, head_dim = 7100, 12, 400, 64
    last = make_inputs(
        [(0, 3, 777)], slots=1, tokens=3, heads=heads, head_dim=head_dim, capacity=capacity, window=capacity,
        dtype=torch.bfloat16,
    )  # fmt: skip
    small = last.to("cuda")
    ring_k, ring_v = torch.zeros(2, slots + 1, heads, capacity, head_dim, dtype=torch.bfloat16, device="cuda")
    assert ring_k.numel() > 2**31
    ring_k[slots - 1], ring_v[slots - 1] = small.ring_k[0], small.ring_v[0]
    offset = torch.zeros(slots + 1, dtype=torch.int64, device="cuda")
    offset[slots - 1] = 777
    large = dataclasses.replace(
        small, ring_k=ring_k, ring_v=ring_v, offset=offset, slots=torch.full_like(small.slots, slots - 1)
    )
    expected = small.attend(triton_kernel.ring_attention_triton)
    require_equal("out", large.attend(triton_kernel.ring_attention_triton), expected)
    for name in ("triton", "cuda"):
        write = implementation("ring_kv_write", name)
        write(*small.step)
        write(*large.step)
        require_equal("ring_k", large.ring_k[slots - 1], small.ring_k[0])
        assert not large.ring_k[: slots - 1].any()


@pytest.mark.parametrize("in_ring", [False, True])
def test_all_padding(in_ring):
    inputs = make_inputs([(NULL, 0, 0), (2, 0, 50), (NULL, 0, 0)], in_ring=in_ring)
    assert (inputs.attend(ring_attention, chunk_in_ring=in_ring) == 0).all()


@pytest.mark.interpreter
def test_all_padding_in_the_interpreter():
    inputs = make_inputs([(NULL, 0, 0), (2, 0, 50), (NULL, 0, 0)])
    assert (inputs.attend(triton_kernel.ring_attention_triton) == 0).all()


def op_arguments(device="cpu", *, write=False, rotated=False, slices=0) -> dict[str, object]:
    inputs = make_inputs().to(device)
    inputs = inputs.sliced(slices) if slices else inputs
    floats = ("qkv", "cos_sin", "ring_k", "ring_v") if write else ("qkv", "cos_sin")
    inputs = dataclasses.replace(inputs, **{name: getattr(inputs, name).nan_to_num() for name in floats})
    inputs = inputs.rotated() if rotated else inputs
    out = torch.zeros(len(ROWS), SHAPE["tokens"], SHAPE["heads"] * SHAPE["head_dim"], device=device)
    return dict(zip(NAMES, (*inputs.step, inputs.window, False, out, write, False), strict=True))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, write, rotated):
    arguments = op_arguments(device, write=write, rotated=rotated)
    torch.library.opcheck(torch.ops.moss.ring_attention.default, tuple(arguments.values()))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_slices(device):
    arguments = op_arguments(device, write=True, slices=2)
    torch.library.opcheck(torch.ops.moss.ring_attention.default, tuple(arguments.values()))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_into_a_full_graph(device):
    def step(arguments, out):
        ring_attention(**arguments | {"qkv": arguments["qkv"] * 2, "out": out})
        return out + 1

    arguments = op_arguments(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    require_equal("result", compiled(arguments, arguments["out"].clone()), step(arguments, arguments["out"]))


def _wrong(name, error, message, value):
    return pytest.param(name, error, message, value, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "error", "message", "value"),
    [
        _wrong("qkv", TypeError, "float32 or bfloat16, got float16", lambda x: x.half()),
        _wrong("qkv", ValueError, r"\[B, T, 3\*H\*D\] with 3\*H\*D = 96", lambda x: x[..., :64].contiguous()),
        _wrong("qkv", ValueError, "contiguous", lambda x: x.mT.contiguous().mT),
        _wrong("qkv", TypeError, "float32, got bfloat16", lambda x: x[None].bfloat16()),
        _wrong("qkv", ValueError, r"\[P, B, T, 3\*H\*D\] with 3\*H\*D = 96", lambda x: x[None, ..., :64].contiguous()),
        _wrong("qkv", ValueError, "slices, got", lambda x: x.new_empty(0, *x.shape)),
        _wrong("cos_sin", TypeError, "float32", lambda x: x.bfloat16()),
        _wrong("cos_sin", ValueError, r"D/2 = 8", lambda x: x[:, :, :4].contiguous()),
        _wrong("ring_k", ValueError, "even head_dim, got 15", lambda x: x.new_zeros(6, 2, 70, 15)),
        _wrong("ring_v", TypeError, "float32, got bfloat16", lambda x: x.bfloat16()),
        _wrong("ring_v", ValueError, "C = 70", lambda x: x[:, :, 1:].contiguous()),
        _wrong("slots", TypeError, "int32, got int64", lambda x: x.long()),
        _wrong("valid", ValueError, "B = 6", lambda x: x[1:]),
        _wrong("offset", TypeError, "int64, got int32", lambda x: x.int()),
        _wrong("offset", ValueError, r"S\+1 = 6", lambda x: x[1:]),
        _wrong("window", ValueError, r"1 \.\. C = 70, got 0", lambda x: 0),
        _wrong("window", ValueError, r"1 \.\. C = 70, got 71", lambda x: 71),
        _wrong("out", ValueError, r"\[B, T, H\*D\]", lambda x: x[:, 1:].contiguous()),
        _wrong("out", TypeError, "float32, got bfloat16", lambda x: x.bfloat16()),
        _wrong("write", ValueError, "False for a chunk that is in the ring already", lambda x: True),
    ],
)
def test_wrong_argument_is_named(name, error, message, value):
    arguments = op_arguments()
    changed = {name: value(arguments[name])}
    if name == "ring_k" and "even" in message:
        changed["ring_v"] = changed["ring_k"]
    if name == "write":
        changed["chunk_in_ring"] = True
    with pytest.raises(error, match=rf"`ring_attention`: `{name}` must .*{message}"):
        ring_attention(**arguments | changed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "`struct_size` must be .*, got 8"),
        ("tokens", -1, "`tokens` must be >= 0, got -1"),
        ("tokens", 513, "`cos_sin` must be null for 513 tokens of 1 rows"),
        ("head_dim", 32, r"`head_dim` must be 64 \.\. 64, got 32"),
        ("qkv_slices", 2, "`qkv_slices` must be 0 for 2 tokens of 1 rows, got 2"),
        ("window", 5, r"`window` must be 1 \.\. 4, got 5"),
        ("offset", None, "`offset` must not be null"),
        ("out", 0x1008, "`out` must be aligned to 16 bytes, got 0x1008"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    names = ("qkv", "cos_sin", "ring_k", "ring_v", "slots", "valid", "offset", "out")
    sizes = {"batch": 1, "tokens": 2, "heads": 2, "head_dim": 64, "capacity": 4, "window": 4, "ring_slots": 2}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.RingAttentionParams), "abi_version": _library.ABI_VERSION}
    params = cuda_kernel.RingAttentionParams(**header | sizes | dict.fromkeys(names, 0x1000) | {field: value})
    with pytest.raises(ValueError, match=f"`ring_attention`: {message}"):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


def test_triton_names_the_head_dims_it_takes():
    inputs = make_inputs(head_dim=20)
    with pytest.raises(NotImplementedError, match="head_dim of 16, 32, 64, got 20"):
        inputs.attend(triton_kernel.ring_attention_triton)


def test_the_benchmark_checks_its_variants_without_a_gpu():
    command = [sys.executable, "-m", "bench.bench_ring_attention", "--smoke"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 3 * len(RING_CASES)
    assert all(line.endswith(" ok") for line in lines)

"""local_rope_attention: interleaved RoPE, only the frame's own past, and the table form, in every implementation."""

import ctypes
import dataclasses
import importlib
import os

import pytest
import torch

from moss_kernels import _library, local_rope_attention, local_rope_attention_lookup
from moss_kernels.local_rope_attention import (
    local_rope_attention_lookup_reference,
    local_rope_attention_reference,
    local_rope_tables,
    rotate_pairs,
)
from moss_kernels.local_rope_attention.cuda_kernel import LocalRopeAttentionParams
from moss_kernels.testing.compare import require_equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 19
SHAPES = [(3, 2, 16, 4), (2, 3, 80, 12), (2, 2, 128, 17), (2, 1, 20, 32)]  # batch, heads, head_dim, positions
UNWRITTEN = torch.nan
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


@dataclasses.dataclass
class Frame:
    """The inputs of one frame in both forms. Queries and keys have gain 2, so that the softmax is far from flat."""

    qkv: torch.Tensor  # [P, B, 3*heads*D]
    codes: torch.Tensor  # [B, Q]
    table: torch.Tensor
    audio_embeddings: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int

    @classmethod
    def make(cls, batch: int, heads: int, head_dim: int, positions: int, dtype: torch.dtype) -> "Frame":
        width = heads * head_dim
        gain = torch.cat((torch.full((2 * width,), 2.0), torch.ones(width)))
        cos, sin = local_rope_tables(positions, head_dim, 1e4, dtype=dtype)
        plain = (torch.randn(positions - 1, VOCAB, 3 * width) * gain).to(dtype)
        codes = torch.randint(VOCAB, (batch, positions))
        fed = torch.stack([plain[q][codes[:, q]] for q in range(positions - 1)])
        q, k, v = plain.unflatten(-1, (3, heads, head_dim)).unbind(2)
        angles = cos[1:, None, None], sin[1:, None, None]
        table = torch.stack((rotate_pairs(q, *angles), rotate_pairs(k, *angles), v), 2).flatten(2)
        return cls(
            qkv=torch.cat(((torch.randn(1, batch, 3 * width) * gain).to(dtype), fed)),
            codes=codes,
            table=table,
            audio_embeddings=torch.randn(positions, VOCAB, width).to(dtype),
            cos=cos,
            sin=sin,
            heads=heads,
        )

    def to(self, target) -> "Frame":
        """A copy on a device or, of all but the codes, in a dtype."""
        changes = {
            field.name: getattr(self, field.name).to(target)
            for field in dataclasses.fields(self)
            if torch.is_tensor(getattr(self, field.name)) and not (field.name == "codes" and target == torch.float64)
        }
        return dataclasses.replace(self, **changes)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        positions, batch, triple = self.qkv.shape
        shape = (batch, positions, self.heads, triple // 3 // self.heads)
        return self.qkv.new_full(shape, UNWRITTEN), self.qkv.new_full(shape, UNWRITTEN)

    def run(self, plain, lookup=None) -> dict[str, torch.Tensor]:
        """All positions, one after the other, through out-variants; with `lookup`, positions from 1 take that form."""
        positions, batch, triple = self.qkv.shape
        k_cache, v_cache = self.caches()
        outs = self.qkv.new_full((positions, batch, triple // 3), UNWRITTEN)
        residuals = self.qkv.new_zeros(outs.shape)
        for p in range(positions):
            if lookup is None or p == 0:
                plain(self.qkv[p], k_cache, v_cache, p, self.cos, self.sin, outs[p])
            else:
                tables = (self.table, self.audio_embeddings)
                lookup(self.codes[:, p - 1], *tables, k_cache, v_cache, p, outs[p], residuals[p])
        return {"out": outs, "residual": residuals, "k_cache": k_cache, "v_cache": v_cache}


def reference(*arguments) -> None:
    *inputs, out = arguments
    out.copy_(local_rope_attention_reference(*inputs))


def lookup_reference(*arguments) -> None:
    *inputs, out, residual = arguments
    for output, value in zip((out, residual), local_rope_attention_lookup_reference(*inputs), strict=True):
        output.copy_(value)


def kernels(name: str) -> tuple:
    module = importlib.import_module(f"moss_kernels.local_rope_attention.{name}_kernel")
    return getattr(module, f"local_rope_attention_{name}"), getattr(module, f"local_rope_attention_lookup_{name}")


def require_close(frame: Frame, got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], form: str) -> None:
    """Errors against float64, as multiples of the format's rounding, relative to the largest value."""
    unit = torch.finfo(frame.qkv.dtype).eps / 2
    # The interpreter truncates to bfloat16, which is up to twice the error of rounding.
    if INTERPRETER and frame.qkv.dtype == torch.bfloat16:
        unit *= 2
    # Scores reach a size of 10, and a softmax weight is off by what its score is off: in the plain form from rounded q
    # and k, in the table form (q and k are given) from float32 sums alone.
    out = 32 if form == "plain" else 2 + 32 * 2**-24 / unit
    # A rotated key is a sum of two products, rounded once in a fused and three times in an eager implementation.
    bounds = {"out": out, "residual": 0, "k_cache": 2, "v_cache": 0}
    for name, bound in bounds.items():
        assert not got[name].isnan().any(), name
        unit_error = unit * exact[name].abs().max()
        error = (got[name].double().cpu() - exact[name]).abs().max()
        assert error <= bound * unit_error, f"{name}: error {error / unit_error:.1f} units, allowed {bound}"


@pytest.mark.parametrize("position", [0, 1, 5])
def test_rotates_neighbouring_pairs_and_reads_only_its_past(position):
    batch, heads, head_dim, base = 3, 2, 10, 1e4
    keys, values = torch.randn(2, batch, 6, heads, head_dim, dtype=torch.float64)
    keys[:, position:] = values[:, position:] = torch.nan
    qkv = torch.randn(batch, 3 * heads * head_dim, dtype=torch.float64)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(batch, heads, head_dim // 2, 2))
        angles = position * base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    q, k, v = qkv.split(heads * head_dim, dim=1)
    all_keys = torch.cat((keys[:, :position], rotated(k)[:, None]), 1)
    all_values = torch.cat((values[:, :position], v.reshape(batch, 1, heads, head_dim)), 1)
    weights = (torch.einsum("bhd,bphd->bhp", rotated(q), all_keys) / head_dim**0.5).softmax(-1)
    expected = torch.einsum("bhp,bphd->bhd", weights, all_values).flatten(1)

    cos, sin = local_rope_tables(6, head_dim, base, dtype=torch.float64)
    got = local_rope_attention_reference(qkv, keys, values, position, cos, sin)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(keys[:, : position + 1], all_keys, rtol=0, atol=1e-5)
    assert keys[:, position + 1 :].isnan().all() and values[:, position + 1 :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_follows_float64(shape, dtype):
    frame = Frame.make(*shape, dtype)
    exact = frame.to(torch.float64)
    require_close(frame, frame.run(local_rope_attention), exact.run(reference), "plain")
    lookup = frame.run(local_rope_attention, local_rope_attention_lookup)
    require_close(frame, lookup, exact.run(reference, lookup_reference), "table")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_form_gives_the_same_bits(dtype):
    frame = Frame.make(2, 3, 80, 12, dtype)
    plain, lookup = frame.run(local_rope_attention), frame.run(local_rope_attention, local_rope_attention_lookup)
    for name in ("out", "k_cache", "v_cache"):
        require_equal(name, lookup[name], plain[name])
    for p in range(1, 12):
        require_equal("residual", lookup["residual"][p], frame.audio_embeddings[p - 1][frame.codes[:, p - 1]])


def check_codes_outside_the_table(lookup, device: str) -> None:
    frame = Frame.make(5, 2, 16, 4, torch.float32).to(device)
    frame.codes[:4, 1] = torch.tensor([VOCAB, -1, 2**40, -(2**40)])
    k_cache, v_cache = frame.caches()
    k_cache[:, :2], v_cache[:, :2] = 1.0, 2.0
    out, residual = torch.full((2, 5, 32), torch.nan, device=device)
    lookup(frame.codes[:, 1], frame.table, frame.audio_embeddings, k_cache, v_cache, 2, out, residual)
    for output in (out, residual):
        assert (output[:4] == 0).all()
        assert (output[4] != 0).all()
    for cache in (k_cache, v_cache):
        assert cache[:4, 2].isnan().all()
        assert not cache[4, 2].isnan().any()


@pytest.mark.parametrize("lookup", [local_rope_attention_lookup, lookup_reference])
def test_codes_outside_the_table_store_nothing(lookup):
    check_codes_outside_the_table(lookup, "cpu")


def test_bad_arguments_are_named():
    frame = Frame.make(3, 2, 16, 4, torch.float32)
    k_cache, v_cache = frame.caches()
    out = torch.empty(3, 32)
    tables = (frame.cos, frame.sin)
    with pytest.raises(ValueError, match=r"`position` must be in 0 \.\. 3, got 4"):
        local_rope_attention(frame.qkv[0], k_cache, v_cache, 4, *tables, out)
    with pytest.raises(
        ValueError, match=r"`qkv` must be \[B, 3\*heads\*D\] with B = 3, 3\*heads\*D = 96, got \(3, 64\)"
    ):
        local_rope_attention(frame.qkv[0, :, :64].contiguous(), k_cache, v_cache, 0, *tables, out)
    with pytest.raises(TypeError, match="`cos` must be float32, got bfloat16"):
        local_rope_attention(frame.qkv[0], k_cache, v_cache, 0, frame.cos.bfloat16(), frame.sin, out)
    with pytest.raises(ValueError, match="`v_cache` must be contiguous"):
        local_rope_attention(frame.qkv[0], k_cache, v_cache.mT.contiguous().mT, 0, *tables, out)
    with pytest.raises(ValueError, match=r"`k_cache` must have a head_dim of 16 \.\. 128, a multiple of 4, got 18"):
        narrow = torch.empty(3, 4, 2, 18)
        local_rope_attention(frame.qkv[0], narrow, narrow.clone(), 0, *tables, out)
    with pytest.raises(ValueError, match="`k_cache` must have at most 32 positions, got 33"):
        long = torch.empty(3, 33, 2, 16)
        local_rope_attention(frame.qkv[0], long, long.clone(), 0, *tables, out)
    lookup = (frame.codes[:, 0], frame.table, frame.audio_embeddings, k_cache, v_cache)
    with pytest.raises(ValueError, match=r"`position` must be in 1 \.\. 3, got 0"):
        local_rope_attention_lookup(*lookup, 0, out, out.clone())
    with pytest.raises(ValueError, match="`audio_embeddings` must have at least P-1 = 3 codebooks, got 2"):
        local_rope_attention_lookup(*lookup[:2], frame.audio_embeddings[:2], k_cache, v_cache, 1, out, out.clone())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 132, r"`head_dim` must be 16 \.\. 128, got 132"),
        ("head_dim", 18, "`head_dim` must be a multiple of 4, got 18"),
        ("positions", 33, r"`positions` must be 1 \.\. 32, got 33"),
        ("position", 4, r"`position` must be 0 \.\. 3, got 4"),
        ("cos", None, "`cos` must not be null"),
        ("qkv", None, r"`position` must be 1 \.\. 3, got 0"),
        ("v_cache", 0x1004, "`v_cache` must be aligned to 16 bytes, got 0x1004"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    pointers = dict.fromkeys(("qkv", "cos", "sin", "k_cache", "v_cache", "out"), 0x1000)
    sizes = {"batch": 1, "heads": 2, "head_dim": 16, "positions": 4, "position": 0}
    header = {"struct_size": ctypes.sizeof(LocalRopeAttentionParams), "abi_version": _library.ABI_VERSION}
    params = LocalRopeAttentionParams(**header | sizes | pointers | {field: value})
    with pytest.raises(ValueError, match=message):
        _library.check_status(_library.load().moss_local_rope_attention(ctypes.byref(params)))


@pytest.mark.parametrize("batch", [0, 2])
def test_opcheck(batch):
    frame = Frame.make(batch, 2, 16, 4, torch.float32)
    k_cache, v_cache = (cache.nan_to_num() for cache in frame.caches())
    out = torch.empty(batch, 32)
    plain = (frame.qkv[0], k_cache, v_cache, 2, frame.cos, frame.sin, out)
    torch.library.opcheck(torch.ops.moss.local_rope_attention, plain)
    lookup = (frame.codes[:, 1], frame.table, frame.audio_embeddings, k_cache, v_cache, 2, out, torch.empty(batch, 32))
    torch.library.opcheck(torch.ops.moss.local_rope_attention_lookup, lookup)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_in_the_interpreter(shape, dtype):
    frame = Frame.make(*shape, dtype)
    exact = frame.to(torch.float64)
    plain, lookup = kernels("triton")
    require_close(frame, frame.run(plain), exact.run(reference), "plain")
    require_close(frame, frame.run(plain, lookup), exact.run(reference, lookup_reference), "table")


@pytest.mark.interpreter
def test_triton_leaves_codes_outside_the_table_alone_in_the_interpreter():
    check_codes_outside_the_table(kernels("triton")[1], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (33, 32, 80, 12)])
def test_kernels_follow_float64(name, shape, dtype):
    frame = Frame.make(*shape, dtype)
    exact = frame.to(torch.float64)
    plain, lookup = kernels(name)
    require_close(frame, frame.to("cuda").run(plain), exact.run(reference), "plain")
    require_close(frame, frame.to("cuda").run(plain, lookup), exact.run(reference, lookup_reference), "table")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_rows_do_not_depend_on_the_batch(name):
    frame = Frame.make(128, 32, 80, 12, torch.bfloat16).to("cuda")
    together = frame.run(*kernels(name))
    for rows in (slice(0, 1), slice(5, 12), slice(64, 128)):
        part = dataclasses.replace(frame, qkv=frame.qkv[:, rows].contiguous(), codes=frame.codes[rows])
        alone = part.run(*kernels(name))
        require_equal("out", alone["out"], together["out"][:, rows])
        require_equal("k_cache", alone["k_cache"], together["k_cache"][rows])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_kernels_leave_codes_outside_the_table_alone(name):
    check_codes_outside_the_table(kernels(name)[1], "cuda")

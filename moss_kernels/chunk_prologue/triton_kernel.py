"""`chunk_prologue` in Triton: for each frame of each row programs for blocks of features, and one for each stage."""

import math

import torch
import triton
import triton.language as tl

BLOCK_FEATURES = 256
BLOCK_TOKENS = 8
NUM_WARPS = 4
HALF_PI = tl.constexpr(math.pi / 2)
# Of both series: what is left out is below 1e-11 up to an eighth of a turn.
TERMS = tl.constexpr(6)
# One compiled kernel serves all chunks.
_NOT_SPECIALIZED = ("batch", "frames", "slot_stride", "valid_stride")


@triton.jit
def cos_sin_of(angle):
    """Cosine and sine of float32 angles, by their series in float64, far below a rounding of float32. What libraries do
    in float32 takes many times as long for large angles, which streams reach in minutes."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * (1 / HALF_PI) + 0.5)
    rest = wide - quarters * HALF_PI
    square = rest * rest
    cos = tl.full(angle.shape, 1.0, tl.float64)
    sin = cos
    for n in tl.static_range(TERMS, 0, -1):
        cos = 1 - cos * (square * (1 / (2 * n * (2 * n - 1))))
        sin = 1 - sin * (square * (1 / (2 * n * (2 * n + 1))))
    sin *= rest
    quarters = quarters.to(tl.int64)
    odd = quarters & 1 != 0
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where((quarters + 1) & 2 != 0, -turned_cos, turned_cos)
    turned_sin = tl.where(quarters & 2 != 0, -turned_sin, turned_sin)
    return turned_cos.to(tl.float32), turned_sin.to(tl.float32)


@triton.jit
def _dequantize(codes_ptr, table_ptr, features_ptr, frame, part, vocab, width, CODEBOOKS, BLOCK: tl.constexpr):
    columns = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for q in tl.static_range(CODEBOOKS):
        code = tl.load(codes_ptr + frame * CODEBOOKS + q).to(tl.int64)
        known = (code >= 0) & (code < vocab)
        row = (tl.full((), q, tl.int64) * vocab + code) * width
        total += tl.load(table_ptr + row + columns, mask=inside & known, other=0.0)
    tl.store(features_ptr + frame * width + columns, total.to(features_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def chunk_prologue_kernel(
    codes_ptr,
    table_ptr,
    slots_ptr,
    valid_ptr,
    offsets_ptr,
    rates_ptr,
    frequencies_ptr,
    features_ptr,
    stage_valid_ptr,
    cos_sin_ptr,
    batch,
    frames,
    slot_stride,
    valid_stride,
    vocab,
    width,
    CODEBOOKS: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_STAGES: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    frame = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part >= STAGES:
        _dequantize(codes_ptr, table_ptr, features_ptr, frame, part - STAGES, vocab, width, CODEBOOKS, BLOCK_FEATURES)
    else:
        row, frame_of_row = frame // frames, frame % frames
        stages = tl.arange(0, BLOCK_STAGES)
        before = tl.sum(tl.load(rates_ptr + stages, mask=stages < part, other=0), 0)
        rate = tl.load(rates_ptr + part)
        if frame_of_row == 0:
            tl.store(stage_valid_ptr + part.to(tl.int64) * valid_stride + row, tl.load(valid_ptr + row) * rate)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        start = tl.load(offsets_ptr + part.to(tl.int64) * slot_stride + slot) + frame_of_row * rate
        first = before.to(tl.int64) * batch * frames + frame * rate
        pair = tl.arange(0, BLOCK_PAIRS)
        frequency = tl.load(frequencies_ptr + pair, mask=pair < PAIRS, other=0.0)
        value = tl.arange(0, 2 * BLOCK_PAIRS)
        for begin in range(0, rate, BLOCK_TOKENS):
            token = begin + tl.arange(0, BLOCK_TOKENS)
            cos, sin = cos_sin_of(frequency[None, :] * (start + token).to(tl.float32)[:, None])
            place = (first + token)[:, None] * (2 * PAIRS) + value[None, :]
            inside = (token < rate)[:, None] & (value < 2 * PAIRS)[None, :]
            tl.store(cos_sin_ptr + place, tl.interleave(cos, sin), mask=inside)


def chunk_prologue_triton(
    codes: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offsets: torch.Tensor,
    rates: torch.Tensor,
    frequencies: torch.Tensor,
    features: torch.Tensor,
    stage_valid: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.chunk_prologue`, which documents and checks the arguments.

    No part of dependent launch: it starts when all before it is done, and lets the next kernel start when all of it is
    done, so that attention may read `stage_valid`, `cos_sin` and the rings ahead of its own wait.
    """
    batch, frames, codebooks = codes.shape
    _, vocab, width = table.shape
    if batch * frames == 0:
        stage_valid.zero_()
        return
    chunk_prologue_kernel[(batch * frames, len(rates) + triton.cdiv(width, BLOCK_FEATURES))](
        codes,
        table,
        slots,
        valid,
        offsets,
        rates,
        frequencies,
        features,
        stage_valid,
        cos_sin,
        batch,
        frames,
        offsets.shape[1],
        stage_valid.stride(0),
        vocab,
        width,
        CODEBOOKS=codebooks,
        STAGES=len(rates),
        PAIRS=len(frequencies),
        BLOCK_STAGES=triton.next_power_of_2(len(rates)),
        BLOCK_PAIRS=triton.next_power_of_2(len(frequencies)),
        BLOCK_FEATURES=BLOCK_FEATURES,
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=NUM_WARPS,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    constexprs: dict[str, object] = {"CODEBOOKS": 12, "STAGES": 6, "PAIRS": 32, "BLOCK_STAGES": 8, "BLOCK_PAIRS": 32}
    constexprs |= {"BLOCK_FEATURES": BLOCK_FEATURES, "BLOCK_TOKENS": BLOCK_TOKENS}
    specs = []
    for codes, dtype in (("i64", "fp32"), ("i64", "bf16"), ("i16", "bf16")):
        kinds = {"codes_ptr": f"*{codes}", "offsets_ptr": "*i64", "features_ptr": f"*{dtype}"}
        kinds |= dict.fromkeys(("slots_ptr", "valid_ptr", "rates_ptr", "stage_valid_ptr"), "*i32")
        kinds |= dict.fromkeys(("table_ptr", "frequencies_ptr", "cos_sin_ptr"), "*fp32")
        kinds |= dict.fromkeys(constexprs, "constexpr")
        signature = {name: kinds.get(name, "i32") for name in chunk_prologue_kernel.arg_names}
        specs.append((chunk_prologue_kernel, signature, constexprs, {"num_warps": NUM_WARPS}))
    return specs

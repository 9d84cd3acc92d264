"""`sample_codebook` in Triton: one program per batch row, thresholds by bisection over ordered keys, no sort."""

import torch
import triton
import triton.language as tl

from .triton_draw import (
    NO_KEY,
    exp_weights,
    keep_top_p,
    multiply_shift32,
    ordered_key,
    philox_word,
    reach_top_k,
    to_float32,
)

# (largest padded vocabulary, warps of the program that holds a row), ascending.
NUM_WARPS = ((64, 1), (1024, 4), (4096, 8))
# Products and sums must round on their own; fused they would give other weights.
_OPTIONS = {"enable_fp_fusion": False}
# The logits' layout decides how wide loads are; any other argument may vary between launches without a compilation.
_NOT_SPECIALIZED = (
    "row_map_ptr",
    "active_ptr",
    "temperature_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "repetition_penalty_ptr",
    "seed_ptr",
    "frame_ptr",
    "seen_ptr",
    "code_ptr",
    "status_ptr",
    "random_words_ptr",
    "seen_row_stride",
    "seen_offset",
    "code_stride",
    "channel",
    "pad_id",
)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def sample_codebook_kernel(
    logits_ptr,
    row_map_ptr,
    active_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    repetition_penalty_ptr,
    seed_ptr,
    frame_ptr,
    seen_ptr,
    code_ptr,
    status_ptr,
    random_words_ptr,
    vocab,
    logits_stride,
    seen_row_stride,
    seen_offset,
    code_stride,
    channel,
    pad_id,
    VOCAB_PADDED: tl.constexpr,
):
    batch_row = tl.program_id(0).to(tl.int64)
    if tl.load(active_ptr + batch_row) == 0:
        tl.store(code_ptr + batch_row * code_stride, tl.full((), 0, tl.int64) + pad_id)
        return
    row = tl.load(row_map_ptr + batch_row).to(tl.int64)
    ids = tl.arange(0, VOCAB_PADDED)
    valid = ids < vocab
    scores = to_float32(tl.load(logits_ptr + batch_row * logits_stride + ids, mask=valid, other=float("-inf")))

    if seen_ptr is not None:
        seen_row_ptr = seen_ptr + row * seen_row_stride + seen_offset
        if repetition_penalty_ptr is not None:
            penalty = tl.load(repetition_penalty_ptr + row)
            if (penalty > 0) & (penalty != 1):
                words = tl.load(seen_row_ptr + (ids >> 5), mask=valid, other=0)
                seen = ((words >> (ids & 31)) & 1) == 1
                divided = tl.math.div_rn(scores, tl.zeros_like(scores) + penalty)
                scores = tl.where(seen, tl.where(scores < 0, scores * penalty, divided), scores)

    positive = scores == float("inf")
    has_positive = tl.max(positive.to(tl.int32), 0) > 0
    nonfinite = tl.max(((scores != scores) | positive).to(tl.int32), 0)
    candidate = tl.where(has_positive, positive, scores > float("-inf"))
    scores = tl.where(candidate & ~positive, scores, 0.0)
    found = tl.max(candidate.to(tl.int32), 0) > 0

    choice = tl.full((), 0, tl.int32)
    if found:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= 1e-5:
            z = tl.math.div_rn(scores, tl.zeros_like(scores) + temperature)
            keys = tl.where(candidate, ordered_key(z), NO_KEY)
            z_max = tl.max(tl.where(candidate, z, float("-inf")), 0)

            k = tl.load(top_k_ptr + row)
            keep = candidate
            if (k > 0) & (k < vocab):
                keep = keys > reach_top_k(keys, k)
            weights = tl.where(keep, exp_weights(tl.where(z == z_max, 0.0, z - z_max)), 0)
            total = tl.sum(weights.to(tl.int64), 0)

            top_p = tl.load(top_p_ptr + row)
            if (top_p > 0) & (top_p < 1):
                weights = tl.where(keep_top_p(keys, weights, total, top_p), weights, 0)
                total = tl.sum(weights.to(tl.int64), 0)

            if random_words_ptr is not None:
                word = tl.load(random_words_ptr + batch_row).to(tl.uint64) & tl.full((), 0xFFFFFFFF, tl.uint64)
            else:
                word = philox_word(tl.load(seed_ptr + row), tl.load(frame_ptr + row), channel)
            inclusive = tl.cumsum(weights.to(tl.int64), 0)
            choice = tl.sum((inclusive <= multiply_shift32(word, total)).to(tl.int32), 0)
        else:
            keys = tl.where(candidate, ordered_key(scores), NO_KEY)
            choice = tl.min(tl.where(keys == tl.max(keys, 0), ids, VOCAB_PADDED), 0)

        if seen_ptr is not None:
            word_ptr = seen_ptr + row * seen_row_stride + seen_offset + (choice >> 5)
            tl.store(word_ptr, tl.load(word_ptr) | (tl.full((), 1, tl.int32) << (choice & 31)))

    tl.store(code_ptr + batch_row * code_stride, choice.to(tl.int64))
    tl.store(status_ptr + batch_row, nonfinite | tl.where(found, 0, 2))


def _num_warps(vocab_padded: int) -> int:
    return next(warps for largest, warps in NUM_WARPS if vocab_padded <= largest)


def sample_codebook_triton(
    logits: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    seed: torch.Tensor,
    frame: torch.Tensor,
    seen: torch.Tensor | None,
    channel: int,
    codebook: int,
    pad_id: int,
    code: torch.Tensor,
    status: torch.Tensor,
    random_words: torch.Tensor | None = None,
) -> None:
    """Triton implementation of `moss_kernels.sample_codebook`, which documents and checks the arguments."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    vocab_padded = triton.next_power_of_2(vocab)
    seen_strides = (0, 0) if seen is None else seen.stride()[:2]
    sample_codebook_kernel[(rows,)](
        logits,
        row_map,
        active,
        temperature,
        top_k,
        top_p,
        repetition_penalty,
        seed,
        frame,
        seen,
        code,
        status,
        random_words,
        vocab,
        logits.stride(0),
        seen_strides[0],
        seen_strides[1] * codebook,
        code.stride(0),
        channel,
        pad_id,
        VOCAB_PADDED=vocab_padded,
        num_warps=_num_warps(vocab_padded),
        **_OPTIONS,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    pointers = {
        "row_map_ptr": "*i32",
        "active_ptr": "*i1",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "repetition_penalty_ptr": "*fp32",
        "seed_ptr": "*i64",
        "frame_ptr": "*i32",
        "seen_ptr": "*i32",
        "code_ptr": "*i64",
        "status_ptr": "*i32",
        "random_words_ptr": "constexpr",
    }
    scalars = ("vocab", "logits_stride", "seen_row_stride", "seen_offset", "code_stride", "channel", "pad_id")
    specs = []
    for vocab_padded, dtype in ((2, "fp32"), (1024, "fp32"), (1024, "bf16"), (1024, "fp16"), (4096, "fp32")):
        signature = {"logits_ptr": f"*{dtype}"} | pointers | dict.fromkeys(scalars, "i32")
        constexprs: dict[str, object] = {"random_words_ptr": None, "VOCAB_PADDED": vocab_padded}
        if vocab_padded == 2:
            constexprs |= {"repetition_penalty_ptr": None, "seen_ptr": None}
        signature |= dict.fromkeys(constexprs, "constexpr")
        options = {"num_warps": _num_warps(vocab_padded), **_OPTIONS}
        specs.append((sample_codebook_kernel, signature, constexprs, options))
    return specs

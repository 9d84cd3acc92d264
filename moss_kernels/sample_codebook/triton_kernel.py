"""`sample_codebook` in Triton: one program per batch row, thresholds by bisection over ordered keys, no sort."""

import torch
import triton
import triton.language as tl

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

_MULTIPLIER0 = tl.constexpr(0xD2511F53)
_MULTIPLIER1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP0 = tl.constexpr(0x9E3779B9)
_KEY_STEP1 = tl.constexpr(0xBB67AE85)
# Below the key of every float that is not NaN.
_NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def _philox_word(seed, frame, channel):
    # Words are kept in uint64, so that a product keeps its high half.
    mask = tl.full((), 0xFFFFFFFF, tl.uint64)
    key0 = seed.to(tl.uint64) & mask
    key1 = (seed.to(tl.uint64) >> 32) & mask
    counter0 = frame.to(tl.uint64) & mask
    counter1 = channel.to(tl.uint64) & mask
    counter2 = tl.full((), 0, tl.uint64)
    counter3 = tl.full((), 0, tl.uint64)
    for _ in tl.static_range(10):
        product0 = counter0 * tl.full((), _MULTIPLIER0, tl.uint64)
        product1 = counter2 * tl.full((), _MULTIPLIER1, tl.uint64)
        counter0 = (product1 >> 32) ^ counter1 ^ key0
        counter1 = product1 & mask
        counter2 = (product0 >> 32) ^ counter3 ^ key1
        counter3 = product0 & mask
        key0 = (key0 + tl.full((), _KEY_STEP0, tl.uint64)) & mask
        key1 = (key1 + tl.full((), _KEY_STEP1, tl.uint64)) & mask
    return counter0


@triton.jit
def _multiply_shift32(word, total):
    # (word * total) >> 32 without losing the carry, in unsigned 64 bits.
    total = total.to(tl.uint64)
    low = (word * (total & tl.full((), 0xFFFFFFFF, tl.uint64))) >> 32
    return (word * (total >> 32) + low).to(tl.int64)


@triton.jit
def _to_float32(x):
    # The interpreter's cast flushes bfloat16 subnormals; their bits are the high half of the float32.
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _ordered_key(z):
    # int32 keys in the order of the floats; -0.0 and +0.0 get the same key.
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _midpoint(low, high):
    # Floor of the mean of two int32, without overflow.
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _round_half_even(x, DTYPE: tl.constexpr):
    # For x >= 0; the remainder of the truncation is exact.
    whole = x.to(DTYPE)
    rest = x - whole.to(tl.float32)
    return whole + ((rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))).to(DTYPE)


@triton.jit
def _exp_weights(u):
    t = u * tl.full((), 0x3FB8AA3B, tl.int32).to(tl.float32, bitcast=True)
    counts = t >= -32.0
    t = tl.where(counts, t, 0.0)
    # tl.floor takes a subnormal for 0, so the floor is made from the truncation.
    n = t.to(tl.int32)
    n -= (n.to(tl.float32) > t).to(tl.int32)
    g = t - n.to(tl.float32)
    p = g * tl.full((), 0x3962A0D6, tl.int32).to(tl.float32, bitcast=True)
    p = (p + tl.full((), 0x3AA36B1B, tl.int32).to(tl.float32, bitcast=True)) * g
    p = (p + tl.full((), 0x3C1E85CB, tl.int32).to(tl.float32, bitcast=True)) * g
    p = (p + tl.full((), 0x3D634488, tl.int32).to(tl.float32, bitcast=True)) * g
    p = (p + tl.full((), 0x3E75FEAC, tl.int32).to(tl.float32, bitcast=True)) * g
    p = (p + tl.full((), 0x3F317216, tl.int32).to(tl.float32, bitcast=True)) * g
    p = p + 1.0
    # A product by a power of two, built from its exponent bits, is exact.
    return tl.where(counts, _round_half_even(p * ((n + 157) << 23).to(tl.float32, bitcast=True), tl.int32), 0)


@triton.jit
def _reach_top_k(keys, k):
    # Largest `low` such that at least k keys are above it; the codes above it are those that reach the k-th highest.
    low = tl.full((), _NO_KEY, tl.int32)
    high = tl.max(keys, 0)
    above_low = tl.sum((keys > low).to(tl.int32), 0)
    if above_low > k:
        low = tl.min(tl.where(keys > _NO_KEY, keys, high), 0) - 1
        while (above_low != k) & (low + 1 < high):
            middle = _midpoint(low, high)
            above = tl.sum((keys > middle).to(tl.int32), 0)
            if above >= k:
                low = middle
                above_low = above
            else:
                high = middle
    return low


@triton.jit
def _keep_top_p(keys, weights, total, top_p):
    # The crossing code has the lowest key above which the weights sum to no more than the limit: it is in (low, high].
    word = _round_half_even(top_p * 4294967296.0, tl.int64)
    limit = _multiply_shift32(word.to(tl.uint64), total)

    # A sum of weights is below 2^43; the number of codes rides on top of it.
    packed = weights.to(tl.int64) + tl.where(weights > 0, 1 << 48, 0).to(tl.int64)
    high = tl.max(keys, 0)
    low = tl.min(tl.where(weights > 0, keys, high), 0) - 1
    above_low = tl.sum(packed, 0)
    above_high = tl.full((), 0, tl.int64)
    while (low + 1 < high) & (((above_low >> 48) - (above_high >> 48)) > 1):
        middle = _midpoint(low, high)
        above = tl.sum(tl.where(keys > middle, packed, 0), 0)
        if (above & ((1 << 48) - 1)) <= limit:
            high = middle
            above_high = above
        else:
            low = middle
            above_low = above

    # The codes in (low, high] are one, or equals; equals are kept by ascending id while the limit allows.
    edge = (keys > low) & (keys <= high)
    room = limit - (above_high & ((1 << 48) - 1))
    rank = tl.cumsum(edge.to(tl.int32), 0) - edge.to(tl.int32)
    within = edge & (rank.to(tl.int64) * weights.to(tl.int64) <= room)
    return (keys > high) | within


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
    scores = _to_float32(tl.load(logits_ptr + batch_row * logits_stride + ids, mask=valid, other=float("-inf")))

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
            keys = tl.where(candidate, _ordered_key(z), _NO_KEY)
            z_max = tl.max(tl.where(candidate, z, float("-inf")), 0)

            k = tl.load(top_k_ptr + row)
            keep = candidate
            if (k > 0) & (k < vocab):
                keep = keys > _reach_top_k(keys, k)
            weights = tl.where(keep, _exp_weights(tl.where(z == z_max, 0.0, z - z_max)), 0)
            total = tl.sum(weights.to(tl.int64), 0)

            top_p = tl.load(top_p_ptr + row)
            if (top_p > 0) & (top_p < 1):
                weights = tl.where(_keep_top_p(keys, weights, total, top_p), weights, 0)
                total = tl.sum(weights.to(tl.int64), 0)

            if random_words_ptr is not None:
                word = tl.load(random_words_ptr + batch_row).to(tl.uint64) & tl.full((), 0xFFFFFFFF, tl.uint64)
            else:
                word = _philox_word(tl.load(seed_ptr + row), tl.load(frame_ptr + row), channel)
            inclusive = tl.cumsum(weights.to(tl.int64), 0)
            choice = tl.sum((inclusive <= _multiply_shift32(word, total)).to(tl.int32), 0)
        else:
            keys = tl.where(candidate, _ordered_key(scores), _NO_KEY)
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

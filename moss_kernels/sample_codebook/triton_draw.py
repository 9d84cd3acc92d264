"""Pieces of the draw in Triton: the random word, ordered keys, exact weights, and what top_k and top_p keep."""

import triton
import triton.language as tl

_MULTIPLIER0 = tl.constexpr(0xD2511F53)
_MULTIPLIER1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP0 = tl.constexpr(0x9E3779B9)
_KEY_STEP1 = tl.constexpr(0xBB67AE85)
# Below the key of every float that is not NaN.
NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def philox_word(seed, frame, channel):
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
def multiply_shift32(word, total):
    # (word * total) >> 32 without losing the carry, in unsigned 64 bits.
    total = total.to(tl.uint64)
    low = (word * (total & tl.full((), 0xFFFFFFFF, tl.uint64))) >> 32
    return (word * (total >> 32) + low).to(tl.int64)


@triton.jit
def to_float32(x):
    # The interpreter's cast flushes bfloat16 subnormals; their bits are the high half of the float32.
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def ordered_key(z):
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
def exp_weights(u):
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
def reach_top_k(keys, k):
    # Largest `low` such that at least k keys are above it; the codes above it are those that reach the k-th highest.
    low = tl.full((), NO_KEY, tl.int32)
    high = tl.max(keys, 0)
    above_low = tl.sum((keys > low).to(tl.int32), 0)
    if above_low > k:
        low = tl.min(tl.where(keys > NO_KEY, keys, high), 0) - 1
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
def keep_top_p(keys, weights, total, top_p):
    # The crossing code has the lowest key above which the weights sum to no more than the limit: it is in (low, high].
    word = _round_half_even(top_p * 4294967296.0, tl.int64)
    limit = multiply_shift32(word.to(tl.uint64), total)

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

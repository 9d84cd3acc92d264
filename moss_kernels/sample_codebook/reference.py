"""`sample_codebook` in plain eager PyTorch, on any device."""

import torch

from .params import GREEDY_BELOW
from .philox import philox_word

NONFINITE = 1
EMPTY = 2

_INF = float("inf")
_LOW_WORD = 0xFFFFFFFF
_LOG2_E = 0x3FB8AA3B
# 2^g on [0, 1), highest power first.
_EXP2_COEFFICIENTS = (0x3962A0D6, 0x3AA36B1B, 0x3C1E85CB, 0x3D634488, 0x3E75FEAC, 0x3F317216, 0x3F800000)


def _float32(bits: int) -> float:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()


_LOG2_E_VALUE = _float32(_LOG2_E)
_EXP2_VALUES = tuple(_float32(bits) for bits in _EXP2_COEFFICIENTS)


def _multiply_shift32(word: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(word * total) >> 32 for 0 <= word < 2^32 and 0 <= total < 2^44, exact."""
    # The low product may wrap into the sign bit; its bits are still those of the unsigned product.
    low = ((word * (total & _LOW_WORD)) >> 32) & _LOW_WORD
    return word * (total >> 32) + low


def penalised_scores(logits: torch.Tensor, seen_words: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Applies the repetition penalty: s * r if s < 0, else s / r, once per seen code.

    Args:
        logits: [B, V] float32.
        seen_words: [B, ceil(V/32)] int32. Bit v & 31 of word v >> 5: code v was generated before.
        penalty: [B] float32. Not > 0 means 1.

    Returns:
        [B, V] float32.
    """
    penalty = torch.where(penalty > 0, penalty, 1.0)[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device)
    seen = (seen_words[:, ids >> 5] >> (ids & 31)) & 1 != 0
    return torch.where(seen & (penalty != 1), torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def exp_weights(u: torch.Tensor) -> torch.Tensor:
    """round_half_even(2^30 * 2^(u * log2 e)) by a fixed chain of float32 operations, 0 where u * log2 e < -32.

    Args:
        u: [...] float32. z minus the row's largest z, <= 0, may be -inf.

    Returns:
        [...] int64, 0 .. about 2^30.
    """
    t = u * _LOG2_E_VALUE
    counts = t >= -32
    t = torch.where(counts, t, 0.0)
    n = torch.floor(t)
    g = t - n
    p = torch.full_like(g, _EXP2_VALUES[0])
    for coefficient in _EXP2_VALUES[1:]:
        p = p * g
        p = p + coefficient
    # 2^(30+n) from its exponent bits: pow and ldexp are not exact on every device.
    scale = ((n.to(torch.int32) + (30 + 127)) << 23).view(torch.float32)
    return torch.where(counts, torch.round(p * scale).long(), 0)


def filtered_weights(
    z: torch.Tensor, candidate: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Integer weights of the codes that top_k and top_p keep; 0 for all others.

    Args:
        z: [B, V] float32. Scores over temperature, no NaN, no -0.0, -inf where not a candidate.
        candidate: [B, V] bool.
        top_k: [B] int32. <= 0 or >= V is off.
        top_p: [B] float32. Outside (0, 1) is off.

    Returns:
        [B, V] int64.
    """
    vocab = z.shape[1]
    z_max = z.amax(1, keepdim=True)
    ordered_z, order = z.sort(dim=1, descending=True, stable=True)

    k = top_k.long()[:, None]
    kth = ordered_z.gather(1, (k - 1).clamp(0, vocab - 1))
    keep = candidate & ((k <= 0) | (k >= vocab) | (z >= kth))
    # z may have overflowed to an infinity, and inf - inf is NaN: the largest codes are set to 0 directly.
    weights = torch.where(keep, exp_weights(torch.where(z == z_max, 0.0, z - z_max)), 0)

    top_p = top_p[:, None]
    top_p_on = (top_p > 0) & (top_p < 1)
    # float32: a product by a power of two is exact, torch.round rounds half to even.
    limit_word = torch.round(torch.where(top_p_on, top_p, 0.0) * 2.0**32).long()
    limit = _multiply_shift32(limit_word, weights.sum(1, keepdim=True))
    ordered_weights = weights.gather(1, order)
    before = ordered_weights.cumsum(1) - ordered_weights
    within = torch.zeros_like(candidate).scatter_(1, order, before <= limit)
    return torch.where(within | ~top_p_on, weights, 0)


def _classify(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores with -inf where not a candidate (and 0 for +inf), the candidates, and [B] whether NaN or +inf came."""
    positive = scores == _INF
    has_positive = positive.any(1, keepdim=True)
    nonfinite = has_positive[:, 0] | scores.isnan().any(1)
    candidate = torch.where(has_positive, positive, scores > -_INF)
    return torch.where(candidate, torch.where(positive, 0.0, scores), -_INF), candidate, nonfinite


def _mark_seen(
    seen: torch.Tensor, rows: torch.Tensor, codebook: int, choice: torch.Tensor, drawn: torch.Tensor
) -> None:
    word = choice >> 5
    bit = torch.ones_like(choice, dtype=torch.int32) << (choice & 31).int()
    missing = drawn & ((seen[rows, codebook, word] & bit) == 0)
    index = (rows * seen.shape[1] + codebook) * seen.shape[2] + word
    # Adding the missing bit is an OR; rows that drew nothing add 0, so they may share a pool row with anyone.
    seen.view(-1).scatter_add_(0, index, torch.where(missing, bit, 0))


def sample_codebook_reference(
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
    """Reference of `moss_kernels.sample_codebook`, which documents the arguments.

    Every step is exact or a single IEEE float32 operation, so codes are bitwise those of every other implementation.
    """
    rows = row_map.long()
    scores = logits.float()
    if seen is not None and repetition_penalty is not None:
        scores = penalised_scores(scores, seen[rows, codebook], repetition_penalty[rows])
    scores, candidate, nonfinite = _classify(scores)
    found = candidate.any(1)

    row_temperature = temperature[rows]
    greedy = ~(row_temperature >= GREEDY_BELOW)
    z = scores / torch.where(greedy, 1.0, row_temperature)[:, None]
    # An infinite temperature makes NaN of -inf; sorting on CUDA tells -0.0 from +0.0.
    z = torch.where(candidate, torch.where(z == 0, 0.0, z), -_INF)
    weights = filtered_weights(z, candidate, top_k[rows], top_p[rows])

    x = philox_word(seed[rows], frame[rows], channel) if random_words is None else random_words & _LOW_WORD
    target = _multiply_shift32(x, weights.sum(1))
    sampled = (weights.cumsum(1) <= target[:, None]).sum(1)

    ids = torch.arange(logits.shape[1], device=logits.device)
    highest = torch.where(candidate & (scores == scores.amax(1, keepdim=True)), ids, logits.shape[1]).amin(1)
    choice = torch.where(found, torch.where(greedy, highest, sampled), 0)

    if seen is not None:
        _mark_seen(seen, rows, codebook, choice, active & found)
    code.copy_(torch.where(active, choice, pad_id))
    status.copy_(torch.where(active, nonfinite * NONFINITE + ~found * EMPTY, status))

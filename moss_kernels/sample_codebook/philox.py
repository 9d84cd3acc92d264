"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in int64 tensor arithmetic."""

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _multiply(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    # int64 products wrap modulo 2^64, so their bits are those of the unsigned product.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox_word(seed: torch.Tensor, frame: torch.Tensor, channel: int) -> torch.Tensor:
    """First output word of Philox4x32-10 with key = (low, high 32 bits of seed), counter = (frame, channel, 0, 0).

    Args:
        seed: [B] int64. Request seeds, 0 .. 2^63-1.
        frame: [B] int32. Frame numbers; 0 is the first generated frame.
        channel: 0 for the stop head, q+1 for codebook q.

    Returns:
        [B] int64. Uniform integers in 0 .. 2^32-1.

    Graph-safe: yes.
    """
    key = [seed & _WORD, (seed >> 32) & _WORD]
    counter = [frame.long() & _WORD, torch.full_like(seed, channel), torch.zeros_like(seed), torch.zeros_like(seed)]
    for _ in range(10):
        high0, low0 = _multiply(counter[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True)]
    return counter[0]

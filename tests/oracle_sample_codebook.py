"""`sample_codebook` once more, slowly: single float32 operations of numpy, all else Python integers and fractions."""

import dataclasses
import math
from fractions import Fraction

import numpy as np

LOG2_E, *HORNER = np.array(
    [0x3FB8AA3B, 0x3962A0D6, 0x3AA36B1B, 0x3C1E85CB, 0x3D634488, 0x3E75FEAC, 0x3F317216, 0x3F800000], dtype=np.uint32
).view(np.float32)


@dataclasses.dataclass
class Row:
    """One batch row. A Row may be drawn from several times."""

    logits: np.ndarray  # [V] float32
    temperature: float
    top_k: int
    top_p: float
    penalty: float
    seen: set[int]

    def __post_init__(self) -> None:
        with np.errstate(all="ignore"):
            self._prepare()

    def _prepare(self) -> None:
        scores = self._scores()
        self.nonfinite = any(math.isnan(s) or s == math.inf for s in scores)
        if math.inf in scores:
            candidates = {i: np.float32(0) for i, s in enumerate(scores) if s == math.inf}
        else:
            candidates = {i: s for i, s in enumerate(scores) if s > -math.inf}
        self.candidates = candidates
        self.greedy = not np.float32(self.temperature) >= np.float32(1e-5)
        self.weights: dict[int, int] = {}
        if candidates and not self.greedy:
            z = {i: s / np.float32(self.temperature) for i, s in candidates.items()}
            self.weights = self._cut_top_p(z, self._weigh(z, self._cut_top_k(z)))

    def _scores(self) -> list[np.float32]:
        penalty = np.float32(self.penalty)
        if not penalty > 0 or penalty == 1:
            return list(self.logits)
        return [s if i not in self.seen else s * penalty if s < 0 else s / penalty for i, s in enumerate(self.logits)]

    def _cut_top_k(self, z: dict[int, np.float32]) -> set[int]:
        if not 0 < self.top_k < len(self.logits) or self.top_k >= len(z):
            return set(z)
        threshold = sorted(z.values(), reverse=True)[self.top_k - 1]
        return {i for i, value in z.items() if value >= threshold}

    def _weigh(self, z: dict[int, np.float32], kept: set[int]) -> dict[int, int]:
        z_max = max(z.values())
        return {i: weight(np.float32(0) if z[i] == z_max else z[i] - z_max) for i in kept}

    def _cut_top_p(self, z: dict[int, np.float32], weights: dict[int, int]) -> dict[int, int]:
        top_p = np.float32(self.top_p)
        if not 0 < top_p < 1:
            return weights
        limit = round(Fraction(float(top_p)) * 2**32) * sum(weights.values()) >> 32
        kept, before = {}, 0
        for i in sorted(weights, key=lambda i: (-z[i], i)):
            if before > limit:
                break
            kept[i] = weights[i]
            before += weights[i]
        return kept

    def draw(self, x: int) -> tuple[int, int]:
        """Code and status for the random word x."""
        if not self.candidates:
            return 0, 2 + self.nonfinite
        if self.greedy:
            return max(self.candidates, key=lambda i: (self.candidates[i], -i)), int(self.nonfinite)
        target = x * sum(self.weights.values()) >> 32
        inclusive = 0
        for i in sorted(self.weights):
            inclusive += self.weights[i]
            if inclusive > target:
                return i, int(self.nonfinite)
        raise AssertionError("no inclusive sum exceeds the target")


def weight(u: np.float32) -> int:
    """Integer weight of a code whose z is u below the largest."""
    t = u * LOG2_E
    if t == -math.inf:
        return 0
    n = math.floor(float(t))
    if n < -32:
        return 0
    g = t - np.float32(n)
    p = HORNER[0]
    for coefficient in HORNER[1:]:
        product = p * g
        p = product + coefficient
    return round(Fraction(float(p)) * Fraction(2) ** (30 + n))


def philox_word(seed: int, frame: int, channel: int) -> int:
    """First word of Philox4x32-10."""
    key = [seed % 2**32, seed >> 32]
    c = [frame, channel, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b % 2**32, (a >> 32) ^ c[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c[0]

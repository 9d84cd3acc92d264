"""Sampling parameters of one request, validated on the host. Kernels never check ranges again."""

import dataclasses
import math
import numbers

GREEDY_BELOW = 1e-5
MAX_SEED = 2**63 - 1
_FLOAT32_TINY = 2.0**-126
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def _check_number(name: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"SamplingParams: `{name}` must be a number, got {value!r}")
    # NaN fails the comparison.
    if not low <= value <= high:
        raise ValueError(f"SamplingParams: `{name}` must be {expected}, got {value!r}")


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"SamplingParams: `{name}` must be an integer, got {value!r}")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the codes of one request are drawn. The defaults are those of the released model.

    Attributes:
        temperature: Divides the scores of the audio codes; >= 0 and finite. Below 1e-5 the highest score is taken.
        top_k: Keep the codes that reach the k-th highest score; 0, negative or >= the codebook size is off.
        top_p: Keep the most probable codes until their mass passes top_p; in (0, 1], 1 is off.
        repetition_penalty: Score of a code already generated in the same codebook is divided (multiplied if
            negative) by it; > 0 and finite, 1 is off.
        text_temperature: As temperature, for the continue/stop decision.
        text_top_k: As top_k, for the continue/stop decision.
        text_top_p: As top_p, for the continue/stop decision.
        seed: 0 .. 2^63-1, or None: one is drawn when the request is admitted.

    Raises:
        TypeError: A field is not a number (top_k, text_top_k, seed: not an integer).
        ValueError: A field is out of range or NaN.
    """

    temperature: float = 1.7
    top_k: int = 25
    top_p: float = 0.8
    repetition_penalty: float = 1.0
    text_temperature: float = 1.0
    text_top_k: int = 50
    text_top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "text_temperature"):
            _check_number(name, getattr(self, name), 0, _FLOAT32_MAX, "finite and >= 0")
        for name in ("top_p", "text_top_p"):
            _check_number(name, getattr(self, name), math.ulp(0.0), 1, "in (0, 1]")
        _check_number("repetition_penalty", self.repetition_penalty, _FLOAT32_TINY, _FLOAT32_MAX, "finite and > 0")
        for name in ("top_k", "text_top_k"):
            _check_int(name, getattr(self, name))
        if self.seed is not None:
            _check_int("seed", self.seed)
            if not 0 <= self.seed <= MAX_SEED:
                raise ValueError(f"SamplingParams: `seed` must be in 0 .. 2^63-1 ({MAX_SEED}), got {self.seed}")
        # Plain ones, whatever they came as: tensors and JSON take not all that are numbers.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                kind = int if isinstance(value, numbers.Integral) else float
                object.__setattr__(self, field.name, kind(value))

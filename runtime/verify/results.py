"""What a check found, and the table of all of them."""

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table

# Largest value times the dtype's rounding that any result may be off by. Kernels in float32 sum in another order, and
# the reference's own error may happen to be 0.
_ROUNDINGS = {torch.float32: 16}


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation compared with the reference.

    Attributes:
        name: of the op or the graph.
        implementation: what was compared.
        error: largest difference from the exact result; of audio the root mean square.
        bound: largest `error` allowed.
        codes: numbers that must be equal (codes, flags, positions) that were compared.
        equal: how many of them were.
        cases: comparisons in this result.
        note: what else there is to say.
        failure: why it failed, if neither numbers nor codes show it.
    """

    name: str
    implementation: str
    error: float = 0.0
    bound: float = 0.0
    codes: int = 0
    equal: int = 0
    cases: int = 1
    note: str = ""
    failure: str = ""

    @property
    def passed(self) -> bool:
        """NaN passes nothing."""
        return not self.failure and self.error <= self.bound and self.equal == self.codes

    @property
    def badness(self) -> float:
        """Error over bound; infinite if there is no such number."""
        if self.failure or math.isnan(self.error):
            return math.inf
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound else math.inf

    def merged(self, other: "Result") -> "Result":
        """Both: the numbers of the worse, the counts of both."""
        worst = max((self, other), key=lambda result: result.badness)
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("codes", "equal", "cases")}
        return dataclasses.replace(worst, **sums, failure=self.failure or other.failure)


class Results:
    """Results by name and implementation, in the order in which they came."""

    def __init__(self):
        self._found: dict[tuple[str, str], Result] = {}

    def add(self, result: Result) -> None:
        key = result.name, result.implementation
        self._found[key] = self._found[key].merged(result) if key in self._found else result

    def __iter__(self):
        return iter(self._found.values())

    @property
    def passed(self) -> bool:
        """Something was compared, and all of it passed."""
        return bool(self._found) and all(result.passed for result in self)

    def table(self) -> "Table":
        """A table for a `rich` console."""
        from rich.table import Table

        table = Table()
        for column in ("op", "implementation", "cases", "max error", "bound", "codes compared", "equal", "result"):
            table.add_column(column, justify="left" if column in ("op", "implementation", "result") else "right")
        for result in self:
            verdict = "ok" if result.passed else "FAILED"
            table.add_row(
                result.name,
                result.implementation,
                str(result.cases),
                f"{result.error:.2e}",
                f"{result.bound:.2e}",
                str(result.codes),
                str(result.equal),
                ": ".join(filter(None, (verdict, result.failure or result.note))),
                style=None if result.passed else "bold red",
            )
        return table


def compare(actual: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """`error` and `bound` of a result: at most twice the error of eager PyTorch, or a rounding of the largest value.

    Args:
        actual: any shape, floating. What is checked.
        exact: same shape, float64. What it should be; where this is NaN the other must be NaN.
        eager: same shape. What the reference gives in `dtype`.
        dtype: of the computation.
    """
    scale = float(exact.abs().nan_to_num(nan=0, posinf=0).max()) if exact.numel() else 0.0
    rounding = torch.finfo(dtype).eps * _ROUNDINGS.get(dtype, 1)
    return {"error": _distance(actual, exact), "bound": 2 * _distance(eager, exact) + rounding * scale}


def _distance(actual: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    actual, exact = actual.double(), exact.double()
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    return float(torch.where(same, 0.0, (actual - exact).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max())

"""Two result files against each other: which cases became faster, and which only look so."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.table import Row, is_rate, read_run

if TYPE_CHECKING:
    from rich.table import Table

NEW, GONE, NOISE, FASTER, SLOWER = "only in B", "only in A", "noise", "faster", "slower"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One case and implementation in both files, or in one.

    Attributes:
        case, impl, unit: of the rows.
        medians: of A and of B; None where there is no row.
        speed: of B over A: above 1 is faster, or more audio in a second. NaN if one is missing.
        verdict: NOISE if the spreads (p20 to p80) overlap.
        conditions: names of what the two were not measured alike in.
    """

    case: str
    impl: str
    unit: str
    medians: tuple[float | None, float | None]
    speed: float
    verdict: str
    conditions: tuple[str, ...] = ()


def compare(before: Iterable[Row], after: Iterable[Row]) -> list[Comparison]:
    """Cases of two runs in the order of the first; of a case measured several times the last row counts.

    Raises:
        ValueError: a case has another unit in the other run.
    """
    old, new = ({(row["case"], row["impl"]): row for row in rows} for rows in (before, after))
    return [_compared(old.get(key), new.get(key)) for key in (old | new)]


def _compared(before: Row | None, after: Row | None) -> Comparison:
    row = before or after
    names = row["case"], row["impl"], row["unit"]
    medians = tuple(None if one is None else one["p50"] for one in (before, after))
    if before is None or after is None:
        return Comparison(*names, medians, math.nan, NEW if before is None else GONE)
    if before["unit"] != after["unit"]:
        raise ValueError(f"{row['case']}, {row['impl']}: {before['unit']} in A, {after['unit']} in B")
    ratio = before["p50"] / after["p50"] if after["p50"] else math.inf
    speed = 1 / ratio if is_rate(row) else ratio
    spreads = [(float(one.get("p20", one["p50"])), float(one.get("p80", one["p50"]))) for one in (before, after)]
    overlap = max(low for low, _ in spreads) <= min(high for _, high in spreads)
    verdict = NOISE if overlap else FASTER if speed > 1 else SLOWER
    return Comparison(*names, medians, speed, verdict, _unlike(before, after))


def _unlike(before: Row, after: Row) -> tuple[str, ...]:
    machine = ("gpu", "driver", "torch", "triton")
    return tuple(name for name in machine if before.get(name) != after.get(name))


def as_table(comparisons: Iterable[Comparison], names: tuple[str, str] = ("A", "B")) -> "Table":
    """A table for a `rich` console."""
    from rich.table import Table

    table = Table()
    table.add_column("case", no_wrap=True)
    table.add_column("impl", overflow="fold")
    for name in (*names, "speed"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("verdict")
    colours = {FASTER: "green", SLOWER: "red"}
    for one in comparisons:
        values = ["" if median is None else f"{median:.4g} {one.unit}" for median in one.medians]
        speed = "" if math.isnan(one.speed) else f"{one.speed:.3f} x"
        verdict = one.verdict + (f", other {', '.join(one.conditions)}" if one.conditions else "")
        table.add_row(one.case, one.impl, *values, speed, verdict, style=colours.get(one.verdict))
    return table


def compare_files(before: Path, after: Path) -> "Table":
    """The table of two result files. Raises ValueError for what is no result file."""
    return as_table(compare(read_run(before), read_run(after)), (before.stem, after.stem))

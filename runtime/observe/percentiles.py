"""Percentiles of what was measured, as all reports name them."""

from collections.abc import Iterable, Sequence

import numpy


def percentiles(values: Iterable[float], points: Sequence[int]) -> dict[str, float]:
    """`{"p50": ...}` for each of `points`, between two values linear; empty without values."""
    values = numpy.fromiter(values, dtype=numpy.float64)
    if not len(values):
        return {}
    found = numpy.percentile(values, points).tolist()
    return {f"p{point}": value for point, value in zip(points, found, strict=True)}

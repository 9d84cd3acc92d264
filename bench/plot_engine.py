"""A plot of the engine's rows: audio per second and first audio over the number of clients."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bench.table import read_rows
from moss_runtime.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def series(results: Path) -> dict[str, list[tuple[int, float]]]:
    """The latest figures by number of clients: audio seconds per second, and milliseconds to the first audio."""
    latest: dict[str, dict[int, float]] = {"rate": {}, "first_audio": {}}
    for run in read_rows(results):
        for row in run:
            match = re.fullmatch(r"engine/C(\d+)(?:/(rate|first_audio))?", row["case"])
            if match and row["impl"] == "runtime":
                kind = match[2] or ("rate" if row["unit"] == "audio_s_per_s" else "first_audio")
                latest[kind][int(match[1])] = row["p50"]
    return {kind: sorted(points.items()) for kind, points in latest.items()}


def plot(results: Path, png: Path) -> None:
    """Draw both over the number of clients.

    Raises:
        UserError: matplotlib is not installed.
        ValueError: no rows of the engine are recorded.
    """
    found = series(results)
    if not all(found.values()):
        raise ValueError(f"{results}: no rows of the engine")
    require("matplotlib", "the plot").use("Agg")
    pyplot = require("matplotlib.pyplot", "the plot")
    figure, axis = pyplot.subplots(figsize=(7, 4))
    draw(axis, found)
    figure.tight_layout()
    figure.savefig(png, dpi=150)


def draw(rate_axis: "Axes", found: dict[str, list[tuple[int, float]]]) -> None:
    """Both of `series` into one axis, each with a scale of its own."""
    rate_axis.plot(*zip(*found["rate"], strict=True), "o-", color="tab:blue")
    rate_axis.set(xlabel="clients", ylabel="seconds of audio per second", xscale="log", ylim=(0, None))
    rate_axis.yaxis.label.set_color("tab:blue")
    clients = [count for count, _ in found["rate"]]
    rate_axis.set_xticks(clients, [str(count) for count in clients])
    first_axis = rate_axis.twinx()
    first_axis.plot(*zip(*found["first_audio"], strict=True), "s--", color="tab:red")
    first_axis.set(ylabel="first audio, median, ms", ylim=(0, None))
    first_axis.yaxis.label.set_color("tab:red")

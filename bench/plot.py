"""A picture of the recorded rows: how far each case is from its floor, and the engine over the number of clients."""

from collections.abc import Iterable
from pathlib import Path

from bench import plot_engine
from bench.table import BASELINES, OURS, TARGETS, Row, best, grouped, read_rows
from moss_runtime.optional import require

Ratios = list[tuple[str, float, float | None]]


def floor_ratios(runs: Iterable[list[Row]]) -> dict[str, Ratios]:
    """What is drawn of each GPU: (case, our time over the floor, that of the fastest baseline or None).

    Cases are those of the results table, in its order, each from the latest run that has it.
    """
    latest: dict[str, dict[str, tuple[float, float | None]]] = {}
    for run in runs:
        for (gpu, case), rows in grouped(run).items():
            own, baseline = best(rows, OURS), best(rows, BASELINES)
            if case in TARGETS and own is not None and "ratio_to_floor" in own:
                other = None if baseline is None else baseline.get("ratio_to_floor")
                latest.setdefault(gpu, {})[case] = (own["ratio_to_floor"], other)
    return {gpu: [(case, *cases[case]) for case in TARGETS if case in cases] for gpu, cases in latest.items()}


def plot(results: Path, png: Path) -> None:
    """Draw one picture for each GPU that rows are of, and the engine's if there are rows of it.

    Raises:
        UserError: matplotlib is not installed.
        ValueError: no row of a case that has a floor is recorded.
    """
    ratios = floor_ratios(read_rows(results))
    if not ratios:
        raise ValueError(f"{results}: no rows of cases with a floor")
    require("matplotlib", "the plot").use("Agg")
    pyplot = require("matplotlib.pyplot", "the plot")
    engine = plot_engine.series(results)
    panels = len(ratios) + all(engine.values())
    figure, axes = pyplot.subplots(panels, 1, squeeze=False, figsize=(8, 4.5 * panels))
    for axis, (gpu, cases) in zip(axes[:, 0], ratios.items(), strict=False):
        places = range(len(cases))
        axis.barh([place - 0.2 for place in places], [own for _, own, _ in cases], 0.4, label="ours")
        compared = [(place + 0.2, other) for place, (_, _, other) in enumerate(cases) if other is not None]
        if compared:
            axis.barh(*zip(*compared, strict=True), 0.4, label="fastest baseline")
        axis.set(title=gpu, xlabel="time over the floor", xscale="log", yticks=list(places))
        axis.set_yticklabels([case for case, *_ in cases])
        axis.invert_yaxis()
        axis.legend()
    if all(engine.values()):
        plot_engine.draw(axes[-1, 0], engine)
    figure.tight_layout()
    figure.savefig(png, dpi=150)

"""The results table of README.md, made of the rows in bench/results.

python -m bench.table                     # prints it
python -m bench.table --write README.md   # puts it between the two markers there
"""

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->\n"

# What is ours; any other implementation in a row is a baseline or a variant. The reference is too slow to compare with.
OURS = ("runtime", "cuda", "triton")
BASELINES = ("torch_graph", "torch_compile", "torch_eager", "torch_ops", "torch_sdpa", "triton_baseline")

# Cases of the table, and what each is to reach: at most so much time or memory, at least so much audio a second.
TARGETS = {
    "sample_codebook/B64": "3.2 us",
    **{f"local_frame/B{batch}": "500 us" for batch in (1, 2, 4, 8, 16)},
    "local_frame/B32": "560 us",
    "local_frame/B64": "650 us",
    "local_frame/B128": "800 us",
    "codec_chunk/B1/T1": "2.0 ms",
    "codec_chunk/B1/T15": "2.6 ms",
    "codec_chunk/B64/T1": "4.2 ms",
    "codec_chunk/B64/T15": "30 ms",
    "codec_chunk/B128/T15": "60 ms",
    "frame_graph/B1/ctx512": "3.0 ms",
    "frame_graph/B64/ctx512": "4.4 ms",
    "frame_graph/B128/ctx512": "6.5 ms",
    "prefill/B1/L150": "6 ms",
    "prefill/B8/L150": "16 ms",
    "engine/C1": "15 ms",
    "engine/C64": "650 audio_s_per_s",
    "engine/C64/clone": "650 audio_s_per_s",
    "engine/C128": "850 audio_s_per_s",
    "engine/C128/memory": "16384 MiB",
}
HEADER = ("case", "time", "target", "x floor", "fastest baseline", "faster", "commit")
_UNITS = {"audio_s_per_s": "s of audio/s"}

Row = dict[str, object]


def read_rows(results: Path) -> list[list[Row]]:
    """Rows of each result file, oldest file first.

    Raises:
        ValueError: a line is not a row; the message names file and line.
    """
    runs = [read_run(path) for path in sorted(results.rglob("*.jsonl"))]
    return sorted(runs, key=lambda run: max((row["time"] for row in run), default=""))


def read_run(path: Path) -> list[Row]:
    """Rows of one result file. Raises ValueError as `read_rows`."""
    run = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            row["time"], row["p50"] = str(row.get("time", path.name[:10])), float(row["p50"])
            missing = {"case", "impl", "unit", "gpu", "sha"} - row.keys()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a result row ({error!r})") from None
        if missing:
            raise ValueError(f"{path}, line {number}: the row lacks {', '.join(sorted(missing))}")
        run.append(row)
    return run


def render(runs: Iterable[list[Row]]) -> str:
    """The table in Markdown: one for each GPU, the latest run of each case."""
    latest: dict[str, dict[str, dict[str, Row]]] = {}
    for run in runs:
        for (gpu, case), rows in grouped(run).items():
            # Only rows of one run are compared: they were timed in turn.
            if case in TARGETS and rows.keys() & set(OURS):
                latest.setdefault(gpu, {})[case] = rows
    if not latest:
        return "No row is recorded yet.\n"
    return "\n".join(itertools.chain.from_iterable(_table(gpu, latest[gpu]) for gpu in sorted(latest)))


def insert(text: str, table: str) -> str:
    """A document with the table between its markers.

    Raises:
        ValueError: the markers are not there, each once and in order.
    """
    parts = re.fullmatch(f"(.*){re.escape(BEGIN)}.*{re.escape(END)}(.*)", text, re.DOTALL)
    if parts is None or (text.count(BEGIN), text.count(END)) != (1, 1):
        raise ValueError(f"the lines {BEGIN.strip()} and {END.strip()} must be there once, in this order")
    return f"{parts[1]}{BEGIN}\n{table}\n{END}{parts[2]}"


def grouped(run: Iterable[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """(GPU, case) -> implementation -> its last row."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in run:
        groups.setdefault((row["gpu"], row["case"]), {})[row["impl"]] = row
    return groups


def _table(gpu: str, cases: dict[str, dict[str, Row]]) -> list[str]:
    lines = [f"{gpu}, medians, the latest run of each case:\n", _line(HEADER), _line(["---"] * len(HEADER))]
    return [*lines, *(_line(_cells(case, cases[case])) for case in TARGETS if case in cases), ""]


def _cells(case: str, rows: dict[str, Row]) -> list[str]:
    own, baseline = best(rows, OURS), best(rows, BASELINES)
    bound = ">=" if is_rate(own) else "<="
    cells = [
        f"`{case}`",
        _quantity(own),
        f"{bound} {_with_unit(*TARGETS[case].split())}",
        str(own.get("ratio_to_floor", "")),
    ]
    if baseline is None:
        return [*cells, "", "", f"`{own['sha']}`"]
    ratio = own["p50"] / baseline["p50"] if is_rate(own) else baseline["p50"] / own["p50"]
    return [*cells, f"{baseline['impl']}, {_quantity(baseline)}", f"{ratio:.2f} x", f"`{own['sha']}`"]


def best(rows: dict[str, Row], names: Iterable[str]) -> Row | None:
    """The fastest row of some implementations, or the one with the highest rate."""
    found = [rows[name] for name in names if name in rows]
    return min(found, key=lambda row: -row["p50"] if is_rate(row) else row["p50"], default=None)


def is_rate(row: Row) -> bool:
    """More is better."""
    return row["unit"].endswith("_per_s")


def _quantity(row: Row) -> str:
    digits = max(0, 2 - math.floor(math.log10(row["p50"]))) if row["p50"] > 0 else 0
    return _with_unit(f"{row['p50']:.{digits}f}", row["unit"])


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {_UNITS.get(unit, unit)}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="document to put the table in")
    options = parser.parse_args()
    try:
        table = render(read_rows(options.results))
        if options.write is None:
            print(table, end="")
        else:
            options.write.write_text(insert(options.write.read_text(), table))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

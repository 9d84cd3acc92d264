"""Timing of CUDA graphs, and the rows that benchmarks append to bench/results.

Variants of a case are checked first and a failing check stops the benchmark; the timed replays of all variants are
interleaved (A B A B) in one process, so that clocks and neighbours disturb them alike.
"""

import argparse
import dataclasses
import datetime
import fnmatch
import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from moss_runtime.observe import percentiles

RESULTS = Path(__file__).parent / "results"
PERCENTILES = (20, 50, 80)

# Measured on an H200: bytes read and written per second by a copy, bf16 operations per second of an 8192^3 product.
COPY_BYTES_PER_SECOND = 4.25e12
MATRIX_FLOPS_PER_SECOND = 775e12

_UNITS_PER_SECOND = {"us": 1e6, "ms": 1e3}
_ROUNDS = 10
_WARM_UP_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Variant:
    """One implementation of a case.

    Attributes:
        impl: `reference`, `triton`, `cuda`, `runtime`, or the name of a baseline.
        run: The work to capture: the case, `repeats` times.
        check: Raises AssertionError unless this implementation computes the right thing on these inputs.
        check_after: Raises AssertionError unless the timed runs left what they should.
    """

    impl: str
    run: Callable[[], None]
    check: Callable[[], None]
    check_after: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed, and under which conditions.

    Attributes:
        name: Case id.
        unit: `us` or `ms`.
        bytes: Bytes one repeat must read and write.
        flops: Operations of one repeat.
        repeats: How often `Variant.run` does the case; times are divided by it.
        conditions: dtype, whether L2 is hot, lengths, whatever the number depends on.
    """

    name: str
    unit: str
    bytes: int
    flops: int
    repeats: int
    conditions: dict[str, object]

    @property
    def floor(self) -> float:
        """Least time of one repeat, in `unit`, on the measured ceilings."""
        seconds = max(self.bytes / COPY_BYTES_PER_SECOND, self.flops / MATRIX_FLOPS_PER_SECOND)
        return seconds * _UNITS_PER_SECOND[self.unit]


def bench(
    case: Case, variants: Callable[[], list[Variant]], options: argparse.Namespace, *, seconds: float = 0.5
) -> None:
    """What every benchmark does with a case: `measure` and `save`, or with `--smoke` just `smoke`.

    Args:
        case: left out unless `--case` asks for it.
        variants: makes all variants; those that `--impl` does not name are left out.
        options: of `argument_parser`.
        seconds: as in `measure`.
    """
    if not wanted(case.name, options):
        return
    chosen = [variant for variant in variants() if options.impl is None or variant.impl in options.impl]
    if options.smoke:
        smoke(case, chosen)
    elif chosen:
        save(measure(case, chosen, seconds=seconds), options)


def wanted(case: str, options: argparse.Namespace) -> bool:
    """Whether `--case` asks for a case: by name, by a pattern, or by the beginning of its name up to a slash."""
    patterns = [form for pattern in options.case or ["*"] for form in (pattern, f"{pattern}/*")]
    return any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns)


def measure(case: Case, variants: list[Variant], *, seconds: float = 0.5) -> list[dict[str, object]]:
    """Checks all variants, then times them interleaved as CUDA graphs.

    Args:
        case: What the variants compute.
        variants: At least one.
        seconds: GPU time spent on each variant.

    Returns:
        One result row per variant.

    Raises:
        AssertionError: A check failed: nothing of the case was timed, or what was is not returned.
    """
    for variant in variants:
        check(case, variant)
    graphs = [_capture(variant.run) for variant in variants]
    samples: list[list[float]] = [[] for _ in variants]
    replays = [max(1, int(seconds / _ROUNDS / _warm_up(graph))) for graph in graphs]
    for _ in range(_ROUNDS):
        for graph, count, times in zip(graphs, replays, samples, strict=True):
            times += _time_replays(graph, count)
    for variant in variants:
        variant.check_after()
    return [_row(case, variant.impl, times) for variant, times in zip(variants, samples, strict=True)]


def check(case: Case, variant: Variant) -> None:
    """Runs the check of a variant. Raises its AssertionError, with a note that names the case."""
    try:
        variant.check()
    except AssertionError as error:
        error.add_note(f"{case.name}, {variant.impl}: not timed, because its check failed")
        raise


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    # Everything is compiled and loaded before the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def _warm_up(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay, after replaying for a while."""
    start, count = time.perf_counter(), 0
    while True:
        graph.replay()
        torch.cuda.synchronize()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed > _WARM_UP_SECONDS:
            return elapsed / count


def _time_replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Seconds of each of `count` replays, enqueued without a gap."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]


def _row(case: Case, impl: str, seconds: list[float]) -> dict[str, object]:
    scale = _UNITS_PER_SECOND[case.unit] / case.repeats
    times = percentiles((scale * value for value in seconds), PERCENTILES)
    return {
        "case": case.name,
        "impl": impl,
        **{name: round(value, 4) for name, value in times.items()},
        "unit": case.unit,
        "bytes": case.bytes,
        "flops": case.flops,
        "floor": round(case.floor, 4),
        "ratio_to_floor": round(times["p50"] / case.floor, 2),
        **environment(),
        "conditions": {**case.conditions, "repeats_per_graph": case.repeats, "samples": len(seconds)},
    }


def environment() -> dict[str, object]:
    """What a row says of the machine."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _command(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _commit() -> str:
    """Commit of the working tree, with `-dirty` if tracked files differ from it."""
    return _command("git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--dirty", "--exclude=*")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has; `bench` and `save` read them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU; nothing is timed or written")
    parser.add_argument("--case", nargs="+", metavar="CASE", help="only these: names, their beginnings, or patterns")
    parser.add_argument("--impl", nargs="+", metavar="IMPL", help="only these implementations and baselines")
    parser.add_argument("--dry-run", action="store_true", help="print the rows without writing them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files (%(default)s)")
    parser.add_argument("--commit", help="short id of the measured commit, where git cannot tell it")
    return parser


def save(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    """Prints rows and, unless it is a dry run, appends them to RESULTS/<gpu>/<date>-<commit>.jsonl."""
    for row in rows:
        spread = f"{row['p20']:10.3f} {row['p50']:10.3f} {row['p80']:10.3f} {row['unit']}"
        floor = f"   {row['ratio_to_floor']:8.1f} x floor" if "ratio_to_floor" in row else ""
        print(f"{row['case']:32} {row['impl']:16} {spread}{floor}", flush=True)
    if options.dry_run:
        return
    commit, now = options.commit or _commit(), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    path = options.results / gpu / f"{now[:10]}-{commit}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row | {"sha": commit, "time": now}) + "\n" for row in rows)


def smoke(case: Case, variants: list[Variant]) -> None:
    """Checks and runs each variant once, without a GPU and without a number worth keeping."""
    for variant in variants:
        check(case, variant)
        variant.run()
        variant.check_after()
        print(f"{case.name:32} {variant.impl:16} ok", flush=True)

"""All benchmarks, or some of their cases; and what their rows say.

python -m bench                                         # everything, on a GPU: minutes to an hour
python -m bench --case local_frame codec_chunk/B64      # cases by the beginning of their names
python -m bench --case 'codec_chunk/*/T1' --impl runtime torch_graph
python -m bench --smoke                                 # checks all on a CPU, tiny shapes, no numbers
python -m bench --compare A.jsonl B.jsonl               # what became faster
python -m bench --plot results.png                      # recorded rows against their floors
"""

import argparse
import fnmatch
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import harness
from bench.compare import compare_files
from bench.plot import plot
from moss_runtime.errors import UserError

ROOT = Path(__file__).parents[1]
# Benchmark -> what the names of its cases begin with.
BENCHMARKS = {
    "sample_codebook": ("sample_codebook",),
    "sample_head": ("sample_head",),
    "local_frame": ("local_frame",),
    "ring_attention": ("ring_attention", "ring_kv_write"),
    "backbone": ("backbone_linear", "paged_attention", "backbone_step"),
    "prefill_linear": ("prefill_linear",),
    "codec_chunk": ("codec_chunk",),
    "frame_graph": ("frame_graph", "prefill"),
    "engine": ("engine",),
    "host": ("host",),
}
FAILED, BAD_INPUT = 1, 2


def selected(patterns: Sequence[str] | None) -> list[str]:
    """Benchmarks that may have cases of these names or patterns; None: all.

    Raises:
        UserError: a pattern fits none of them.
    """
    chosen = set()
    for pattern in patterns or ["*"]:
        first = pattern.split("/")[0]
        found = [name for name, stems in BENCHMARKS.items() if any(fnmatch.fnmatchcase(stem, first) for stem in stems)]
        if not found:
            known = ", ".join(stem for stems in BENCHMARKS.values() for stem in stems)
            raise UserError(f"--case: no case begins as {pattern!r} does; there are {known}")
        chosen |= set(found)
    return [name for name in BENCHMARKS if name in chosen]


def forwarded(options: argparse.Namespace) -> list[str]:
    """The options that a benchmark gets."""
    words = ["--results", str(options.results.resolve())]
    words += ["--commit", options.commit] if options.commit else []
    for name in ("smoke", "dry_run"):
        words += ["--" + name.replace("_", "-")] if getattr(options, name) else []
    for name in ("case", "impl"):
        words += [f"--{name}", *getattr(options, name)] if getattr(options, name) else []
    return words


def run(options: argparse.Namespace) -> int:
    """Run the benchmarks one after the other, each in a process of its own, which leaves the GPU's memory empty.

    Returns:
        Exit code: 1 if one of them failed; the others have run all the same.

    Raises:
        UserError: there is no such case, or no GPU for it.
    """
    names, failed, cases = selected(options.case), [], 0
    without_gpu = names if options.smoke else ["host"] if options.dry_run else []
    if not torch.cuda.is_available() and set(names) - set(without_gpu):
        raise UserError("no CUDA device here; without one there are --smoke and --case host --dry-run")
    for name in names:
        command = [sys.executable, "-m", f"bench.bench_{name}", *forwarded(options)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                cases += line.partition("/")[0] in BENCHMARKS[name]
        failed += [name] if process.returncode else []
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return FAILED
    if not cases:
        raise UserError("no benchmark has a case and an implementation of these names")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = harness.argument_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.prog = "python -m bench"
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="result files; measures nothing")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows in --results; measures nothing")
    options = parser.parse_args(arguments)
    try:
        if options.compare:
            from rich.console import Console

            console = Console()
            # What is piped to a file is not cut at 80 columns.
            console.width = console.width if console.is_terminal else 160
            console.print(compare_files(*options.compare))
        elif options.plot:
            plot(options.results, options.plot)
        else:
            return run(options)
    except (UserError, ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())

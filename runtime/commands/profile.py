"""`moss-tts profile`: where the time of a stage goes."""

import argparse
import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from moss_kernels import SamplingParams
from moss_runtime.commands.bench_engine import SIZES, Workload, for_load, random_engine
from moss_runtime.commands.common import (
    add_checkpoint_arguments,
    add_device_arguments,
    device_and_dtype,
    positive,
    quiet_libraries,
)
from moss_runtime.engine import EngineConfig, load_engine
from moss_runtime.errors import UserError
from moss_runtime.files import replacing
from moss_runtime.graphs import CodecChunk
from moss_runtime.graphs.capture import BUCKETS, GraphSet
from moss_runtime.graphs.prefill import PIECE, cut
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.hub import checkpoint_directory, codec_directory
from moss_runtime.model.codec import Codec
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import Range, annotate, torch_ranges
from moss_runtime.observe.timeline import Timeline, device_spans
from moss_runtime.observe.traffic import Traffic, bytes_by_kernel, local_frame_bytes, mean_bytes
from moss_runtime.optional import require
from moss_runtime.random_weights import codec_config, random_codec, random_model, random_prompts

# Passes ahead of the first that is timed, and those that tell what kernels move.
WARM_UPS, EAGER = 3, 2
REQUEST_FRAMES = 8

Pass = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a stage runs.

    Attributes:
        one_pass: enqueues the work once.
        eager: the same without graphs; None where passes differ, so that bytes cannot be brought to kernels.
        moved: bytes of a run of kernels that no operation launches, by part of their names.
    """

    one_pass: Pass
    eager: Pass | None = None
    moved: Mapping[str, int] = dataclasses.field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=STAGES, help="what to run")
    parser.add_argument("--rows", type=positive, default=1, help="requests at a time (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=positive, default=150, help="context of a frame, or length of a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--frames", type=positive, help=f"of a codec chunk (default: 1), or of an engine's request ({REQUEST_FRAMES})"
    )
    parser.add_argument("--passes", type=positive, default=10, help="how often it runs (default: %(default)s)")
    parser.add_argument("--top", type=positive, default=20, help="lines of the table (default: %(default)s)")
    parser.add_argument("-o", "--output", metavar="JSON", help="Chrome trace to write (default: moss-STAGE.trace.json)")
    parser.add_argument(
        "--ranges-only", action="store_true", help="run it under NVTX for another profiler; prints and writes nothing"
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="of the random model, without --model")
    add_checkpoint_arguments(parser, model_required=False)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    require("rich", "profile")
    from rich.console import Console

    device, dtype = device_and_dtype(args)
    if args.rows > BUCKETS[-1]:
        raise UserError(f"--rows must be at most {BUCKETS[-1]}, got {args.rows}")
    if args.model is None and args.codec is not None and args.stage != "codec":
        raise UserError("--codec goes with --model")
    if args.ranges_only and device.type != "cuda":
        raise UserError("--ranges-only needs a CUDA device: elsewhere there are no NVTX ranges")
    output = args.output or f"moss-{args.stage}.trace.json"
    # A file that cannot be written is found before anything runs.
    with (
        contextlib.nullcontext() if args.ranges_only else replacing(output, ".json") as path,
        torch.no_grad(),
        STAGES[args.stage](args, device, dtype) as work,
    ):
        _passes(work.one_pass, WARM_UPS, device)
        if args.ranges_only:
            torch.cuda.profiler.start()
            _passes(work.one_pass, args.passes, device)
            torch.cuda.profiler.stop()
            return
        seconds = _passes(work.one_pass, args.passes, device)
        moved = _moved(work, device)
        profile = _profiled(work.one_pass, args.passes, device)
        profile.export_chrome_trace(str(path))
    spans = device_spans(profile, device)
    moved |= {span.name: size for span in spans for part, size in work.moved.items() if part in span.name}
    timeline = Timeline.of(spans, moved)
    print(f"{args.stage}, {args.rows} rows, {args.passes} passes on {device}, {dtype}: {timeline.summary()}")
    # A profiler stretches gaps between kernels.
    print(f"the same without the profiler: {1e6 * seconds:.0f} us")
    console = Console()
    # What is piped to a file is not cut at 80 columns.
    console.width = console.width if console.is_terminal else 160
    console.print(timeline.table(args.top, "kernel" if device.type == "cuda" else "operator"))
    print(f"trace: {output} (chrome://tracing or ui.perfetto.dev)")
    print(f"the same ranges in Nsight Systems: {nsys_command(args)}")


def nsys_command(args: argparse.Namespace) -> str:
    """The command line that profiles the same passes with Nsight Systems."""
    words = ["nsys", "profile", "--trace=cuda,nvtx", "--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"]
    words += ["--capture-range-end=stop", f"--output=moss-{args.stage}", "moss-tts", "profile", args.stage]
    for name in ("rows", "tokens", "frames", "passes", "size", "model", "codec", "device", "dtype"):
        value = None if name == "size" and args.model is not None else getattr(args, name)
        # Without a GPU at hand the line is for a machine that has one.
        if value is not None and (name, value) != ("device", "cpu"):
            words += [f"--{name}", str(value)]
    return shlex.join([*words, "--ranges-only"])


def _profiled(one_pass: Pass, count: int, device: torch.device) -> torch.profiler.profile:
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if device.type == "cuda" else [])]
    # The engine works in threads of its own.
    threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        quiet_libraries(),
        torch_ranges(),
        torch.profiler.profile(activities=activities, experimental_config=threads) as profile,
    ):
        _passes(one_pass, count, device)
    return profile


def _passes(one_pass: Pass, count: int, device: torch.device) -> float:
    """Seconds that so many passes took, the device's work included."""
    start = time.perf_counter()
    for _ in range(count):
        one_pass()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _moved(work: Work, device: torch.device) -> dict[str, float]:
    """Bytes that a run must move, of the kernels of which they are known."""
    if work.eager is None:
        return {}
    with Traffic() as traffic:
        work.eager()
    if device.type != "cuda":
        return mean_bytes(traffic.calls)
    return bytes_by_kernel(_profiled(work.eager, 1, device).events(), traffic.calls)


def _without_graphs(graphs: GraphSet, one_pass: Pass) -> Pass:
    def eager() -> None:
        graphs.enabled = False
        one_pass()
        graphs.enabled = True

    return eager


def _model(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> MossTTS:
    if args.model is None:
        return random_model(args.size, device=device, dtype=dtype)
    return MossTTS.from_pretrained(checkpoint_directory(args.model), dtype=dtype, device=device)


@contextlib.contextmanager
def _frame(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """A frame of every row, at a context of `--tokens`."""
    frames = WARM_UPS + 2 * args.passes + EAGER
    model = _model(args, device, dtype)
    most = model.config.backbone.max_position_embeddings - frames
    if args.tokens > most:
        raise UserError(f"--tokens must be at most {most} for {frames} frames of this model, got {args.tokens}")
    runtime = Runtime(model, rows=args.rows, max_tokens=args.tokens + frames, max_frames=frames)
    runtime.warm_up(prefill=False)
    pool, kv, graphs = runtime.pool, runtime.kv, runtime.frame.graphs
    with torch.cuda.stream(graphs.stream):
        kv.key_pages[:, :-1].normal_(std=1.5)
        kv.value_pages[:, :-1].normal_()
        pool.staging.normal_()
        for row in range(args.rows):
            pool.acquire(row, SamplingParams(), seed=row, max_frames=frames, position=args.tokens)
            kv.reserve(row, args.tokens + frames)

    def one_pass() -> None:
        with torch.cuda.stream(graphs.stream):
            pool.finished[: args.rows].zero_()  # a row that has drawn "stop" goes on
            with annotate(Range.FRAME):
                runtime.frame.launch(range(args.rows))

    moved = {} if runtime.frame.decoder is None else {"local_frame_kernel": local_frame_bytes(model.frame_weights())}
    yield Work(one_pass, _without_graphs(graphs, one_pass), moved)


@contextlib.contextmanager
def _prefill(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """Prompts of `--tokens` rows, all at once."""
    if not 1 < args.tokens <= PIECE:
        raise UserError(f"--tokens must be in 2..{PIECE} here, got {args.tokens}")
    model = _model(args, device, dtype)
    runtime = Runtime(model, rows=args.rows, max_tokens=args.tokens, max_frames=1)
    prefill = runtime.prefill
    with torch.cuda.stream(prefill.graphs.stream):
        for row in range(args.rows):
            runtime.kv.reserve(row, args.tokens)
        prefill.warm_up()
    prompts = random_prompts(model, [args.tokens] * args.rows)
    pieces = [cut(row, prompt, prefill.piece)[0] for row, prompt in enumerate(prompts)]

    def one_pass() -> None:
        waiting = pieces
        with torch.cuda.stream(prefill.graphs.stream):
            while waiting:
                batch = prefill.next_pass(waiting)
                waiting = waiting[len(batch) :]
                with annotate(Range.PREFILL):
                    prefill.run(batch)

    yield Work(one_pass, _without_graphs(prefill.graphs, one_pass))


@contextlib.contextmanager
def _codec(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """A chunk of `--frames` frames of every stream."""
    if args.model is None and args.codec is None:
        codec = random_codec(codec_config(args.size), device=device, dtype=dtype)
    else:
        directory = None if args.model is None else checkpoint_directory(args.model)
        codec = Codec.from_pretrained(codec_directory(args.codec, directory), dtype=dtype, device=device)
    frames, config = args.frames or 1, codec.config
    chunk = CodecChunk(codec, args.rows, max_batch=args.rows, frames=(frames,))
    chunk.capture([args.rows])
    codes = torch.randint(config.codebook_size, (args.rows, frames, config.codebooks), device=device)
    slots = torch.arange(args.rows, dtype=torch.int32, device=device)
    valid = torch.full_like(slots, frames)
    out = torch.empty(args.rows, config.channels, frames * config.samples_per_frame, device=device)

    def one_pass() -> None:
        with annotate(Range.CODEC_CHUNK):
            chunk(codes, slots, valid, out)

    yield Work(one_pass, lambda: chunk.compute(args.rows, frames))


@contextlib.contextmanager
def _engine(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """A request of every client, from its beginning to its end."""
    config = for_load(EngineConfig(), args.rows)
    if args.model is None:
        engine = random_engine(args.size, config, device=device, dtype=dtype)
        engine.warm_up()
    else:
        model = checkpoint_directory(args.model)
        engine = load_engine(config, model, codec_directory(args.codec, model), device=device, dtype=dtype)
    with engine:
        workload, frames = Workload(engine), args.frames or REQUEST_FRAMES
        requests = [dataclasses.replace(workload(index), max_frames=frames) for index in range(args.rows)]

        def one_pass() -> None:
            with annotate(Range.ENGINE):
                handles = [engine.submit(request) for request in requests]
                failed = [error for handle in handles if (error := handle.result().error) is not None]
            if failed:
                raise UserError(f"a request failed: {failed[0]}")

        yield Work(one_pass)


STAGES = {"frame": _frame, "prefill": _prefill, "codec": _codec, "engine": _engine}

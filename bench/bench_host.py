"""What the host does for each request and frame, by pytest-benchmark: `python -m bench.bench_host`.

The engine's thread rests and its device takes no time, so that what is left is the host's own: it holds up nothing as
long as a step of the scheduler takes less than the frame that the device makes meanwhile.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import harness
from moss_kernels import SamplingParams
from moss_runtime.commands.bench_engine import PROMPT_TOKENS, RandomPrompts, random_prompt
from moss_runtime.demo_checkpoint import write_demo_checkpoint
from moss_runtime.engine import Engine, EngineConfig, Request
from moss_runtime.engine.chunking import Chunking, Stream
from moss_runtime.engine.stats import DISTRIBUTIONS
from moss_runtime.graphs.requests import FrameDelta
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.observe import percentiles
from moss_runtime.random_weights import codec_config, random_codec, random_model

ROWS, STEPS, SUBMITS = 64, 150, 1000
REFERENCE_FRAMES = 38
TEXT = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade. " * 4


@pytest.fixture(scope="module")
def engine():
    """An engine whose thread rests and whose device does nothing, but says that each row has one frame more."""
    frames = 2 * STEPS
    sizes = {"rows": ROWS, "max_tokens": PROMPT_TOKENS + frames, "max_frames": frames}
    config = EngineConfig.from_mode("streaming-balanced", **sizes)
    model = random_model("tiny", device="cpu", dtype=torch.float32)
    codec = random_codec(codec_config("tiny"), device="cpu")
    with mock.patch.object(Engine, "_run"), Engine(config, model, codec, RandomPrompts(model.config)) as engine:
        report = engine.runtime.frame.buffers.report
        frame, prefill, mixed = (getattr(engine.runtime, part).graphs for part in ("frame", "prefill", "mixed"))
        frame.run = mixed.run = lambda bucket, count, *tokens: report[:bucket].add_(count)
        prefill.run = lambda *shape: None
        engine.stage.chunk.compute = lambda *shape: None
        yield engine


def _request(engine: Engine) -> Request:
    prompt = random_prompt(engine.runtime.model.config, PROMPT_TOKENS, torch.Generator().manual_seed(0))
    return Request(prompt=prompt, params=SamplingParams(seed=1))


@pytest.mark.benchmark(group="host/prompt")
def test_prompt(benchmark, tmp_path):
    """A text of about 150 tokens and 3 s of reference audio."""
    write_demo_checkpoint(tmp_path)
    builder = PromptBuilder(tmp_path / "tokenizer.json", ModelConfig.from_directory(tmp_path))
    codes = torch.zeros(REFERENCE_FRAMES, 12, dtype=torch.int16)
    prompt = benchmark(builder.build, TEXT, references=[codes], language="English")
    assert len(prompt) > len(builder.build("", references=[codes], language="English")) > REFERENCE_FRAMES


@pytest.mark.benchmark(group="host/submit")
def test_submit(benchmark, engine):
    """From the caller's request to the engine's inbox."""
    request, inbox = _request(engine), engine._inbox
    handle = benchmark.pedantic(engine.submit, (request,), setup=inbox.clear, rounds=SUBMITS, warmup_rounds=10)
    assert handle.request is request and inbox[0].prompt.equal(request.prompt)
    inbox.clear()


@pytest.mark.benchmark(group=f"host/scheduler_step/B{ROWS}")
def test_scheduler_step(benchmark, engine):
    """A launch, and what the host learns of it: a frame of every row, on its way to the codec."""
    scheduler, request = engine._scheduler, _request(engine)
    handles = [engine.submit(request) for _ in range(ROWS)]
    engine._take_inbox()
    for handle in handles:
        handle._channel.unbounded = True
    # All come at once: each prefill pass takes some of them.
    while len(scheduler.live) < ROWS or not all(job.stream.known for job in scheduler.live.values()):
        scheduler.step()
    before = [job.stream.known for job in scheduler.live.values()]
    benchmark.pedantic(scheduler.step, rounds=STEPS, warmup_rounds=5)
    grown = {job.stream.known - known for job, known in zip(scheduler.live.values(), before, strict=True)}
    assert len(grown) == 1 and min(grown) >= 1
    scheduler.end_all("abort")


@pytest.mark.benchmark(group=f"host/frame_delta/B{ROWS}")
def test_frame_delta(benchmark, engine):
    """Four frames of every row from the stage that makes them to the codec's input."""
    history, stage, count = engine.runtime.pool.history, engine.stage, 4
    history.random_(0, 64)
    deltas = [FrameDelta(row, 0, 0, count, frames, None, False, None) for row, frames in enumerate(history[:ROWS])]
    parts = [(row, 0, count) for row in range(ROWS)]

    def hand_over() -> torch.Tensor:
        stage.receive(deltas)
        codes = stage.transport.gather(parts, count)
        for row in range(ROWS):
            stage.transport.forget(row)
        return codes

    assert benchmark(hand_over).equal(history[:ROWS, :count])


@pytest.mark.benchmark(group=f"host/chunking/B{ROWS}")
def test_chunking(benchmark, engine):
    """Which streams go into the next codec call, where each has something that waits."""
    chunking = Chunking(engine.config, engine.stage.codec.config.frame_rate)
    streams = [Stream(known=100, taken=100 - row % 12, chunks=5, horizon=10.0) for row in range(ROWS)]

    def choose() -> list[tuple[Stream, int]]:
        chunking.update(streams, 0.0)
        return chunking.select(streams, 9.99, idle=True)

    chosen = benchmark(choose)
    assert chosen and all(0 < count <= stream.pending for stream, count in chosen)


@pytest.mark.benchmark(group="host/snapshot")
def test_snapshot(benchmark, engine):
    """All numbers of an engine that has served thousands of requests."""
    engine.stats.reset()
    for index in range(10_000):
        for name in DISTRIBUTIONS:
            engine.stats.add(name, index / 1000)
    shot = benchmark(engine.snapshot)
    assert shot["rtf"]["count"] == 10_000 and shot["rtf"]["p50"] > 5


class _Cases:
    """Tells pytest which cases to run, and says how they went."""

    def __init__(self, options: argparse.Namespace):
        self._options = options

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.user_properties.append(("case", item.get_closest_marker("benchmark").kwargs["group"]))
        items[:] = [item for item in items if harness.wanted(dict(item.user_properties)["case"], self._options)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(report.longreprtext, file=sys.stderr)
        elif self._options.smoke and report.when == "call":
            print(f"{dict(report.user_properties)['case']:32} {'runtime':16} ok", flush=True)


def rows_of(report: dict) -> list[dict[str, object]]:
    """Result rows of what pytest-benchmark has written, with its data."""
    cpu = report["machine_info"]["cpu"].get("brand_raw")
    rows = []
    for one in report["benchmarks"]:
        times = percentiles((1e6 * seconds for seconds in one["stats"]["data"]), harness.PERCENTILES)
        numbers = {name: round(value, 3) for name, value in times.items()} | {"unit": "us"}
        conditions = {"cpu": cpu, "samples": len(one["stats"]["data"])}
        rows.append({"case": one["group"], "impl": "runtime", **numbers, "conditions": conditions})
    return rows


def main() -> int:
    options = harness.argument_parser(__doc__).parse_args()
    if "runtime" not in (options.impl or ["runtime"]):
        return 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        words = [__file__, "-p", "no:terminal", "-p", "no:cacheprovider", "--override-ini=addopts="]
        if options.smoke:
            words.append("--benchmark-disable")
        else:
            words += ["--benchmark-only", "--benchmark-quiet", "--benchmark-save-data", f"--benchmark-json={path}"]
        code = pytest.main(words, plugins=[_Cases(options)])
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return 0
        if code == 0 and not options.smoke:
            machine = {} if options.dry_run else harness.environment()
            harness.save([row | machine for row in rows_of(json.loads(path.read_text()))], options)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())

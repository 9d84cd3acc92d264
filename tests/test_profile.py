"""`moss-tts profile`: what is counted of a timeline, and each stage with the demo checkpoint."""

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

from moss_runtime.cli import _parser, main
from moss_runtime.commands import profile
from moss_runtime.demo_checkpoint import write_demo_checkpoint
from moss_runtime.observe import Range, annotate, torch_ranges
from moss_runtime.observe.timeline import Span, Timeline, device_spans

CPU = torch.device("cpu")
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("profile") / "demo"
    write_demo_checkpoint(directory)
    return directory


def test_gaps_are_where_nothing_runs():
    # b runs beside a, c comes 2 after both, a again at once.
    spans = [Span("c", 12, 13), Span("a", 0, 10), Span("b", 3, 5), Span("a", 13, 14), Span("b", 20, 21)]
    timeline = Timeline.of(spans)
    assert (timeline.elapsed, timeline.busy, timeline.gaps) == (21, 13, [2, 6])
    found = {kernel.name: (kernel.count, kernel.total, kernel.added, kernel.gaps) for kernel in timeline.kernels}
    assert found == {"a": (2, 11, 11, 0), "b": (2, 3, 1, 6), "c": (1, 1, 1, 2)}
    assert [kernel.name for kernel in timeline.kernels] == ["a", "b", "c"]
    assert timeline.kernels[0].share == pytest.approx(11 / 13)
    assert timeline.summary() == "21 us, busy 13 us in 5 runs, 2 gaps of 4.00 us, the longest 6.0 us"
    assert timeline.table(2).row_count == 2


def test_bytes_per_second_where_they_are_known():
    spans = [Span("a", 0, 10), Span("a", 10, 20), Span("b", 20, 25)]
    timeline = Timeline.of(spans, {"a": 3e4, "c": 1.0})
    assert [kernel.moved for kernel in timeline.kernels] == [6e4, None]
    (rates,) = (list(column.cells) for column in timeline.table(2).columns if column.header == "GB/s")
    assert rates == ["3.0", "-"]


def test_who_begins_early_and_waits_costs_what_follows():
    spans = [Span("a", 0, 10), Span("b", 2, 14), Span("a", 11, 20)]
    timeline = Timeline.of(spans, {"b": 8e3})
    found = {kernel.name: (kernel.total, kernel.added, kernel.share) for kernel in timeline.kernels}
    assert found == {"a": (19, 16, 0.8), "b": (12, 4, 0.2)} and timeline.busy == 20
    (rates,) = (list(column.cells) for column in timeline.table(2).columns if column.header == "GB/s")
    assert rates == ["-", "2.0"]


def test_nothing_ran():
    timeline = Timeline.of([])
    assert (timeline.kernels, timeline.elapsed, timeline.busy) == ([], 0, 0)
    assert "0 gaps" in timeline.summary()


def test_operators_inside_others_do_not_count_twice():
    with torch_ranges(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        with annotate(Range.FRAME):
            torch.ones(8, 8).matmul(torch.ones(8, 8))
        torch.zeros(3)
    assert Counter(span.name for span in device_spans(run, CPU)) == {
        "aten::ones": 2,
        "aten::matmul": 1,
        "aten::zeros": 1,
    }
    assert {"moss/frame", "aten::mm"} <= {event.name for event in run.events()}


def test_ranges_are_for_the_torch_profiler_only_inside():
    with torch_ranges():
        assert isinstance(annotate(Range.FRAME), torch.profiler.record_function)
    assert not isinstance(annotate(Range.FRAME), torch.profiler.record_function)


@pytest.mark.parametrize(
    ("stage", "ranges", "operators"),
    [
        ("frame", {"moss/frame": 2}, {"moss::sample_codebook": 26, "moss::paged_attention": 4}),
        # Prompts of one length are one pass.
        ("prefill", {"moss/prefill": 2}, {"moss::kv_append": 4, "moss::prefill_linear": 10}),
        ("codec", {"moss/codec_chunk": 2}, {"moss::chunk_prologue": 2, "moss::ring_attention": 14}),
        ("engine", {"moss/engine": 2, "moss/admit": 4}, {}),
    ],
)
def test_stages(demo, tmp_path, capfd, stage, ranges, operators):
    trace = tmp_path / "trace.json"
    options = ["--model", str(demo), "--device", "cpu", "--rows", "2", "--passes", "2", "--top", "200"]
    options += ["--frames", "3"] * (stage == "engine") + ["-o", str(trace)]
    assert main(["profile", stage, *options]) == 0
    output, notes = capfd.readouterr()
    assert notes == ""
    found = Counter(event.get("name") for event in json.loads(trace.read_text())["traceEvents"])
    assert {name: found[name] for name in ranges} == ranges
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    table = {name: int(count) for name, count, *_ in lines}
    if stage == "engine":
        # Two requests of three frames, which may start one after the other; chunks of one frame and of two.
        assert table["moss::frame_bookkeeping_end"] >= 6 and found["moss/codec_chunk"] >= 4
    assert {name: table[name] for name in operators} == operators
    rates = {name: rate for name, _, _, _, _, rate, *_ in lines}
    known = {
        "moss::paged_attention",
        "moss::kv_append",
        "moss::prefill_linear",
        "moss::ring_attention",
    } & operators.keys()
    assert all(float(rates[name]) >= 0 for name in known) and rates["aten::select"] == "-"
    assert sum(float(share.rstrip("%")) for *_, share, _ in lines) == pytest.approx(100, abs=5)
    assert f"{stage}, 2 rows, 2 passes on cpu" in output and "gaps of" in output


def test_the_nsys_line_runs_the_same_passes(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codec = demo / "audio_tokenizer"
    words = ["codec", "--codec", str(codec), "--frames", "2", "--passes", "1", "--device", "cpu"]
    assert main(["profile", *words]) == 0
    assert (tmp_path / "moss-codec.trace.json").is_file()
    line = shlex.split(capsys.readouterr().out.splitlines()[-1].split(": ", 1)[1])
    assert line[:2] == ["nsys", "profile"] and "--capture-range=cudaProfilerApi" in line
    inner = line[line.index("moss-tts") + 1 :]
    asked, again = (vars(_parser().parse_args(arguments)) for arguments in (["profile", *words], inner))
    assert {name for name in asked if asked[name] != again[name]} == {"device", "ranges_only"}
    assert again["ranges_only"] and again["device"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["frame", "--rows", "129", "--size", "tiny"],
        ["prefill", "--tokens", "600", "--size", "tiny"],
        ["frame", "--tokens", "9000", "--size", "tiny"],
        ["frame", "--codec", "somewhere"],
        ["frame", "--size", "tiny", "--ranges-only"],
        ["whole"],
    ],
)
def test_refusals(capsys, words):
    with_device = ["profile", *words, "--device", "cpu"]
    try:
        code = main(with_device)
    except SystemExit as leave:
        code = leave.code
    assert code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_the_output_is_tried_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "STAGES", {"frame": None})
    assert main(["profile", "frame", "-o", str(tmp_path / "none" / "trace.json")]) == 2
    assert "trace.json: cannot be written" in capsys.readouterr().err


def test_stages_of_the_readme():
    line = next(line for line in README.read_text().splitlines() if line.startswith("| `moss-tts profile"))
    assert all(f"`{stage}`" in line for stage in profile.STAGES)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", list(profile.STAGES))
def test_stages_on_a_gpu(tmp_path, capsys, stage):
    options = ["--size", "tiny", "--rows", "2", "--passes", "2", "-o", str(tmp_path / "trace.json")]
    assert main(["profile", stage, *options]) == 0
    output = capsys.readouterr().out
    assert "kernel" in output and "gaps of" in output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    rates = {name: float(rate) for name, _, _, _, _, rate, *_ in lines if rate != "-"}
    kernel = {"frame": "backbone_linear", "prefill": "kv_append", "codec": "ring_attention"}.get(stage)
    assert not rates if kernel is None else any(kernel in name and 0 < rates[name] < 2e4 for name in rates)
    assert main(["profile", stage, *options, "--ranges-only"]) == 0

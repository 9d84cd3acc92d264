"""`python -m bench`: what it selects, what it says of two result files, and what it would draw."""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import bench_engine, bench_host, harness
from bench.compare import FASTER, GONE, NEW, NOISE, SLOWER, as_table, compare
from bench.plot import floor_ratios, plot

ROOT = Path(__file__).parents[1]
ROW = {"case": "codec_chunk/B1/T1", "impl": "runtime", "unit": "ms", "p20": 1.9, "p50": 2.0, "p80": 2.1, "gpu": "card"}
ROW |= {"sha": "abc", "ratio_to_floor": 4.0}


def options(*words: str) -> argparse.Namespace:
    return harness.argument_parser("").parse_args(words)


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(ROW | row) + "\n" for row in rows))
    return path


def test_cases_are_wanted_by_name_beginning_or_pattern():
    names = ["local_frame/B1", "local_frame/B16", "local_frame/B1/open", "codec_chunk/B1/T15", "codec_chunk/B64/T15"]

    def wanted(*patterns):
        chosen = options("--case", *patterns) if patterns else options()
        return [name for name in names if harness.wanted(name, chosen)]

    assert wanted() == names
    assert wanted("local_frame/B1") == ["local_frame/B1", "local_frame/B1/open"]
    assert wanted("codec_chunk") == names[3:]
    assert wanted("*/B1/T15", "local_frame/B16") == ["local_frame/B16", "codec_chunk/B1/T15"]
    assert wanted("local") == []


def test_only_wanted_implementations_run(capsys):
    ran = []

    def variants():
        return [harness.Variant(name, lambda name=name: ran.append(name), lambda: None) for name in ("a", "b", "c")]

    case = harness.Case("x/B1", "us", 1, 1, 1, {})
    harness.bench(case, variants, options("--smoke", "--impl", "c", "a"))
    assert ran == ["a", "c"]
    harness.bench(case, lambda: pytest.fail("made"), options("--smoke", "--case", "y"))
    capsys.readouterr()


def test_what_the_runs_left_is_checked():
    def wrong():
        raise AssertionError("a code is out of range")

    variant = harness.Variant("cuda", lambda: None, lambda: None, wrong)
    with pytest.raises(AssertionError, match="out of range"):
        harness.smoke(harness.Case("x/B1", "us", 1, 1, 1, {}), [variant])


def test_benchmarks_are_those_of_the_folder():
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    assert set(program.BENCHMARKS) == files
    # A name that no benchmark has would select none.
    for name, stems in program.BENCHMARKS.items():
        source = (ROOT / "bench" / f"bench_{name}.py").read_text() + (
            ROOT / "moss_kernels/testing/cases.py"
        ).read_text()
        assert all(f'"{stem}/' in source for stem in stems), name


def test_selection_of_benchmarks():
    assert program.selected(None) == list(program.BENCHMARKS)
    assert program.selected(["prefill/B1", "codec_chunk/*"]) == ["codec_chunk", "frame_graph"]
    assert program.selected(["ring_*/B64"]) == ["ring_attention"]
    with pytest.raises(program.UserError, match="'codec'"):
        program.selected(["local_frame", "codec"])


def test_options_reach_the_benchmarks(tmp_path):
    words = [
        "--smoke",
        "--dry-run",
        "--case",
        "a",
        "b/*",
        "--impl",
        "cuda",
        "--results",
        str(tmp_path),
        "--commit",
        "x",
    ]
    assert vars(options(*program.forwarded(options(*words)))) == vars(options(*words))


def test_smoke_of_some_cases():
    command = [sys.executable, "-m", "bench", "--smoke"]
    chosen = [*command, "--case", "sample_codebook/B1", "--impl", "reference"]
    output = subprocess.run(chosen, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in output.splitlines()]
    cases = ["sample_codebook/B1", "sample_codebook/B1/defaults", "sample_codebook/B1/open"]
    assert lines == [[case, "reference", "ok"] for case in cases]
    nothing = subprocess.run([*command, "--case", "sample_codebook/B7"], cwd=ROOT, capture_output=True, text=True)
    assert nothing.returncode == 2 and "no benchmark has a case" in nothing.stderr


HOST = ("prompt", "submit", "scheduler_step/B64", "frame_delta/B64", "chunking/B64", "snapshot")


def test_smoke_of_the_host():
    command = [sys.executable, "-m", "bench", "--smoke", "--case", "host"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in output.splitlines()] == [[f"host/{case}", "runtime", "ok"] for case in HOST]


def test_a_host_benchmark_that_is_wrong_fails():
    lines = [
        "import sys",
        "from bench import bench_host",
        "bench_host.Chunking.select = lambda *_, **__: []",
        "sys.argv = ['bench_host', '--smoke', '--case', 'host/chunking']",
        "sys.exit(bench_host.main())",
    ]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and "assert" in ran.stderr and " ok" not in ran.stdout


def test_rows_of_the_host():
    one = {"group": "host/submit", "stats": {"data": [3e-6, 1e-6, 2e-6, 4e-6, 5e-6, 6e-6]}}
    (row,) = bench_host.rows_of({"machine_info": {"cpu": {"brand_raw": "a CPU"}}, "benchmarks": [one]})
    assert row["conditions"] == {"cpu": "a CPU", "samples": 6}
    numbers = ("host/submit", "runtime", 2.0, 3.5, 5.0, "us")
    assert tuple(row[name] for name in ("case", "impl", "p20", "p50", "p80", "unit")) == numbers


def test_a_failing_benchmark_fails_the_run_after_the_others(monkeypatch, capfd, tmp_path):
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "__init__.py").touch()  # ahead of the bench folder on PYTHONPATH
    (bench / "bench_local_frame.py").write_text("raise AssertionError('wrong')")
    (bench / "bench_sample_codebook.py").write_text("raise AssertionError('wrong')")
    (bench / "bench_codec_chunk.py").write_text("print('codec_chunk/B1/T1  runtime ok')")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.main(["--smoke", "--case", "local_frame", "sample_codebook", "codec_chunk"]) == 1
    output = capfd.readouterr()
    assert "codec_chunk/B1/T1" in output.out and "failed: sample_codebook, local_frame\n" in output.err


def test_verdicts():
    cases = {
        "faster": ({"p20": 0.9, "p50": 1.0, "p80": 1.1}, FASTER, 2.0),
        "slower": ({"p20": 3.9, "p50": 4.0, "p80": 4.1}, SLOWER, 0.5),
        "noise": ({"p20": 2.05, "p50": 2.2, "p80": 2.3}, NOISE, 2 / 2.2),
    }
    before = [ROW | {"case": name} for name in cases] + [ROW | {"case": "gone"}]
    after = [ROW | {"case": name} | changes for name, (changes, *_) in cases.items()] + [ROW | {"case": "new"}]
    found = {one.case: one for one in compare(before, after)}
    for name, (_, verdict, speed) in cases.items():
        assert found[name].verdict == verdict and found[name].speed == pytest.approx(speed)
    assert found["gone"].verdict == GONE and found["gone"].medians == (2.0, None) and math.isnan(found["gone"].speed)
    assert found["new"].verdict == NEW and list(found) == ["faster", "slower", "noise", "gone", "new"]
    assert as_table(found.values()).row_count == 5


def test_more_audio_is_faster_and_another_machine_is_named():
    rate = ROW | {"case": "engine/C64", "unit": "audio_s_per_s", "p20": 590.0, "p50": 600.0, "p80": 610.0}
    (one,) = compare([rate], [rate | {"p20": 890.0, "p50": 900.0, "p80": 910.0, "gpu": "other card"}])
    assert (one.verdict, one.speed, one.conditions) == (FASTER, 1.5, ("gpu",))
    # The last measurement of a case counts.
    (one,) = compare([rate], [rate | {"p50": 1.0}, rate])
    assert (one.verdict, one.speed) == (NOISE, 1.0)
    with pytest.raises(ValueError, match="audio_s_per_s in A, ms in B"):
        compare([rate], [rate | {"unit": "ms"}])


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)
    for words in ([], ["--case", "host"], ["--dry-run"]):
        assert program.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_compare_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    before = write(tmp_path / "2026-11-29-before.jsonl", {}, {"impl": "torch_graph", "p50": 4.6})
    after = write(tmp_path / "after.jsonl", {"p20": 0.9, "p50": 1.0, "p80": 1.1}, {"impl": "torch_graph", "p50": 4.6})
    assert program.main(["--compare", str(before), str(after)]) == 0
    output = capsys.readouterr().out
    assert "2.000 x" in output and "faster" in output and "noise" in output
    assert ROW["case"] in output and "2026-11-29-before" in output
    assert program.main(["--compare", str(before), str(tmp_path / "none.jsonl")]) == 2
    (tmp_path / "none.jsonl").write_text("{")
    assert program.main(["--compare", str(before), str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl, line 1: not a result row" in capsys.readouterr().err


def test_what_is_drawn():
    own, base = {"impl": "cuda"}, {"impl": "torch_graph", "p50": 5.0, "ratio_to_floor": 10.0}
    slower = {"impl": "triton", "p50": 3.0, "ratio_to_floor": 6.0}
    first = [ROW | own, ROW | slower, ROW | base, ROW | own | {"case": "codec_chunk/B7/T1"}]
    second = [ROW | own | {"case": "local_frame/B1", "ratio_to_floor": 1.5}]
    assert floor_ratios([first, second]) == {"card": [("local_frame/B1", 1.5, None), ("codec_chunk/B1/T1", 4.0, 10.0)]}
    later = [ROW | own | {"ratio_to_floor": 3.0}, ROW | own | {"gpu": "other"}]
    drawn = floor_ratios([first, second, later])
    assert drawn["card"][1] == ("codec_chunk/B1/T1", 3.0, None) and list(drawn) == ["card", "other"]
    # Baselines alone, and rows of memory without a floor, are not drawn.
    memory = {key: value for key, value in ROW.items() if key != "ratio_to_floor"}
    assert floor_ratios([[ROW | base], [memory | {"case": "engine/C128/memory"}]]) == {}


@pytest.fixture
def recorded(tmp_path):
    """Results that hold a case with a floor, and the engine's for one client."""
    rate = {"case": "engine/C1/rate", "unit": "audio_s_per_s"}
    write(tmp_path / "rows.jsonl", {"time": "1"}, {"time": "1", "case": "engine/C1"}, {"time": "1"} | rate)
    return tmp_path


@pytest.mark.parametrize("main", [program.main, bench_engine.main])
def test_a_picture_needs_matplotlib(recorded, capsys, monkeypatch, main):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["--plot", str(recorded / "plot.png"), "--results", str(recorded)]
    monkeypatch.setattr("sys.argv", ["bench", *words])
    try:
        code = main()
    except SystemExit as leave:
        code = leave.code
    assert code == 2
    assert "the plot needs the package matplotlib: pip install matplotlib" in capsys.readouterr().err.splitlines()[-1]


def test_picture(recorded):
    pytest.importorskip("matplotlib")
    plot(recorded, recorded / "plot.png")
    assert (recorded / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="no rows of cases with a floor"):
        plot(tmp_path, tmp_path / "plot.png")
    assert program.main(["--plot", str(tmp_path / "plot.png"), "--results", str(tmp_path)]) == 2
    assert "no rows" in capsys.readouterr().err

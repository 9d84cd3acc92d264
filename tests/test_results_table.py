"""The table of results in README.md: made of recorded rows alone, and as new as they are."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import harness, table

ROOT = Path(__file__).parents[1]
ROW = {"case": "codec_chunk/B1/T1", "impl": "runtime", "p50": 1.9, "unit": "ms", "ratio_to_floor": 3.8}
ROW |= {"gpu": "NVIDIA H200", "sha": "abc1234"}


def write(folder: Path, name: str, *changes: dict) -> None:
    path = folder / "nvidia-h200" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(ROW | change) + "\n" for change in changes))


def cells(folder: Path) -> list[list[str]]:
    """Cells of all rows of the rendered table, without its header."""
    lines = [line for line in table.render(table.read_rows(folder)).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_readme_is_up_to_date():
    """If it is not: python -m bench.table --write README.md"""
    readme = (ROOT / "README.md").read_text()
    assert table.insert(readme, table.render(table.read_rows(ROOT / "bench" / "results"))) == readme


def test_a_case_with_its_fastest_baseline(tmp_path):
    baselines = [{"impl": "torch_graph", "p50": 4.56}, {"impl": "torch_compile", "p50": 3.8}, {"impl": "reference"}]
    write(tmp_path, "2026-11-29-abc1234.jsonl", {}, *baselines, {"impl": "half_done", "p50": 0.1})
    expected = ["`codec_chunk/B1/T1`", "1.90 ms", "<= 2.0 ms", "3.8", "torch_compile, 3.80 ms", "2.00 x", "`abc1234`"]
    assert cells(tmp_path) == [expected]


def test_rates_are_better_when_they_are_higher(tmp_path):
    rate = {"case": "engine/C64", "unit": "audio_s_per_s"}
    write(tmp_path, "2026-11-29-abc1234.jsonl", rate | {"p50": 1234.5}, rate | {"impl": "torch_graph", "p50": 500})
    ((_, value, target, _, _, faster, _),) = cells(tmp_path)
    assert (value, target, faster) == ("1234 s of audio/s", ">= 650 s of audio/s", "2.47 x")


def test_the_latest_run_counts_and_runs_are_not_mixed(tmp_path):
    early, late = {"time": "2026-11-29T10:00:00Z"}, {"time": "2026-11-29T12:00:00Z"}
    write(tmp_path, "2026-11-29-fff.jsonl", early | {"p50": 3}, early | {"impl": "torch_graph", "p50": 1})
    write(tmp_path, "2026-11-29-aaa.jsonl", late | {"p50": 2.5, "sha": "a"}, late | {"p50": 2.4, "sha": "a"})
    ((_, value, *_, baseline, faster, sha),) = cells(tmp_path)
    assert (value, baseline, faster, sha) == ("2.40 ms", "", "", "`a`")
    # A run of baselines alone hides nothing.
    write(tmp_path, "2026-11-30-bbb.jsonl", {"impl": "torch_graph", "p50": 9})
    assert cells(tmp_path)[0][1] == "2.40 ms"


def test_cases_are_those_with_a_target_in_its_order(tmp_path):
    names = ["local_frame/B128", "local_frame/B2", "local_frame/B2/off", "sample_codebook/B64"]
    write(tmp_path, "2026-11-29-abc.jsonl", *({"case": name, "unit": "us"} for name in names))
    assert [row[0] for row in cells(tmp_path)] == ["`sample_codebook/B64`", "`local_frame/B2`", "`local_frame/B128`"]


@pytest.mark.parametrize("line", ["{", "3", '{"p50": 1}', '{"p50": null}', json.dumps(ROW | {"p50": "fast"})])
def test_a_damaged_row_is_named(tmp_path, line):
    (tmp_path / "2026-11-29-abc.jsonl").write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"2026-11-29-abc.jsonl, line 2: "):
        table.read_rows(tmp_path)


def test_insert_replaces_what_is_between_the_markers():
    text = f"before\n{table.BEGIN}old\n{table.END}after\n"
    once = table.insert(text, "new\n")
    assert once == f"before\n{table.BEGIN}\nnew\n\n{table.END}after\n"
    assert table.insert(once, "new\n") == once
    for broken in ("no markers", table.END + table.BEGIN, text + text):
        with pytest.raises(ValueError, match="must be there once"):
            table.insert(broken, "new\n")


def test_the_program_reads_what_the_harness_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness.torch.cuda, "get_device_name", lambda: ROW["gpu"])
    row = ROW | {"p20": 1.8, "p80": 2.0}
    harness.save([row], argparse.Namespace(dry_run=False, commit="feed123", results=tmp_path))
    capsys.readouterr()
    document = tmp_path / "README.md"
    document.write_text(f"# Title\n{table.BEGIN}{table.END}")
    command = [sys.executable, "-m", "bench.table", "--results", str(tmp_path), "--write", str(document)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "| `codec_chunk/B1/T1` | 1.90 ms | <= 2.0 ms | 3.8 |  |  | `feed123` |" in document.read_text()

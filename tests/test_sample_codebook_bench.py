"""The benchmark of sample_codebook runs without a GPU, and does not time what computes the wrong thing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_smoke():
    command = [sys.executable, "-m", "bench.bench_sample_codebook", "--smoke"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 18
    assert all(line.endswith(" ok") for line in lines)


@pytest.mark.parametrize("entry", ["measure", "smoke"])
def test_a_failing_check_stops_the_case(monkeypatch, entry):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import harness

    def check():
        raise AssertionError("`code` differs")

    ran = []
    case = harness.Case("sample_codebook/B1", "us", 1, 1, 1, {})
    variant = harness.Variant("triton", lambda: ran.append(1), check)
    with pytest.raises(AssertionError, match="`code` differs") as failure:
        getattr(harness, entry)(case, [variant])
    assert failure.value.__notes__ == ["sample_codebook/B1, triton: not timed, because its check failed"]
    assert not ran


def test_floor_is_the_larger_of_memory_and_arithmetic(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import harness

    assert harness.Case("x", "ms", 4_250_000_000, 0, 1, {}).floor == pytest.approx(1)
    assert harness.Case("x", "us", 0, 775_000_000, 1, {}).floor == pytest.approx(1)

"""The load on the engine and its command, with a tiny random model."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench import bench_engine, plot_engine
from moss_runtime.cli import main
from moss_runtime.commands.bench_engine import Workload, for_load, random_engine
from moss_runtime.engine import EngineConfig, load_engine
from moss_runtime.engine.load import Load, measure
from moss_runtime.errors import UserError
from moss_runtime.model.codec import CodecConfig
from moss_runtime.random_weights import codec_config


def test_the_full_codec_is_the_released_one():
    released = json.loads((Path(__file__).parent / "manifests" / "codec_config.json").read_text())
    assert codec_config("full") == CodecConfig.from_dict(released)


def test_what_clients_see(monkeypatch):
    monkeypatch.setattr("moss_runtime.commands.bench_engine.FRAMES", (5, 9))
    monkeypatch.setattr("moss_runtime.commands.bench_engine.PROMPT_TOKENS", 12)
    config = for_load(EngineConfig.from_mode("streaming-low-latency"), 3)
    assert (config.rows, config.max_frames) == (3, 9)
    with random_engine("tiny", config, device="cpu", dtype=torch.float32, encoder=True) as engine:
        load = measure(engine, Workload(engine), concurrency=3, warm_s=0.2, window_s=2)
        summary = json.loads(json.dumps(load.summary()))
        assert summary["requests"] > 3 and summary["concurrency"] == 3
        assert summary["audio_s_per_s"] == pytest.approx(sum(load.rates(4)) / 4, rel=1e-3)
        # Requests of 5 to 9 frames in pieces of 1, 2, 4, 8: two or three gaps for each first chunk.
        assert 1 < len(load.gaps) / len(load.first_audio) < 4
        assert 0 < summary["first_audio_ms"]["p50"] < summary["latency_ms"]["p50"]
        engine.drain(10)
        assert engine.runtime.pool.in_use == 0


def test_clones_share_half_of_their_clips(monkeypatch):
    config = for_load(EngineConfig.from_mode("offline-fast"), 2)
    with random_engine("tiny", config, device="cpu", dtype=torch.float32, encoder=True) as engine:
        requests = [Workload(engine, clone=True)(index) for index in range(6)]
        clips = [request.references[0] for request in requests]
        assert [torch.equal(clip, clips[0]) for clip in clips] == [True, False, True, False, True, False]
        handles = [engine.submit(request) for request in requests[:3]]
        codes = [handle.result(60).codes for handle in handles]
        assert all(60 <= len(one) <= 120 for one in codes)
        assert engine.stats.value("reference_misses") == 2


def test_first_requests_end_one_by_one():
    """A client's first request is the rest of one that is under way: half of the mean square over the mean, 47 frames,
    where whole ones have 60 to 120."""
    config = for_load(EngineConfig.from_mode("offline-fast"), 2)
    with random_engine("tiny", config, device="cpu", dtype=torch.float32) as engine:
        make = Workload(engine, clients=500)
        frames = [make(index).max_frames for index in range(1000)]
    assert min(frames[:500]) < 5 and max(frames[:500]) > 100
    assert sum(frames[:500]) / 500 == pytest.approx(47.2, abs=4)
    assert min(frames[500:]) == 60 and max(frames[500:]) == 120


def test_cases_of_the_benchmark():
    def cases(mode, **changes):
        options = {"concurrency": [1, 64], "quick": False, "turns": False, "case": None} | changes
        return bench_engine.cases(mode, argparse.Namespace(**options))

    loads, clones, cold = [("", 1), ("", 64)], [("/clone", 64)], [("/cold", 1), ("/cold", 64)]
    assert cases("streaming-balanced") == loads + clones + cold and cases("offline-fast") == loads + cold
    assert cases("streaming-balanced", quick=True) == loads + clones
    assert cases("streaming-balanced", case=["engine/C64/clone"]) == clones
    assert cases("offline-fast", case=["engine/*/offline/cold"]) == cold


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(UserError, match=r"`device`: no device cuda here \(cuda devices: 0\)"):
        load_engine(EngineConfig(), "model", "codec")


def test_load_without_requests():
    assert Load(1, 1.0, 12.5).summary()["first_audio_ms"] == {}
    load = Load(1, 2.0, 10.0, frames=[(0.1, 5), (1.9, 10), (2.0, 5)])
    assert load.rates(2) == [0.5, 1.5] and load.audio_seconds == 2


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moss_runtime.commands.bench_engine.FRAMES", (5, 9))
    figures = tmp_path / "figures.json"
    options = ["--size", "tiny", "--device", "cpu", "--concurrency", "1", "2", "--seconds", "1", "--warm-seconds", "1"]
    assert main(["bench-engine", *options, "--json", str(figures)]) == 0
    output = capsys.readouterr().out
    assert "first audio" in output and "1 (streaming-balanced)" in output
    written = json.loads(figures.read_text())
    assert [load["concurrency"] for load in written["loads"]] == [1, 2]
    assert written["engine"]["mode"] == "streaming-balanced"


def test_what_the_command_refuses(tmp_path, capsys, monkeypatch):
    """Each before anything is measured, in one line."""
    monkeypatch.setattr("moss_runtime.commands.bench_engine.measure", lambda *_, **__: 1 / 0)
    path = tmp_path / "engine.toml"
    path.write_text('slot_policy = "reject"\ncodec_slots = 1\n')
    for options, message in (
        (["--mode", "loud"], "`mode` must be one of"),
        (["--codec", "x"], "--codec goes with --model"),
        (["--dtype", "float16"], "`model` must be in float32 or bfloat16, got torch.float16"),
        (["--json", str(tmp_path)], f"{tmp_path}: cannot be written"),
        (["--concurrency", "129"], "`rows` must be at most 128, got 129"),
        (["--concurrency", "2", "--config", str(path)], "2 clients need as many `codec_slots`"),
    ):
        assert main(["bench-engine", "--size", "tiny", "--device", "cpu", "--concurrency", "1", *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("moss-tts: error: ") and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", ["streaming-low-latency", "offline-fast"])
def test_benchmark_without_a_gpu(monkeypatch, capsys, mode):
    monkeypatch.setattr("moss_runtime.commands.bench_engine.FRAMES", (8, 12))
    monkeypatch.setattr("sys.argv", ["bench_engine", "--smoke", "--modes", mode])
    bench_engine.main()
    output = capsys.readouterr().out
    assert "engine/C3 " in output and ("codes as alone" in output) == (mode != "offline-fast")


def test_rows_and_what_is_drawn_of_them(tmp_path):
    class Engine:
        config = EngineConfig(rows=64)

        def snapshot(self):
            graphs = {"frame": {"hit_ratio": 1.0}}
            stages = {"frame_ms": {"moss/backbone": {"p50": 2.5}}, "stage_seconds": {"codec": 0.5}}
            counts = {"codec_calls": 4, "codec_rows": 20, "codec_padding_frames": 3}
            counts |= {"reference_hits": 0, "reference_misses": 0, "sampling_rate": 48000, "channels": 2}
            return counts | stages | {"graphs": graphs}

    rows = []
    for clients, first in ((1, 0.012), (64, 0.08)):
        # All audio comes in one tenth of the window; the figure is of all of it.
        load = Load(clients, 2.0, 12.5, frames=[(0.1, 500)], first_audio=[first])
        rows += bench_engine.rows_of(load, Engine(), "", 0.0)
    assert [(row["case"], row["p50"], row["unit"]) for row in rows] == [
        ("engine/C1", 12.0, "ms"),
        ("engine/C1/rate", 20.0, "audio_s_per_s"),
        ("engine/C64/first_audio", 80.0, "ms"),
        ("engine/C64", 20.0, "audio_s_per_s"),
    ]
    assert (rows[3]["p20"], rows[3]["p80"], rows[3]["ratio_to_floor"]) == (0, 0, 56.5)
    assert rows[0]["conditions"]["audio_seconds"] == 40
    path = tmp_path / "card" / "2026-01-01-abc.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row | {"gpu": "card", "sha": "abc"}) + "\n" for row in rows))
    assert plot_engine.series(tmp_path) == {"rate": [(1, 20.0), (64, 20.0)], "first_audio": [(1, 12.0), (64, 80.0)]}

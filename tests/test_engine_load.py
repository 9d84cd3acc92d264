"""The load on the engine and its command, with a tiny random model."""

import json
from pathlib import Path

import pytest
import torch

from moss_runtime.cli import main
from moss_runtime.commands.bench_engine import Workload, for_load, random_engine
from moss_runtime.engine import EngineConfig
from moss_runtime.engine.load import Load, measure, percentiles
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


def test_percentiles_of_nothing():
    assert percentiles([]) == {}
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
    assert main(["bench-engine", "--mode", "loud"]) == 2
    assert main(["bench-engine", "--codec", "x", "--size", "tiny"]) == 2

"""What the engine shows: numbers that add up, as JSON and as Prometheus metrics, and a log line for each request."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.engine import Engine, EngineConfig, Request
from moss_runtime.engine.request import FIRST_AUDIO_STAGES
from moss_runtime.engine.stats import COUNTERS, DISTRIBUTIONS, Distribution, Stats
from moss_runtime.model import MossTTS
from moss_runtime.model.codec import Codec
from moss_runtime.observe import Metrics

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def served():
    """An engine that has served three requests of 7 frames and an aborted one, its metrics, and the log lines."""
    model, codec = MossTTS.from_pretrained(GOLDEN / "local_hd16"), Codec.from_pretrained(GOLDEN / "codec")
    model.local_text_lm_head.weight.zero_()
    rows = torch.full((9, 13), 64)
    rows[:, 0] = torch.arange(3, 12)
    metrics, lines = Metrics(), []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger = logging.getLogger("moss_runtime.engine")
    handler, level = Keep(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    config = EngineConfig.from_mode("streaming-low-latency", rows=2, max_tokens=64, max_frames=24)
    engine = Engine(config, model, codec, metrics=metrics)
    params = SamplingParams(text_temperature=0, seed=4)
    handles = [engine.submit(Request(prompt=rows, params=params, max_frames=7)) for _ in range(3)]
    results = [handle.result(20) for handle in handles]
    gone = engine.submit(Request(prompt=rows))
    gone.abort()
    results.append(gone.result(20))
    engine.drain(20)
    engine.close()
    logger.removeHandler(handler)
    logger.setLevel(level)
    return engine, metrics, results, [json.loads(line) for line in lines]


def test_snapshot(served):
    engine, _, results, _ = served
    shot = json.loads(json.dumps(engine.snapshot()))
    assert shot["requests_finished"] == {"length": 3, "abort": 1}
    assert (shot["frames_delivered"], shot["samples_delivered"]) == (21, 168)
    # How many pieces there are depends on who came in time for a call.
    chunks = sum(result.chunks for result in results)
    assert shot["chunks_delivered"] == shot["chunk_frames"]["count"] == chunks >= 6
    assert (shot["sampling_rate"], shot["channels"]) == (800, 2)
    assert shot["first_audio_seconds"]["count"] == 3 and shot["chunk_gap_seconds"]["count"] == chunks - 3
    assert shot["chunk_frames"]["mean"] == pytest.approx(21 / chunks) and shot["rtf"]["count"] == 3
    mean = sum(result.first_audio for result in results[:3]) / 3
    assert shot["first_audio_seconds"]["mean"] == pytest.approx(mean)
    # The stages account for all of it.
    assert tuple(shot["first_audio_stages"]) == FIRST_AUDIO_STAGES
    assert sum(stage["mean"] for stage in shot["first_audio_stages"].values()) == pytest.approx(mean)
    assert {"transfer", "codec", "output", "delivery"} <= shot["stage_seconds"].keys()
    assert all(0 <= graph["hit_ratio"] <= 1 for graph in shot["graphs"].values())
    assert shot["graphs"]["codec"]["fallbacks"] == {"device": shot["codec_calls"]}
    assert set(shot["frame_ms"]) == {"moss/backbone", "moss/local_frame", "moss/bookkeeping"}
    for gauge in ("requests_waiting", "requests_live", "rows_in_use", "codec_slots_in_use", "frames_pending"):
        assert shot[gauge] == 0


def test_prometheus(served):
    _, metrics, results, _ = served
    text = metrics.text()
    assert 'engine_requests_finished_total{reason="length"} 3.0' in text
    assert "engine_frames_delivered_total 21.0" in text
    assert "engine_first_audio_seconds_count 3.0" in text
    # The first piece of each is one frame, and none holds more than the six others.
    buckets = {
        edge: float(re.search(rf'engine_chunk_frames_bucket{{le="{edge}"}} (.*)', text)[1]) for edge in (1.0, 8.0)
    }
    assert 3 <= buckets[1.0] < buckets[8.0] == sum(result.chunks for result in results)
    assert "engine_requests_live 0.0" in text and "codec_slots_in_use 0.0" in text
    for name in COUNTERS:
        assert f"# TYPE engine_{name}_total counter" in text
    for name in DISTRIBUTIONS:
        assert f"# TYPE engine_{name} histogram" in text


def test_one_log_line_for_each_request(served):
    _, _, results, lines = served
    assert [line["event"] for line in lines] == ["request_finished"] * 4
    by_id = sorted(lines, key=lambda line: line["id"])
    for line, result in zip(by_id, results, strict=True):
        assert (line["frames"], line["reason"], line["seed"]) == (result.frames, result.finish_reason, result.seed)
        assert line["seconds"] == pytest.approx(result.seconds)
        assert (line["sampling_rate"], line["channels"], line["error"]) == (800, 2, None)
    assert (by_id[0]["chunks"], by_id[0]["seconds"]) == (results[0].chunks, 0.07)
    assert sum(by_id[0]["stages_s"].values()) == pytest.approx(by_id[0]["first_audio_s"], abs=1e-3)


def test_percentiles_are_of_the_newest_values_and_counts_of_all():
    values = Distribution((1, 2))
    assert values.summary() == {"count": 0}
    for value in [5.0] * 10 + [1.0] * 8192:
        values.add(value)
    assert values.counts == [8192, 0, 10]
    assert values.summary()["count"] == 8202 and values.summary()["p99"] == 1.0


def test_counters_by_label():
    stats = Stats()
    stats.count("rows_paused", label="total")
    stats.count("rows_paused", 2, "request")
    assert stats.snapshot()["rows_paused"] == {"total": 1, "request": 2}
    assert stats.value("rows_paused", "request") == 2
    assert stats.snapshot()["slots_exhausted"] == {}

"""Settings of the engine, and requests: what is refused, and by which words."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.engine import EngineConfig, Request
from moss_runtime.errors import UserError

MODES = ("offline-fast", "streaming-low-latency", "streaming-balanced")


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_valid_and_do_what_they_say(mode):
    config = EngineConfig.from_mode(mode)
    assert (config.mode, config.stream) == (mode, mode.startswith("streaming"))
    assert config.stream == (config.chunk_ramp[0] == 1)


def test_every_setting_is_documented_and_every_mode_sets_the_same():
    documented = EngineConfig.__doc__.partition("Attributes:")[2]
    for field in dataclasses.fields(EngineConfig):
        assert f"\n        {field.name}: " in documented, field.name
    path = Path(__file__).parents[1] / "runtime" / "assets" / "engine_modes.toml"
    modes = tomllib.loads(path.read_text())
    assert tuple(modes) == MODES
    assert len({frozenset(values) for values in modes.values()}) == 1


def test_the_default_is_the_balanced_mode():
    assert EngineConfig() == EngineConfig.from_mode("streaming-balanced")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 129}, "`rows` must be at most 128, got 129"),
        ({"rows": 0}, "`rows` must be a positive integer below 2^31, got 0"),
        ({"rows": True}, "`rows` must be a positive integer below 2^31, got True"),
        ({"max_waiting": 2**31}, "`max_waiting` must be a positive integer below 2^31, got 2147483648"),
        ({"codec_calls": 17}, "`codec_calls` must be at most 16, got 17"),
        ({"max_frames": 2.5}, "`max_frames` must be a positive integer"),
        ({"chunk_wait_ms": -1}, "`chunk_wait_ms` must be a number in 0..2^31-1, got -1"),
        ({"chunk_wait_ms": float("nan")}, "`chunk_wait_ms` must be a number"),
        ({"stream": "yes"}, "`stream` must be a bool"),
        ({"slot_policy": "hope"}, "`slot_policy` must be one of queue, offline, reject, got 'hope'"),
        ({"pcm": "int8"}, "`pcm` must be one of float32, int16"),
        ({"chunk_ramp": []}, "`chunk_ramp` must be a list of frame counts"),
        ({"chunk_ramp": [1, 0]}, "`chunk_ramp[1]` must be a positive integer below 2^31, got 0"),
        ({"chunk_ramp": [4, 2]}, "`chunk_ramp` must not decrease"),
        ({"largest_chunk": 4}, "`largest_chunk` must be at least the last size of `chunk_ramp`, 8, got 4"),
        ({"chunk_ramp": [8], "max_frames": 8}, "`stream` needs a first chunk below `max_frames`, 8"),
        ({"frames_per_launch": 4}, "first chunk of 1 frames needs `frames_per_launch` of at most that, got 4"),
        (
            {"stream": False, "chunk_ramp": [8], "frames_per_launch": 9, "max_frames": 8},
            "`frames_per_launch` must be at most `max_frames`, 8, got 9",
        ),
        ({"stream": False}, "without `stream` there is no early chunk"),
        ({"max_tokens": 4096}, "`max_frames` must be below `max_tokens`, 4096"),
        ({"codec_slots": 65}, "`codec_slots` must be at most `rows`, 64"),
        ({"codec_slots": 8, "codec_batch": 9}, "`codec_batch` must be at most the codec slots, 8, got 9"),
        ({"max_pending_frames": 16}, "`max_pending_frames` must hold the largest chunk and 2 frames"),
        ({"max_pending_total": 191}, "`max_pending_total` must hold 3 frames of each of 64 rows, 192, got 191"),
        ({"max_output_frames": 14}, "`max_output_frames` must hold the largest chunk, 15, got 14"),
        ({"speed": 2}, "unknown settings: speed"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(UserError) as caught:
        EngineConfig.from_mode("streaming-balanced", **changes)
    assert message in str(caught.value)


def test_settings_from_a_file(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text('mode = "offline-fast"\nrows = 8\n')
    assert EngineConfig.from_toml(path) == EngineConfig.from_mode("offline-fast", rows=8)
    path.write_text("rows = ")
    with pytest.raises(UserError, match="not TOML"):
        EngineConfig.from_toml(path)
    with pytest.raises(UserError, match="cannot be read"):
        EngineConfig.from_toml(tmp_path / "missing.toml")
    path.write_text("a = " + "[" * 5000)
    with pytest.raises(UserError, match="not TOML"):
        EngineConfig.from_toml(path)
    for mode in ('"loud"', '["loud"]', "5"):
        path.write_text(f"mode = {mode}")
        with pytest.raises(UserError, match=r"`mode` must be one of offline-fast, .* got .?.?(loud|5)"):
            EngineConfig.from_toml(path)


def test_no_codec_call_is_prepared_for_more_frames_than_a_request_has():
    assert EngineConfig(max_frames=6).chunk_lengths == (1, 2, 3, 4, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of `text` and `prompt`"),
        ({"text": "a", "prompt": torch.zeros(1, 13)}, "exactly one of `text` and `prompt`"),
        ({"prompt": torch.zeros(1, 13), "references": [torch.zeros(2, 8)]}, "`references` and `fields` go with `text`"),
        ({"prompt": [1, 2]}, "`prompt` must be a tensor, got list"),
        ({"prompt": torch.tensor(3)}, "`prompt` must be [T, 1+n_vq], got ()"),
        ({"prompt": torch.zeros(5, 13, device="meta")}, "`prompt` must be a dense tensor on the CPU"),
        ({"prompt": torch.zeros(5, 13).to_sparse()}, "on the CPU, got torch.sparse_coo on cpu"),
        ({"text": 5}, "`text` must be a str, got int"),
        ({"text": "a", "references": 5}, "`references` must be a list of clips, got int"),
        ({"text": "a", "references": torch.zeros(2, 8)}, "`references` must be a list of clips, got Tensor"),
        ({"text": "a", "references": ["voice.wav"]}, "`references` must be tensors"),
        ({"text": "a", "fields": ["language"]}, "`fields` must be a mapping, got list"),
        ({"text": "a", "fields": {"references": []}}, "`fields` must not hold what has a field of its own"),
        ({"text": "a", "params": {"seed": 1}}, "`params` must be a SamplingParams, got dict"),
        ({"text": "a", "max_frames": 0}, "`max_frames` must be an integer of at least 1, got 0"),
        ({"text": "a", "deadline_s": 0}, "`deadline_s` must be a positive number of seconds, got 0"),
        ({"text": "a", "deadline_s": 10**400}, "`deadline_s` must be a positive number of seconds, got 1000"),
        ({"text": "a", "deadline_s": True}, "`deadline_s` must be a positive number of seconds, got True"),
    ],
)
def test_requests_that_cannot_be(fields, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        Request(**fields)
    assert message in str(caught.value)


def test_a_request_has_the_defaults_of_the_model():
    assert Request("hello").params == SamplingParams()

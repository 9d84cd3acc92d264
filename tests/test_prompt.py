"""Prompt rows equal the recorded ones of the official processor; bad fields are refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moss_runtime.errors import CheckpointError, PromptError
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.prompt import PromptBuilder

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "prompt" / "cases.json").read_text())
TOKENIZER = GOLDEN / "prompt" / "tokenizer.json"


@pytest.fixture(scope="module")
def recorded():
    return load_file(GOLDEN / "prompt" / "expected.safetensors")


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_directory(GOLDEN / "local_hd16")


@pytest.fixture(scope="module")
def builder(config):
    return PromptBuilder(TOKENIZER, config)


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_recorded_ones(builder, recorded, case):
    fields = dict(CASES[case])
    fields["references"] = [recorded[f"codes.{index}"] for index in fields["references"]]
    if "prompt_audio" in fields:
        fields["prompt_audio"] = recorded[f"codes.{fields['prompt_audio']}"]
    rows = builder.build(fields.pop("text"), **fields)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, recorded[f"rows.{case}"])


def test_every_recorded_case_is_tested(recorded):
    assert {f"rows.{case}" for case in CASES} == {name for name in recorded if name.startswith("rows.")}


def test_continuation_in_the_voice_of_references(builder, config, recorded):
    codes = recorded["codes.0"].to(torch.int16)
    rows = builder.build("Text.", references=[codes] * 3, mode="continuation", prompt_audio=recorded["codes.2"])
    assert torch.equal(rows[-9:, 1:], recorded["codes.2"])
    user_rows = rows[rows[:, 0] == config.audio_user_slot_token_id]
    assert torch.equal(user_rows[:, 1:], recorded["codes.0"].repeat(3, 1))
    plain = builder.build("Text.", references=[codes] * 3)
    assert torch.equal(rows[:-9], plain)


@pytest.mark.parametrize("field", ["language", "instruction", "quality", "sound_event", "ambient_sound"])
def test_a_field_replaces_the_none_under_its_name(builder, config, field):
    decode = builder._tokenizer.decode
    rows = builder.build("Hi.", **{field: "some words"})
    text = decode(rows[:, 0].tolist(), skip_special_tokens=True)
    title = field.replace("_", " ").title()
    assert f"- {title}:\nsome words\n" in text and text.count("None") == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "clone"}, "mode must be one of generation, continuation, got 'clone'"),
        ({"mode": "continuation"}, "prompt_audio goes with mode"),
        ({"prompt_audio": torch.zeros(3, 12, dtype=torch.int64)}, "prompt_audio goes with mode"),
        ({"tokens": 0}, "tokens must be a positive number of frames, got 0"),
        ({"tokens": -5}, "tokens must be a positive"),
        ({"tokens": 1.5}, "tokens must be a positive"),
        ({"tokens": True}, "tokens must be a positive"),
        ({"language": 3}, "language must be text, got int"),
        ({"instruction": "\ud800"}, "instruction is not valid Unicode at position 0"),
        ({"text": None}, "text must be text, got NoneType"),
        ({"text": "a\udcff"}, "text is not valid Unicode at position 1"),
        ({"references": [[1, 2]]}, r"references\[0\] must be an integer tensor of codes, got list"),
        ({"references": [torch.zeros(3, 12)]}, "must be an integer tensor of codes, got a torch.float32 tensor"),
        ({"references": [torch.zeros(3, 12, dtype=torch.bool)]}, "must be an integer tensor"),
        ({"references": [torch.zeros(3, 11, dtype=torch.int64)]}, r"must be \[frames >= 1, 12\], got \(3, 11\)"),
        ({"references": [torch.zeros(12, dtype=torch.int64)]}, r"got \(12,\)"),
        ({"references": [torch.zeros(0, 12, dtype=torch.int64)]}, r"got \(0, 12\)"),
        ({"references": [torch.full((1, 12), 64)]}, r"references\[0\]: codes must be 0 .. 63, got 64 at frame 0"),
        ({"references": [torch.zeros(1, 12, dtype=torch.int64), torch.full((1, 12), -1)]}, r"references\[1\]: codes"),
        ({"mode": "continuation", "prompt_audio": torch.full((1, 12), 99)}, "prompt_audio: codes must be"),
    ],
)
def test_bad_fields_are_named(builder, fields, message):
    with pytest.raises(PromptError, match=message):
        builder.build(**{"text": "Hi.", **fields})


def test_unusable_tokenizers(tmp_path, config):
    with pytest.raises(CheckpointError, match="no such tokenizer file"):
        PromptBuilder(tmp_path / "tokenizer.json", config)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        PromptBuilder(tmp_path / "tokenizer.json", config)


def test_a_tokenizer_of_another_model(config):
    small = replace(config, backbone=replace(config.backbone, vocab_size=100))
    with pytest.raises(CheckpointError, match="outside the model's vocabulary of 100"):
        PromptBuilder(TOKENIZER, small).build("The tram crosses the bridge.")

"""Config of the TTS model: spellings that are read, values that are refused, and the full-size model's tensors."""

import copy
import json
from pathlib import Path

import pytest

from moss_runtime.errors import CheckpointError
from moss_runtime.model import ModelConfig, MossTTS
from moss_runtime.model.checkpoint import read_config

TESTS = Path(__file__).parent
FULL_SIZE = TESTS / "manifests" / "local"
MISSING = object()


@pytest.fixture
def official() -> dict:
    return read_config(TESTS / "golden" / "local_hd16")


def edited(config: dict, changes: dict) -> dict:
    """A copy with dotted keys replaced, or removed where the value is MISSING; qwen3_config is kept under one name."""
    config = copy.deepcopy(config)
    del config["language_config"]
    for path, value in changes.items():
        *parents, key = path.split(".")
        target = config
        for parent in parents:
            target = target[parent]
        if value is MISSING:
            del target[key]
        else:
            target[key] = value
    return config


def test_official_config(official):
    config = ModelConfig.from_dict(official)
    assert (config.backbone.head_dim, config.backbone.num_key_value_heads, config.backbone.rope_theta) == (32, 2, 1e6)
    assert (config.local.n_head, config.local.head_dim, config.local.rope_base) == (4, 16, 1e6)
    assert (config.n_vq, config.audio_vocab_size, config.audio_pad_token_id) == (12, 64, 64)
    assert (config.audio_start_token_id, config.audio_assistant_slot_token_id) == (3, 6)


def test_either_name_of_the_backbone_config(official):
    one, other = dict(official), dict(official)
    del one["qwen3_config"], other["language_config"]
    assert ModelConfig.from_dict(one) == ModelConfig.from_dict(other) == ModelConfig.from_dict(official)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"qwen3_config.rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"qwen3_config.rope_parameters": MISSING, "qwen3_config.rope_theta": 500000}, 5e5),
        ({"qwen3_config.rope_parameters": None, "qwen3_config.rope_theta": 5e5}, 5e5),
        ({"qwen3_config.rope_parameters": MISSING}, 1e6),
    ],
)
def test_rope_theta(official, changes, theta):
    assert ModelConfig.from_dict(edited(official, changes)).backbone.rope_theta == theta


def test_local_rope_base_falls_back(official):
    config = ModelConfig.from_dict(edited(official, {"gpt2_config.rope_base": MISSING}))
    assert config.local.rope_base == 1e4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_vq", MISSING, "config: `n_vq` is missing"),
        ("qwen3_config", MISSING, "`qwen3_config` must be present"),
        ("qwen3_config", 3, "`qwen3_config` must be an object, got 3"),
        ("gpt2_config", MISSING, "`gpt2_config` is missing"),
        ("qwen3_config.hidden_size", MISSING, "qwen3_config: `hidden_size` is missing"),
        ("qwen3_config.hidden_size", "64", "`hidden_size` must be an integer in 1..16777216, got '64'"),
        ("qwen3_config.head_dim", True, "`head_dim` must be an integer in 1..16777216, got True"),
        ("qwen3_config.num_hidden_layers", 10**9, "`num_hidden_layers` must be an integer in 1..1024, got 1000000000"),
        ("gpt2_config.n_inner", 2**63, "`n_inner` must be an integer in 1..16777216"),
        ("gpt2_config.rope_base", 10**400, "`rope_base` must be a positive number"),
        ("n_vq", 2**63, "`n_vq` must be an integer in 1..1024"),
        ("qwen3_config.head_dim", 31, "`head_dim` must be even, got 31"),
        ("qwen3_config.rms_norm_eps", float("nan"), "`rms_norm_eps` must be a positive number, got nan"),
        ("qwen3_config.num_key_value_heads", 3, "`num_attention_heads` must be a multiple of num_key_value_heads = 3"),
        ("qwen3_config.hidden_act", "gelu", "`hidden_act` must be 'silu'"),
        ("qwen3_config.attention_bias", True, "`attention_bias` must be False"),
        ("qwen3_config.use_sliding_window", True, "`use_sliding_window` must be False"),
        ("qwen3_config.rope_scaling", {"type": "yarn"}, "`rope_scaling` must be null"),
        ("qwen3_config.rope_parameters.rope_type", "yarn", "rope_parameters: `rope_type` must be 'default'"),
        ("qwen3_config.rope_theta", 1e4, "`rope_theta` must be 1000000.0, got 10000.0"),
        ("gpt2_config.n_embd", 128, "`gpt2_config.n_embd` must be the hidden_size 64, got 128"),
        ("gpt2_config.n_head", 5, "`n_embd` must be a multiple of 2 \\* n_head = 10, got 64"),
        ("gpt2_config.n_layer", 2, "`n_layer` must be 1, got 2"),
        ("gpt2_config.position_embedding_type", "learned", "`position_embedding_type` must be 'rope', got 'learned'"),
        ("gpt2_config.activation_function", "gelu_new", "`activation_function` must be 'silu'"),
        ("local_text_head_mode", "vocab", "`local_text_head_mode` must be 'binary', got 'vocab'"),
        ("audio_codebook_sizes", [64] * 11 + [32], "`audio_codebook_sizes` must be"),
        ("audio_codebook_sizes", [64] * 11, "`audio_codebook_sizes` must be"),
        ("audio_pad_code", 63, "`audio_pad_code` must be 64, got 63"),
        ("audio_vocab_size", 65, "`audio_codebook_sizes` must be"),
        ("hidden_size", 65, "`hidden_size` must be 64, got 65"),
        ("audio_end_token_id", 512, "`audio_end_token_id` must be an integer in 0..511, got 512"),
        ("audio_end_token_id", None, "`audio_end_token_id` must be an integer in 0..511, got None"),
    ],
)
def test_refused(official, key, value, message):
    ModelConfig.from_dict(edited(official, {}))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(edited(official, {key: value}))


def test_pad_code_inside_the_codebook(official):
    changes = {"audio_pad_token_id": 63, "audio_pad_code": 63}
    with pytest.raises(CheckpointError, match="`audio_pad_token_id` must be at least audio_vocab_size = 64, got 63"):
        ModelConfig.from_dict(edited(official, changes))


def test_two_backbone_configs_that_differ(official):
    official["language_config"]["intermediate_size"] += 1
    with pytest.raises(CheckpointError, match="`language_config` must be the same as qwen3_config"):
        ModelConfig.from_dict(official)


def test_full_size_model_has_the_official_tensors():
    manifest = json.loads((FULL_SIZE / "tensors.json").read_text())
    model = MossTTS.on_meta(ModelConfig.from_directory(FULL_SIZE))
    assert {name: list(tensor.shape) for name, tensor in model.state_dict().items()} == manifest
    assert all(name not in manifest and target in manifest for name, target in model.tied.items())
    assert len(model.tied) == 12


def test_full_size_config():
    config = ModelConfig.from_directory(FULL_SIZE)
    assert (config.local.head_dim, config.local.n_inner, config.backbone.intermediate_size) == (80, 9728, 9728)
    assert (config.audio_pad_token_id, config.im_start_token_id, config.audio_start_token_id) == (1024, 151644, 151669)

"""The codec's config: full-size manifest, and every fault named."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from moss_runtime.errors import CheckpointError
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.state.codec_slots import CodecSlots

MANIFESTS = Path(__file__).parent / "manifests"


@pytest.fixture(scope="module")
def full_size():
    return CodecConfig.from_dict(json.loads((MANIFESTS / "codec_config.json").read_text()))


def decoder_stages(config):
    return [module for module in config.decoder if isinstance(module, TransformerConfig)]


def manifest_shapes():
    """The manifest's lines with {a..b} written out."""
    shapes = {}
    for line in (MANIFESTS / "codec_tensors.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, *sizes = line.split()
        numbers = re.search(r"\{(\d+)\.\.(\d+)\}", name)
        first, last = map(int, numbers.groups()) if numbers else (0, 0)
        for number in range(first, last + 1):
            shapes[re.sub(r"\{.*\}", str(number), name)] = tuple(map(int, sizes))
    return shapes


def test_full_size_tensors_match_the_manifest(full_size):
    with torch.device("meta"):
        codec = Codec(full_size)
    built = {name: tuple(tensor.shape) for name, tensor in codec.state_dict().items()}
    assert built == manifest_shapes()
    assert round(sum(p.numel() for p in codec.decoder.parameters()) / 1e9, 2) == 1.06


def test_full_size_rates_windows_and_state(full_size):
    stages = decoder_stages(full_size)
    assert [stage.context for stage in stages] == [125, 250, 400, 400, 400, 400]
    encoder = [module.context for module in full_size.encoder if isinstance(module, TransformerConfig)]
    assert encoder == [400, 400, 400, 400, 250, 125]
    assert {stage.head_dim for stage in stages} == {64}
    assert (full_size.frame_rate, full_size.samples_per_frame, full_size.channels) == (12.5, 3840, 2)
    assert (full_size.codebooks, full_size.codebook_size) == (12, 1024)
    per_slot = CodecSlots.size_in_bytes(stages, 1, torch.bfloat16) / 2
    assert per_slot == pytest.approx(84.57 * 2**20, rel=1e-3)


def test_stage_without_a_duration_takes_that_of_the_codec(golden):
    config = copy.deepcopy(golden("codec").config)
    del config["decoder_kwargs"][2]["context_duration"]
    assert [stage.context for stage in decoder_stages(CodecConfig.from_dict(config))] == [20, 40, 32]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["quantizer_type"], "rvq", "quantizer_type must be one of .*got 'rvq'"),
        (["quantizer_kwargs", "quantizer_type"], "spec_rvq", "quantizer_type must be one of .*got 'spec_rvq'"),
        (
            ["quantizer_kwargs", "codebook_dim"],
            None,
            "quantizer_kwargs.codebook_dim must be an integer in 1..16777216, got N",
        ),
        (["quantizer_kwargs"], None, "quantizer_kwargs must be a dict"),
        (["sampling_rate"], None, "sampling_rate must be an integer in 1..16777216, got None"),
        (["sampling_rate"], True, "sampling_rate must be an integer in 1..16777216, got True"),
        (["downsample_rate"], 12, "patch sizes of encoder_kwargs must multiply to 24"),
        (["number_channels"], 0, "number_channels must be an integer in 1..1024, got 0"),
        (["enable_channel_interleave"], False, "enable_channel_interleave must be true with 2 channels"),
        (["decoder_kwargs"], [], "decoder_kwargs must be a list"),
        (["decoder_kwargs", 0], "Transformer", r"decoder_kwargs\[0\].module_type"),
        (["decoder_kwargs", 0, "module_type"], "Conv", r"decoder_kwargs\[0\].module_type must be .*got 'Conv'"),
        (["decoder_kwargs", 0, "norm"], "rms_norm", r"decoder_kwargs\[0\].norm must be 'layer_norm', got 'rms_norm'"),
        (["decoder_kwargs", 0, "gating"], "silu", r"gating must be 'none', got 'silu'"),
        (
            ["encoder_kwargs", 1, "positional_embedding"],
            "sin",
            r"encoder_kwargs\[1\].positional_embedding must be 'rope'",
        ),
        (["decoder_kwargs", 0, "causal"], False, "causal must be True, got False"),
        (["decoder_kwargs", 0, "layer_scale"], None, "layer_scale must be a positive number up to 16777216, got None"),
        (["decoder_kwargs", 0, "num_heads"], 5, "d_model must be num_heads times an even head size"),
        (["decoder_kwargs", 0, "num_layers"], None, "num_layers must be an integer in 1..1024, got None"),
        (
            ["decoder_kwargs", 0, "context_duration"],
            -1,
            "context_duration must be a positive number up to 16777216, got -1",
        ),
        (["decoder_kwargs", 0, "context_duration"], 0.001, "context_duration 0.001 s is 0 tokens, not 1"),
        (["decoder_kwargs", 0, "context_duration"], 1e7, "s is 1000000000 tokens, not 1"),
        (["decoder_kwargs", 0, "num_layers"], 10**30, "num_layers must be an integer in 1..1024, got 10000"),
        (["decoder_kwargs", 0, "d_model"], 10**30, "d_model must be an integer in 1..16777216, got 10000"),
        (["decoder_kwargs", 1, "patch_size"], 5, r"decoder_kwargs\[1\].patch_size must divide 24"),
        (["decoder_kwargs", 2, "input_dimension"], 24, r"decoder_kwargs\[2\].input_dimension must be 12.*got 24"),
        (["decoder_kwargs", 4, "output_dimension"], 8, "decoder_kwargs must end with 1 features, got 2"),
        (["encoder_kwargs", 5, "output_dimension"], 20, "encoder_kwargs must end with 24 features, got 20"),
    ],
)
def test_faults_are_named(golden, path, value, message):
    config = copy.deepcopy(golden("codec").config)
    section = config
    for key in path[:-1]:
        section = section[key]
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        CodecConfig.from_dict(config)

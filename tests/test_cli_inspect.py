"""`moss-tts inspect`: what it counts on the demo checkpoint, and the memory that it states at full size."""

import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moss_runtime.cli import main
from moss_runtime.demo_checkpoint import write_demo_checkpoint
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.tts import MossTTS

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
COMPLETE = "Names and shapes of all tensors are those that the config asks for."


def test_inspect_counts_what_the_files_hold(tmp_path, capsys):
    write_demo_checkpoint(tmp_path / "demo")
    options = ["--streams", "3", "--context", "1000", "--dtype", "float32"]
    assert main(["inspect", "--model", str(tmp_path / "demo"), *options]) == 0
    output = capsys.readouterr().out
    parameters = sum(tensor.numel() for tensor in load_file(tmp_path / "demo" / "model.safetensors").values())
    assert f"{parameters:,}" in output and "51 (51 BF16)" in output
    assert re.search("tokenizer +tokenizer.json\n", output)
    assert f"model weights  {parameters * 4 / 2**20:.2f} MiB" in output
    assert f"KV cache       {3 * 1000 * 2 * 2 * 2 * 32 * 4 / 2**20:.2f} MiB" in output


def write_sparse(directory, config, shapes):
    """A checkpoint of full size that takes no space: the header, then a hole."""
    directory.mkdir()
    shutil.copy(config, directory / "config.json")
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_inspect_at_full_size(tmp_path, capsys):
    manifests = ROOT / "tests" / "manifests"
    model = MossTTS.on_meta(ModelConfig.from_directory(manifests / "local"))
    with torch.device("meta"):
        codec = Codec(CodecConfig.from_dict(json.loads((manifests / "codec_config.json").read_text())))
    for name, module, config in (
        ("model", model, manifests / "local" / "config.json"),
        ("codec", codec, manifests / "codec_config.json"),
    ):
        shapes = {key: tensor.shape for key, tensor in module.state_dict().items()}
        write_sparse(tmp_path / name, config, shapes)
    model_dir, codec_dir = tmp_path / "model", tmp_path / "codec"
    options = ["--streams", "127", "--context", "1024"]
    assert main(["inspect", "--model", str(model_dir), "--codec", str(codec_dir), *options]) == 0
    memory = dict(re.findall(r"  ([\w ]+?) +([\d.]+) GiB", capsys.readouterr().out))
    # Known of the real pair: 147,456 B of keys and values per token, 84.57 MiB of codec state per slot and null slot.
    assert float(memory["KV cache"]) == pytest.approx(127 * 1024 * 147_456 / 2**30, abs=0.01)
    assert float(memory["codec state"]) == pytest.approx(128 * 84.57 / 1024, abs=0.02)


def test_a_model_or_a_codec_alone(capsys):
    """The official model's config names no codec, and a complete checkpoint is no error."""
    assert main(["inspect", "--model", str(GOLDEN / "local_hd16")]) == 0
    model = capsys.readouterr().out
    assert COMPLETE in model and "51 (51 F32)" in model and "KV cache" in model and "codec weights" not in model
    assert "name one with --codec" in model and "no tokenizer.json, which prompts need" in model
    assert main(["inspect", "--codec", str(GOLDEN / "codec_mono")]) == 0
    codec = capsys.readouterr().out
    assert COMPLETE in codec and "1600 Hz, 1 channels" in codec and "codec state" in codec and "KV cache" not in codec
    assert main(["inspect"]) == 2
    assert "name a checkpoint: a model with --model, a codec with --codec, or both" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--codec"])
def test_every_tensor_that_does_not_match_is_named(tmp_path, capsys, option):
    golden = GOLDEN / ("local_hd16" if option == "--model" else "codec")
    shutil.copy(golden / "config.json", tmp_path)
    tensors = load_file(golden / "model.safetensors")
    missing, misshaped = sorted(tensors)[3], sorted(tensors)[-1]
    del tensors[missing]
    tensors[misshaped] = tensors[misshaped][:-1].clone()
    save_file({**tensors, "stray.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert main(["inspect", option, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert COMPLETE not in said.out and said.err.count("\n") == 1
    for fault in (f"missing: {missing};", "unexpected: stray.weight;", f"mis-shaped: {misshaped} (expected"):
        assert fault in said.err

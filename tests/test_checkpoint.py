"""Checkpoint files: what loads, what is refused and how it is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moss_runtime.errors import CheckpointError
from moss_runtime.model import ModelConfig, MossTTS
from moss_runtime.model.checkpoint import check_tensors, load_weights, read_config, tensor_shapes
from moss_runtime.model.codec import Codec

GOLDEN = Path(__file__).parent / "golden" / "local_hd16"
TABLE = "audio_embeddings.3.weight"
HEAD = "audio_lm_heads.3.weight"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "model.safetensors")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    return tmp_path


def save_shards(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + (i % 2):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_loads(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    loaded = MossTTS.from_pretrained(directory).state_dict()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_single_file(tensors):
    assert_loads(GOLDEN, tensors)


def test_shards(tensors, directory):
    save_shards(tensors, directory)
    assert_loads(directory, tensors)
    assert tensor_shapes(directory) == tensor_shapes(GOLDEN)


def test_tensor_shapes():
    shapes = tensor_shapes(GOLDEN)
    assert shapes["local_transformer.h.0.attn.c_attn.weight"] == ((192, 64), "F32")
    assert len(shapes) == 51


@pytest.mark.parametrize(("kind", "directory"), [(MossTTS, GOLDEN), (Codec, GOLDEN.parent / "codec")])
def test_weights_are_mapped_not_copied(kind, directory):
    model = kind.from_pretrained(directory)
    mapped = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str((directory / "model.safetensors").resolve()))
    ]
    for name, parameter in model.named_parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in mapped), name
        assert not parameter.requires_grad


def test_dtype_and_device_are_the_callers():
    """The meta device stands for one that is not the CPU."""
    for device in ("cpu", "meta"):
        model = MossTTS.from_pretrained(GOLDEN, dtype=torch.bfloat16, device=device)
        assert {(tensor.dtype, tensor.device.type) for tensor in model.parameters()} == {(torch.bfloat16, device)}
        codec = Codec.from_pretrained(GOLDEN.parent / "codec", dtype=torch.float16, device=device)
        assert {tensor.device.type for tensor in codec.parameters()} == {device}
        assert (codec.dtype, codec.device.type) == (torch.float16, device)


@pytest.mark.parametrize("dtype", [torch.int8, "float32"])
def test_dtypes_of_no_weights(dtype):
    with pytest.raises(TypeError, match=r"`dtype` must be a floating point torch\.dtype, got"):
        MossTTS.from_pretrained(GOLDEN, dtype=dtype)


def test_stored_dtype_is_kept(tensors, directory):
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")
    model = MossTTS.on_meta(ModelConfig.from_directory(directory))
    load_weights(model, directory, dtype=None, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_head_may_be_present(tensors, directory):
    save_file(tensors | {HEAD: tensors[TABLE].clone()}, directory / "model.safetensors")
    assert_loads(directory, tensors)


def test_tied_head_must_equal_its_table(tensors, directory):
    save_file(tensors | {HEAD: tensors[TABLE] + 1}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{HEAD} must equal {TABLE}"):
        MossTTS.from_pretrained(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({TABLE: None}, f"missing: {TABLE}$"),
        ({"extra.weight": torch.zeros(2)}, "unexpected: extra.weight$"),
        ({TABLE: torch.zeros(64, 63)}, rf"mis-shaped: {TABLE} \(expected \[64, 64\], got \[64, 63\]\)$"),
        ({HEAD: torch.zeros(2, 64)}, rf"mis-shaped: {HEAD} \(expected \[64, 64\]"),
        ({f"x{i}": torch.zeros(1) for i in range(9)}, "unexpected: x0, x1, x2, x3 and 5 more$"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_that_do_not_match_are_named(tensors, directory, change, message, sharded):
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    if sharded:
        save_shards(changed, directory)
    else:
        save_file(changed, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        MossTTS.from_pretrained(directory)
    model = MossTTS.on_meta(ModelConfig.from_directory(directory))
    with pytest.raises(CheckpointError, match=message):
        check_tensors(model, directory, tied=model.tied)


@pytest.mark.parametrize("kept", [0, 4, 500, 900_000])
def test_truncated_file(directory, kept):
    content = (GOLDEN / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
        MossTTS.from_pretrained(directory)


def test_corrupt_header(directory):
    content = bytearray((GOLDEN / "model.safetensors").read_bytes())
    content[10:20] = b"\xff" * 10
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
        tensor_shapes(directory)


def test_missing_weights(directory):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        MossTTS.from_pretrained(directory)


def test_missing_shard(tensors, directory):
    save_shards(tensors, directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no such file"):
        MossTTS.from_pretrained(directory)


def test_tensor_in_two_shards(tensors, directory):
    save_shards(tensors, directory)
    save_file(tensors, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="is in another shard too"):
        MossTTS.from_pretrained(directory)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../model.safetensors"}])
def test_bad_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="`weight_map` must map tensor names to file names"):
        tensor_shapes(directory)


@pytest.mark.parametrize("content", ["", "{", "\xff\xfe", "[1]"])
def test_bad_config_json(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000])
def test_config_nested_too_deep(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_that_are_not_floating_point(tensors, directory, dtype):
    save_file(tensors | {TABLE: tensors[TABLE].to(dtype)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"not floating point: {TABLE} \([A-Z0-9_]+\)$"):
        MossTTS.from_pretrained(directory)


def test_model_without_weights_is_made_at_once(directory):
    """Random values for what a checkpoint fills would import the compiler, which takes seconds."""
    code = (
        "import sys; from moss_runtime.model import ModelConfig, MossTTS;"
        "MossTTS.on_meta(ModelConfig.from_directory(sys.argv[1])); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, directory], check=True)


def test_a_model_and_a_codec_are_told_apart():
    codec = GOLDEN.parent / "codec"
    with pytest.raises(CheckpointError, match=r"codec: holds a codec, but `model` must be a MOSS-TTS model$"):
        MossTTS.from_pretrained(codec)
    with pytest.raises(CheckpointError, match=rf"{GOLDEN.name}: holds a MOSS-TTS model, but `codec` must be a codec$"):
        Codec.from_pretrained(GOLDEN)


def test_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        read_config("x" * 5000)

"""Checkpoint directories: `config.json` beside `model.safetensors`, or beside an index and its shards."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from moss_runtime.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")  # an 8-bit float without its scale is no weight
NAMES_SHOWN = 4
# What an argument of this name takes, and a key that only the config of it has.
KINDS = {"model": ("a MOSS-TTS model", "gpt2_config"), "codec": ("a codec", "quantizer_kwargs")}

T = TypeVar("T")


def read_config(directory: str | Path, kind: str | None = None) -> dict:
    """Read `config.json` of a checkpoint directory.

    Args:
        directory: checkpoint directory.
        kind: which of KINDS it was given as; None takes any.

    Raises:
        CheckpointError: the directory or file is missing, the file is not a JSON object, or it is that of another kind.
    """
    config = _read_json(_existing_directory(directory) / "config.json")
    if kind is not None and KINDS[kind][1] not in config:
        for found, key in KINDS.values():
            if key in config:
                raise CheckpointError(f"{directory}: holds {found}, but `{kind}` must be {KINDS[kind][0]}")
    return config


def parse_config(directory: str | Path, kind: str, parse: Callable[[dict], T]) -> T:
    """What `parse` makes of the `config.json` of a model or a codec.

    Raises:
        CheckpointError: as `read_config`, or as `parse`, with the name of the directory.
    """
    config = read_config(directory, kind)
    try:
        return parse(config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None


def tensor_shapes(directory: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and stored dtype (safetensors spelling: "F32", "BF16", ...) of every tensor, from the file headers alone.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or two shards hold the same tensor.
    """
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in _weight_files(_existing_directory(directory)):
        with _open(path) as shard:
            for name in shard.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in shapes:
                    raise CheckpointError(f"{path}: tensor {name} is in another shard too")
                header = shard.get_slice(name)
                shapes[name] = (tuple(header.get_shape()), header.get_dtype())
    return shapes


def check_tensors(module: nn.Module, directory: str | Path, *, tied: Mapping[str, str] | None = None) -> None:
    """Compare the tensors of a checkpoint with the state dict of `module`: names, shapes, and that they are weights.

    Args:
        module: may be on the meta device; its state dict keys are the official names.
        directory: checkpoint directory.
        tied: name that the checkpoint may hold beside the module's -> name of the module's tensor it repeats.

    Raises:
        CheckpointError: tensors are missing, unexpected, mis-shaped or not of 16 to 64-bit floating point; the message
            names them.
    """
    tied = tied or {}
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    allowed = expected | {name: expected[target] for name, target in tied.items()}
    stored = dict(sorted(tensor_shapes(directory).items()))
    found = {name: shape for name, (shape, _) in stored.items()}
    faults = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in allowed],
        "mis-shaped": [
            f"{name} (expected {list(allowed[name])}, got {list(shape)})"
            for name, shape in found.items()
            if name in allowed and allowed[name] != shape
        ],
        "not floating point": [f"{name} ({dtype})" for name, (_, dtype) in stored.items() if dtype not in FLOATING],
    }
    if any(faults.values()):
        text = "; ".join(f"{kind}: {_shortened(names)}" for kind, names in faults.items() if names)
        raise CheckpointError(f"{directory}: tensors do not match the config: {text}")


def load_weights(
    module: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Assign the tensors of a checkpoint to a module that was built on the meta device.

    The files are memory-mapped and the module's parameters are views of the mapping: a tensor is copied only when
    `dtype` or `device` ask for it. Gradients are switched off.

    Args:
        module: its state dict keys are the official names; buffers outside the state dict are left as they are.
        directory: checkpoint directory.
        dtype: tensors are cast to it; None keeps what is stored.
        device: where the parameters end up.
        tied: name that the checkpoint may hold beside the module's -> name of the module's tensor it repeats. Such a
            tensor may be absent; if present it must equal its target, and is not loaded a second time.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt; tensors are missing, unexpected, mis-shaped or not
            floating point; a tied tensor differs from its target. The message names them.
        TypeError: `dtype` is not a floating point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"load_weights: `dtype` must be a floating point torch.dtype, got {dtype!r}")
    tied = tied or {}
    check_tensors(module, directory, tied=tied)
    stored: dict[str, torch.Tensor] = {}
    for path in _weight_files(Path(directory)):
        with _open(path) as shard:
            stored |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    for name, target in tied.items():
        copy = stored.pop(name, None)
        if copy is not None and not torch.equal(copy, stored[target]):
            raise CheckpointError(f"{directory}: tensor {name} must equal {target}, which it is tied to")
    for name, tensor in stored.items():
        tensor = tensor.to(device)
        stored[name] = tensor if dtype is None else tensor.to(dtype)
    module.load_state_dict(stored, assign=True)
    module.requires_grad_(False)


def _existing_directory(directory: str | Path) -> Path:
    path = Path(directory)
    if not os.path.isdir(path):  # Path.is_dir raises where a name is too long or a parent may not be read
        raise CheckpointError(f"{path}: no such checkpoint directory")
    return path


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _weight_files(directory: Path) -> list[Path]:
    """The single file if it is there, otherwise the shards that the index names."""
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = _read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX_FILE}: `weight_map` must map tensor names to file names")
    return [directory / name for name in sorted(set(weight_map.values()))]


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


@contextmanager
def _open(path: Path) -> Iterator:
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or corrupt: {error}") from error


def _shortened(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

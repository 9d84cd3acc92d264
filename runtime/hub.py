"""Where a checkpoint named on the command line lies: a directory, or a Hugging Face id that is fetched."""

import os
import re
from pathlib import Path

from moss_runtime.errors import CheckpointError
from moss_runtime.model.checkpoint import read_config
from moss_runtime.optional import require

CODEC_FOLDER = "audio_tokenizer"


def checkpoint_directory(name: str) -> Path:
    """Returns the directory of a checkpoint, after fetching it when `name` is a Hugging Face id.

    Args:
        name: a directory, or an id such as OpenMOSS-Team/MOSS-TTS-Local-Transformer-v1.5.

    Raises:
        CheckpointError: neither a directory nor an id that can be fetched.
        UserError: it looks like an id and the package huggingface_hub is not installed.
    """
    if os.path.isdir(name):  # Path.is_dir raises where a name is too long or a parent may not be read
        return Path(name)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise CheckpointError(f"{name}: no such checkpoint directory")
    hub = require("huggingface_hub", f"{name} is no directory here; fetching it from Hugging Face")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # network, authorization and naming errors share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: no such directory, and not fetched from Hugging Face ({reason})") from error


def named_codec(model: Path) -> str | None:
    """The codec that a model comes with: its directory `audio_tokenizer/`, or what its config names, or neither.

    Raises:
        CheckpointError: as `read_config`, if the directory `audio_tokenizer/` is not there.
    """
    if (model / CODEC_FOLDER).is_dir():
        return str(model / CODEC_FOLDER)
    named = read_config(model, "model").get("audio_tokenizer_name_or_path")
    return named if isinstance(named, str) else None


def codec_directory(codec: str | None, model: Path | None) -> Path:
    """Returns the directory of the codec that belongs to a model.

    Args:
        codec: directory or Hugging Face id, if the caller named one.
        model: checkpoint directory of the model; without `codec`, its `named_codec` is taken.

    Raises:
        CheckpointError: there is none, or it cannot be fetched.
    """
    if codec is None and model is None:
        raise CheckpointError("name the codec with --codec, or a model that comes with one with --model")
    name = named_codec(model) if codec is None else codec
    if name is None:
        raise CheckpointError(f"{model}: holds no {CODEC_FOLDER}/ and its config names no codec; name one with --codec")
    return checkpoint_directory(name)

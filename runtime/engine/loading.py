"""An engine from checkpoint directories, with the memory of its device planned first."""

import dataclasses
from pathlib import Path

import torch

from moss_runtime.engine.config import EngineConfig
from moss_runtime.engine.engine import Engine
from moss_runtime.errors import UserError
from moss_runtime.graphs.capture import free_memory
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import Metrics
from moss_runtime.state.budget import MemoryBudget


def load_engine(
    config: EngineConfig,
    model: str | Path,
    codec: str | Path,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    metrics: Metrics | None = None,
) -> Engine:
    """Load checkpoints and warm up. On a GPU the KV pages are as many as fit beside everything else.

    Args:
        config: settings.
        model: directory with `config.json`, weights and `tokenizer.json`.
        codec: directory of the codec.
        device: of both.
        dtype: of weights and state.
        metrics: as in `Engine`.

    Raises:
        CheckpointError: as `MossTTS.from_pretrained` and `Codec.from_pretrained`.
        UserError: there is no such device, or model and codec do not belong together.
        MemoryBudgetError: it does not fit into the memory that is free.
    """
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"`device`: no device {device} here (cuda devices: {torch.cuda.device_count()})")
    model_config, codec_config = ModelConfig.from_directory(model), CodecConfig.from_directory(codec)
    model_config.check_codec(codec_config)
    if device.type == "cuda":
        config = fitted(config, model_config, codec_config, device, dtype)
    parts = {"dtype": dtype, "device": device}
    prompts = PromptBuilder(Path(model) / "tokenizer.json", model_config)
    weights = MossTTS.from_pretrained(model, **parts), Codec.from_pretrained(codec, **parts)
    engine = Engine(config, *weights, prompts, metrics=metrics)
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def fitted(
    config: EngineConfig, model: ModelConfig, codec: CodecConfig, device: torch.device, dtype: torch.dtype
) -> EngineConfig:
    """Settings with as many KV pages as fit into the free memory of a GPU, before any weights are on it.

    Raises:
        MemoryBudgetError: it does not fit.
    """
    options = {"rows": config.rows, "max_tokens": config.max_tokens, "max_frames": config.max_frames}
    options |= {"pages": config.pages, "chunks": config.chunk_lengths, "graphs": config.graphs}
    budget = MemoryBudget(model, codec, dtype=dtype, device=device, codec_slots=config.slots, **options)
    return dataclasses.replace(config, pages=budget.fit(free_memory(device)))

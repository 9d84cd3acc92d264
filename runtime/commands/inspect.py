"""`moss-tts inspect`: what a checkpoint holds, whether it is complete, and the memory it needs."""

import argparse
import math
from collections import Counter
from pathlib import Path

from torch import nn

from moss_runtime.commands.common import DTYPES, add_checkpoint_arguments, positive, print_summary
from moss_runtime.demo_checkpoint import is_demo
from moss_runtime.errors import UserError
from moss_runtime.hub import checkpoint_directory, named_codec
from moss_runtime.model.checkpoint import check_tensors, tensor_shapes
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.tts import MossTTS
from moss_runtime.state.codec_slots import CodecSlots

DEFAULT_CONTEXT = 2048
TOKENIZER = "tokenizer.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser, model_required=False)
    parser.add_argument("--streams", type=positive, default=1, metavar="N", help="memory for N streams (default: 1)")
    parser.add_argument(
        "--context",
        type=positive,
        default=DEFAULT_CONTEXT,
        metavar="TOKENS",
        help=f"prompt rows and frames of a stream to hold keys and values for (default: {DEFAULT_CONTEXT})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and state (default: bfloat16)")


def run(args: argparse.Namespace) -> None:
    """Prints what is there, compares names and shapes with each checkpoint's own config, then prints the memory."""
    model = None if args.model is None else checkpoint_directory(args.model)
    codec = named_codec(model) if args.codec is None and model is not None else args.codec
    if model is None and codec is None:
        raise UserError("name a checkpoint: a model with --model, a codec with --codec, or both")
    memory = {}
    if model is not None:
        memory |= _inspect_model(model, args)
    if codec is not None:
        memory |= _inspect_codec(checkpoint_directory(codec), args)
    else:
        print("Codec: the model comes with none; name one with --codec")
    print("Names and shapes of all tensors are those that the config asks for.")
    print(f"Memory for {args.streams} streams of at most {args.context} tokens, {args.dtype}")
    print_summary({f"  {name}": _size(size) for name, size in {**memory, "total": sum(memory.values())}.items()})


def _inspect_model(directory: Path, args: argparse.Namespace) -> dict[str, int]:
    """Prints and checks the model; returns the bytes of what stays allocated, without activations."""
    config = ModelConfig.from_directory(directory)
    model = MossTTS.on_meta(config)
    backbone = config.backbone
    print(f"Model {directory}{' (demo: random weights, its speech is noise)' if is_demo(directory) else ''}")
    print_summary(
        {
            "  backbone": f"{backbone.num_hidden_layers} layers, hidden {backbone.hidden_size}, "
            f"{backbone.num_attention_heads} heads x {backbone.head_dim}, {backbone.num_key_value_heads} KV heads, "
            f"FFN {backbone.intermediate_size}, vocabulary {backbone.vocab_size}, "
            f"context {backbone.max_position_embeddings}",
            "  local": f"{config.local.n_head} heads x {config.local.head_dim}, FFN {config.local.n_inner}",
            "  codes": f"{config.n_vq} codebooks of {config.audio_vocab_size}",
            "  tokenizer": TOKENIZER if (directory / TOKENIZER).is_file() else f"no {TOKENIZER}, which prompts need",
            **_contents(directory, model),
        }
    )
    check_tensors(model, directory, tied=model.tied)
    itemsize = DTYPES[args.dtype].itemsize
    kv_per_token = 2 * backbone.num_hidden_layers * backbone.num_key_value_heads * backbone.head_dim * itemsize
    tokens = min(args.context, backbone.max_position_embeddings)
    return {
        "model weights": _parameters(model) * itemsize,
        "KV cache": args.streams * tokens * kv_per_token,
    }


def _inspect_codec(directory: Path, args: argparse.Namespace) -> dict[str, int]:
    """As `_inspect_model`, of the codec."""
    config, dtype = CodecConfig.from_directory(directory), DTYPES[args.dtype]
    codec = Codec.on_meta(config, dtype)
    print(f"Codec {directory}")
    print_summary(
        {
            "  audio": f"{config.sampling_rate} Hz, {config.channels} channels, "
            f"{config.samples_per_frame} samples per frame, {config.frame_rate:g} frames/s",
            "  codes": f"{config.codebooks} codebooks of {config.codebook_size}",
            **_contents(directory, codec),
        }
    )
    check_tensors(codec, directory)
    stages = [module for module in config.decoder if isinstance(module, TransformerConfig)]
    return {
        "codec weights": sum(parameter.nbytes for parameter in codec.parameters()),
        "codec state": CodecSlots.size_in_bytes(stages, args.streams, dtype),
    }


def _contents(directory: Path, module: nn.Module) -> dict[str, str]:
    """What the files hold, and the parameters of each part of the module."""
    stored = tensor_shapes(directory)
    dtypes = Counter(dtype for _, dtype in stored.values())
    parts = {name: _parameters(part) for name, part in module.named_children()}
    return {
        "  tensors": f"{len(stored)} ({', '.join(f'{count} {dtype}' for dtype, count in sorted(dtypes.items()))})",
        "  parameters": f"{sum(parts.values()):,}",
        **{f"    {name}": f"{count:,}" for name, count in parts.items()},
    }


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _size(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{math.ceil(size / 2**10)} KiB"

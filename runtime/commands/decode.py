"""`moss-tts decode`: codes to audio."""

import argparse

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moss_runtime.audio import wav_writer
from moss_runtime.commands.common import (
    StageTimes,
    add_checkpoint_arguments,
    add_device_arguments,
    device_and_dtype,
    print_summary,
)
from moss_runtime.errors import UserError
from moss_runtime.files import keep_inputs
from moss_runtime.hub import checkpoint_directory, codec_directory
from moss_runtime.model.codec import Codec, CodecConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("codes", help="safetensors file with the tensor `codes`, as `moss-tts encode` writes it")
    parser.add_argument("-o", "--output", required=True, metavar="WAV", help="file to write")
    parser.add_argument("--float", action="store_true", help="write 32-bit float samples, not 16-bit integers")
    add_checkpoint_arguments(parser, model_required=False)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    keep_inputs(args.output, [args.codes])
    device, dtype = device_and_dtype(args)
    directory = codec_directory(args.codec, checkpoint_directory(args.model) if args.model else None)
    config = CodecConfig.from_directory(directory)
    codes = _read_codes(args.codes)
    times = StageTimes(device)
    subtype = "FLOAT" if args.float else "PCM_16"
    with wav_writer(args.output, config.sampling_rate, config.channels, subtype) as write:
        with times.stage("load"):
            codec = Codec.from_pretrained(directory, dtype=dtype, device=device)
        with times.stage("decode"):
            write(codec.decode(codes[None])[0])
    print_summary(
        {
            "output": args.output,
            "audio": f"{len(codes) / config.frame_rate:.2f} s, {config.sampling_rate} Hz, {config.channels} channels",
            **{name: f"{value:.2f} s" for name, value in times.seconds.items()},
        }
    )


def _read_codes(path: str) -> torch.Tensor:
    try:
        tensors = load_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or 'no such file'})") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file, or truncated ({error})") from None
    codes = tensors.get("codes")
    if codes is None or codes.dim() != 2 or len(codes) == 0:
        found = f"{len(tensors)} others" if codes is None else list(codes.shape)
        raise UserError(f"{path}: must hold a tensor `codes` [frames >= 1, codebooks], got {found}")
    return codes

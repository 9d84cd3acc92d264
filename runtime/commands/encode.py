"""`moss-tts encode`: audio to codes."""

import argparse

from safetensors.torch import save

from moss_runtime.commands.common import (
    StageTimes,
    add_checkpoint_arguments,
    add_device_arguments,
    device_and_dtype,
    load_recording,
    print_summary,
)
from moss_runtime.files import keep_inputs, replacing
from moss_runtime.hub import checkpoint_directory, codec_directory
from moss_runtime.model.codec import Codec, CodecConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("audio", help="WAV, FLAC, OGG or MP3")
    parser.add_argument("-o", "--output", required=True, metavar="SAFETENSORS", help="file to write")
    parser.add_argument("--downmix", action="store_true", help="accept recordings of more than two channels")
    add_checkpoint_arguments(parser, model_required=False)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes one tensor, `codes: [frames, codebooks] int64`. What the last whole frame leaves over is dropped."""
    keep_inputs(args.output, [args.audio])
    device, dtype = device_and_dtype(args)
    directory = codec_directory(args.codec, checkpoint_directory(args.model) if args.model else None)
    config = CodecConfig.from_directory(directory)
    audio = load_recording(args.audio, config, args.downmix)
    times = StageTimes(device)
    with replacing(args.output, ".safetensors") as partial:
        with times.stage("load"):
            codec = Codec.from_pretrained(directory, dtype=dtype, device=device)
        with times.stage("encode"):
            codes = codec.encode([audio])[0].cpu()
        partial.write_bytes(save({"codes": codes}))
    print_summary(
        {
            "output": args.output,
            "codes": f"{codes.shape[0]} frames x {codes.shape[1]} codebooks",
            "audio": f"{codes.shape[0] / config.frame_rate:.2f} s",
            **{name: f"{value:.2f} s" for name, value in times.seconds.items()},
        }
    )

"""`moss-tts verify`: does this checkpoint compute on this machine what the reference computes?"""

import argparse
import sys

from moss_runtime.commands.common import add_checkpoint_arguments, add_device_arguments, device_and_dtype, positive
from moss_runtime.hub import checkpoint_directory, codec_directory
from moss_runtime.model.codec import Codec
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.model.tts import MossTTS
from moss_runtime.optional import require
from moss_runtime.verify import load_recogniser, load_speaker_model, verify, verify_speech

TEXTS = ("The quick brown fox jumps over the lazy dog.", "One, two, three.", "Good morning. How are you today?")
FAILED = 1
# 20 s: the texts take 3, and a recogniser hears 30 at a time.
SPEECH_FRAMES = 250


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser, model_required=True)
    parser.add_argument("--frames", type=positive, default=12, help="most frames of a prompt (default: %(default)s)")
    parser.add_argument("--asr", metavar="DIR", help="speech recogniser for transformers: what it mishears is reported")
    parser.add_argument("--speaker", metavar="DIR", help="x-vector model for transformers: how alike voices are")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    require("rich", "verify")
    from rich.console import Console

    device, dtype = device_and_dtype(args)
    recognise = None if args.asr is None else load_recogniser(args.asr, device)
    embed = None if args.speaker is None else load_speaker_model(args.speaker, device)
    directory = checkpoint_directory(args.model)
    codec_dir = codec_directory(args.codec, directory)
    builder = PromptBuilder(directory / "tokenizer.json", ModelConfig.from_directory(directory))
    model = MossTTS.from_pretrained(directory, dtype=dtype, device=device)
    codec = Codec.from_pretrained(codec_dir, dtype=dtype, device=device)
    prompts = [builder.build(text) for text in TEXTS]
    results = verify(model, codec, prompts, frames=args.frames, progress=lambda stage: print(stage, file=sys.stderr))
    if recognise is not None or embed is not None:
        print("speech", file=sys.stderr)
        judges = {"recognise": recognise, "embed": embed}
        for result in verify_speech(model, codec, prompts, TEXTS, frames=SPEECH_FRAMES, **judges):
            results.add(result)
    console = Console()
    # What is piped to a file is not cut at 80 columns.
    console.width = console.width if console.is_terminal else 200
    console.print(results.table())
    failed = [f"{result.name} ({result.implementation})" for result in results if not result.passed]
    print(f"{directory} on {device}, {dtype}: {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}")
    return 0 if results.passed else FAILED

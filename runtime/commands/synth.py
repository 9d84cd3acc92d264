"""`moss-tts synth`: text to speech."""

import argparse
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moss_kernels import SamplingParams
from moss_runtime.audio import wav_writer
from moss_runtime.commands.common import (
    StageTimes,
    add_checkpoint_arguments,
    add_device_arguments,
    device_and_dtype,
    load_recording,
    positive,
    print_summary,
    progress_bar,
)
from moss_runtime.demo_checkpoint import is_demo
from moss_runtime.errors import CheckpointError, PromptError, UserError
from moss_runtime.files import keep_inputs
from moss_runtime.graphs.capture import free_memory
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.graphs.speech import generate
from moss_runtime.hub import checkpoint_directory, codec_directory
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.model.tts import DEFAULT_MAX_FRAMES, NOT_FINITE, Generation, MossTTS
from moss_runtime.state.budget import MemoryBudget

SAMPLING = {
    "temperature": (float, "of the audio codes; 0 takes the most probable"),
    "top_k": (int, "audio codes to choose from; 0 is all"),
    "top_p": (float, "probability mass of the audio codes to choose from"),
    "repetition_penalty": (float, "divides the score of codes that were drawn before"),
    "text_temperature": (float, "of the decision to stop"),
    "text_top_k": (int, "of the decision to stop"),
    "text_top_p": (float, "of the decision to stop"),
    "seed": (int, "0 .. 2^63-1; the same seed repeats the codes (default: drawn, and printed)"),
}
WISHES = ("language", "instruction", "quality", "sound_event", "ambient_sound")
UNSPOKEN = ("Zs", "Zl", "Zp", "Cc", "Cf")  # Unicode categories: spaces, separators, control and format characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help="what to speak (default: standard input)")
    parser.add_argument("--text-file", type=Path, metavar="FILE", help="read the text from a UTF-8 file")
    parser.add_argument("-o", "--output", required=True, metavar="WAV", help="file to write")
    add_checkpoint_arguments(parser, model_required=True)
    parser.add_argument(
        "--reference", action="append", default=[], metavar="AUDIO", help="recording of the voice to use; repeatable"
    )
    parser.add_argument(
        "--prompt-audio", metavar="AUDIO", help="recording to continue; the text begins with what is said in it"
    )
    parser.add_argument("--downmix", action="store_true", help="accept recordings of more than two channels")
    parser.add_argument("--tokens", type=positive, metavar="FRAMES", help="wished length in frames of 80 ms")
    for name in WISHES:
        parser.add_argument(_option(name), metavar="TEXT")
    sampling = parser.add_argument_group("sampling")
    for name, (kind, meaning) in SAMPLING.items():
        default = getattr(SamplingParams, name)
        shown = "" if default is None else f" (default: {default})"
        sampling.add_argument(_option(name), type=kind, default=default, help=meaning + shown)
    parser.add_argument(
        "--max-frames", type=positive, default=DEFAULT_MAX_FRAMES, help=f"limit (default: {DEFAULT_MAX_FRAMES})"
    )
    parser.add_argument("--float", action="store_true", help="write 32-bit float samples, not 16-bit integers")
    parser.add_argument("--stream", action="store_true", help="decode and write while the codes are generated")
    parser.add_argument("--memory", action="store_true", help="print the memory of each part, planned and measured")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    recorded = [*args.reference, *([] if args.prompt_audio is None else [args.prompt_audio])]
    keep_inputs(args.output, filter(None, [*recorded, args.text_file]))
    text = _read_text(args)
    params = _sampling_params(args)
    device, dtype = device_and_dtype(args)
    model_directory = checkpoint_directory(args.model)
    codec_dir = codec_directory(args.codec, model_directory)
    # What can be wrong with the input is found before the weights are loaded.
    config, codec_config = ModelConfig.from_directory(model_directory), CodecConfig.from_directory(codec_dir)
    config.check_codec(codec_config)
    prompts = PromptBuilder(model_directory / "tokenizer.json", config)
    recordings = [load_recording(path, codec_config, args.downmix) for path in recorded]
    # Prompts are long by the clips in them, so codes of their lengths say how much memory it takes.
    frames = [clip.shape[1] // codec_config.samples_per_frame for clip in recordings]
    rows = len(_prompt(prompts, text, args, [torch.zeros(count, config.n_vq, dtype=torch.int64) for count in frames]))
    budget = _budget(config, codec_config, rows, args, device, dtype)
    times = StageTimes(device)
    subtype = "FLOAT" if args.float else "PCM_16"
    with wav_writer(args.output, codec_config.sampling_rate, codec_config.channels, subtype) as write:
        with times.stage("load"):
            model = MossTTS.from_pretrained(model_directory, dtype=dtype, device=device)
            codec = Codec.from_pretrained(codec_dir, dtype=dtype, device=device)
        with times.stage("encode"):
            codes = [clip.cpu() for clip in codec.encode(recordings)]
        prompt = _prompt(prompts, text, args, codes)
        with times.stage("warm up"):
            runtime = _runtime(model, codec if args.stream else None, budget)
        if args.stream:
            result = _generate(runtime, prompt, params, times, on_audio=lambda _, audio: write(audio))
        else:
            result = _generate(runtime, prompt, params, times)
            with times.stage("decode"):
                write(codec.decode(result.codes[None])[0])
        if result.finish_reason == "error":
            raise CheckpointError(f"{model_directory}: {NOT_FINITE.format(dtype)}")
    if is_demo(model_directory):
        print(f"{model_directory} is the demo checkpoint: its weights are random and its speech is noise.")
    _report(args.output, result, codec_config, times)
    if args.memory:
        from rich.console import Console

        Console().print(budget.table())


def _prompt(prompts: PromptBuilder, text: str, args: argparse.Namespace, codes: Sequence[Tensor]) -> Tensor:
    """The prompt with the codes of all recordings, that of `--prompt-audio` last."""
    fields = {name: getattr(args, name) for name in ("tokens", *WISHES)}
    if args.prompt_audio is not None:
        fields |= {"mode": "continuation", "prompt_audio": codes[-1]}
    return prompts.build(text, references=codes[: len(args.reference)], **fields)


def _budget(
    config: ModelConfig,
    codec: CodecConfig,
    prompt_rows: int,
    args: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> MemoryBudget:
    """The memory of a runtime for one request.

    Raises:
        PromptError: the prompt is longer than the model's context.
        MemoryBudgetError: it does not fit into what is free on the GPU.
    """
    context = config.backbone.max_position_embeddings
    if prompt_rows > context:
        raise PromptError(f"text and recordings are too long: {prompt_rows} rows, the model's context is {context}")
    frames = min(args.max_frames, context + 1 - prompt_rows)
    options = {"rows": 1, "max_tokens": prompt_rows - 1 + frames, "max_frames": frames}
    budget = MemoryBudget(config, codec if args.stream else None, dtype=dtype, device=device, **options)
    if device.type == "cuda":
        # Without --stream the codec lies beside the runtime.
        weights = [] if args.stream else Codec.on_meta(codec, dtype).parameters()
        budget.fit(free_memory(device) - sum(weight.nbytes for weight in weights))
    return budget


def _runtime(model: MossTTS, codec: Codec | None, budget: MemoryBudget) -> Runtime:
    """The runtime as planned. Its prefill has no graphs, which would take longer to capture than they save."""
    runtime = Runtime(model, codec, **budget.options)
    with progress_bar("capturing graphs", len(runtime.frame.graphs.shapes)) as advance:
        runtime.warm_up(advance, prefill=False)
    budget.measure(runtime)
    return runtime


def _generate(
    runtime: Runtime,
    prompt: Tensor,
    params: SamplingParams,
    times: StageTimes,
    on_audio: Callable[[int, Tensor], None] | None = None,
) -> Generation:
    with times.stage("generate"), progress_bar("generating frames", runtime.pool.max_frames) as advance:

        def on_frames(_: int, codes: Tensor) -> None:
            for _ in codes:
                advance()

        return generate(runtime, [prompt], [params], on_frames=on_frames, on_audio=on_audio)[0]


def _read_text(args: argparse.Namespace) -> str:
    if args.text is not None and args.text_file is not None:
        raise UserError("give the text or --text-file, not both")
    text = _decoded_text(args.text_file) if args.text is None else args.text
    if all(unicodedata.category(character) in UNSPOKEN for character in text):
        raise UserError("the text is empty")
    return text


def _decoded_text(path: Path | None) -> str:
    name = path or "standard input"
    if path is None and sys.stdin is None:
        raise UserError("give a text, or --text-file: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
        text = data.decode("utf-8-sig").rstrip("\r\n")
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start})") from None
    if "\0" in text:  # UTF-16 without its mark, or no text at all
        raise UserError(f"{name}: not UTF-8 text (NUL at byte {data.index(0)})")
    return text


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    try:
        return SamplingParams(**{name: getattr(args, name) for name in SAMPLING})
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None


def _report(output: str, result: Generation, codec: CodecConfig, times: StageTimes) -> None:
    frames = len(result.codes)
    seconds = frames / codec.frame_rate
    spent = sum(value for name, value in times.seconds.items() if name != "load")
    print_summary(
        {
            "output": output,
            "frames": f"{frames} ({'stopped by itself' if result.finish_reason == 'stop' else 'cut at the limit'})",
            "audio": f"{seconds:.2f} s, {codec.sampling_rate} Hz, {codec.channels} channels",
            **{name: f"{value:.2f} s" for name, value in times.seconds.items()},
            "RTF": f"{spent / seconds:.3f} (seconds of work, without load, per second of audio)" if frames else "none",
            "seed": result.seed,
        }
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

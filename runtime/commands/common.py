"""What several subcommands share: option types, devices, recordings, stage times and the printed summary."""

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator

import torch

from moss_runtime.audio import load_audio
from moss_runtime.errors import AudioError, UserError
from moss_runtime.model.codec import CodecConfig
from moss_runtime.optional import require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def positive(text: str) -> int:
    """An option's value as an integer from 1 to 2^31-1."""
    if not re.fullmatch("[0-9]{1,10}", text) or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a positive integer below 2^31, got {text[:40]!r}")
    return int(text)


def add_checkpoint_arguments(parser: argparse.ArgumentParser, *, model_required: bool) -> None:
    parser.add_argument("--model", required=model_required, help="checkpoint directory or Hugging Face id")
    parser.add_argument("--codec", help="codec directory or Hugging Face id (default: the model's audio_tokenizer/)")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on cuda, float32 on cpu)")


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The options `--device` and `--dtype`, or their defaults.

    Raises:
        UserError: there is no such device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device is None else args.device
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise UserError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"--device: no device {name} here (cuda devices: {count})")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, DTYPES.get(args.dtype, default)


def load_recording(path: str, codec: CodecConfig, downmix: bool) -> torch.Tensor:
    """Audio [channels, n] as the codec takes it.

    Raises:
        AudioError: as `load_audio`, or it is shorter than one frame.
    """
    with quiet_libraries():
        audio = load_audio(path, sampling_rate=codec.sampling_rate, channels=codec.channels, downmix=downmix)
    if audio.shape[1] < codec.samples_per_frame:
        raise AudioError(f"{path}: shorter than one frame of {1000 / codec.frame_rate:.0f} ms")
    return audio


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Nothing reaches file descriptor 2: MP3 decoder and profiler write notes there, but an error is one line."""
    if sys.stderr is None:  # closed; the descriptor may be another file's by now
        yield
        return
    stderr = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class StageTimes:
    """Seconds spent in named stages, the device's work included. A stage inside another counts for itself alone."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}
        self._device = device
        self._inner = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = outer + elapsed


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator:
    """A bar on a terminal's standard error, nothing elsewhere; yields a function that advances it by one."""
    require("rich", "the command line")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def print_summary(entries: dict[str, object]) -> None:
    """Prints one `name value` line for each entry, aligned."""
    width = max(map(len, entries))
    for name, value in entries.items():
        print(f"{name:<{width}}  {value}")

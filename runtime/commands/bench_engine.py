"""`moss-tts bench-engine`: what clients of the engine see under load."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moss_kernels import SamplingParams
from moss_runtime.commands.common import (
    add_checkpoint_arguments,
    add_device_arguments,
    device_and_dtype,
    positive,
    print_summary,
)
from moss_runtime.engine import Engine, EngineConfig, Request, load_engine
from moss_runtime.engine.load import Load, measure
from moss_runtime.errors import UserError
from moss_runtime.files import replacing
from moss_runtime.hub import checkpoint_directory, codec_directory
from moss_runtime.model.codec import CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.random_weights import codec_config, random_codec, random_model

PROMPT_TOKENS = 150
FRAMES = 60, 120
CLIP_SECONDS = 3.0
SIZES = ("full", "tiny")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[64], help="clients (default: 64)")
    parser.add_argument("--mode", default=EngineConfig.mode, help="of the engine (default: %(default)s)")
    parser.add_argument("--config", type=Path, metavar="TOML", help="settings of the engine, instead of --mode")
    parser.add_argument("--seconds", type=positive, default=10, help="length of a measurement (default: 10)")
    parser.add_argument("--warm-seconds", type=positive, default=2, help="load ahead of it (default: 2)")
    parser.add_argument("--clone", action="store_true", help="3 s of reference audio in each request, half of it known")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the random model, without --model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the engine's own")
    add_checkpoint_arguments(parser, model_required=False)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    base = EngineConfig.from_mode(args.mode) if args.config is None else EngineConfig.from_toml(args.config)
    config = for_load(base, max(args.concurrency))
    # A file that cannot be written is found before anything is measured.
    with (
        contextlib.nullcontext() if args.json is None else replacing(args.json, ".json") as path,
        _engine(args, config) as engine,
    ):
        reports = []
        for concurrency in args.concurrency:
            requests = Workload(engine, clients=concurrency, clone=args.clone)
            times = {"warm_s": args.warm_seconds, "window_s": args.seconds}
            reports.append(measure(engine, requests, concurrency=concurrency, **times))
            _print(reports[-1], engine)
        if path is not None:
            figures = {"loads": [report.summary() for report in reports], "engine": engine.snapshot()}
            path.write_text(json.dumps(figures, indent=1) + "\n")


def _engine(args: argparse.Namespace, config: EngineConfig) -> Engine:
    """With random weights, or those of a checkpoint; warm."""
    device, dtype = device_and_dtype(args)
    if args.model is not None:
        model = checkpoint_directory(args.model)
        return load_engine(config, model, codec_directory(args.codec, model), device=device, dtype=dtype)
    if args.codec is not None:
        raise UserError("--codec goes with --model")
    engine = random_engine(args.size, config, device=device, dtype=dtype, encoder=args.clone)
    engine.warm_up()
    return engine


class Workload:
    """Requests of a fixed number of frames each, which differ in prompt, seed and length."""

    def __init__(self, engine: Engine, *, clients: int = 0, clone: bool = False, seed: int = 0):
        """Settings of all requests.

        Args:
            engine: that they are for.
            clients: so many come at once at the beginning. Their first requests are as long as the rest of one that is
                under way at a random time: so they end one by one from the beginning, not in waves.
            clone: with reference audio; every second request has a clip that others have had.
            seed: of everything random.
        """
        self._config: ModelConfig = engine.runtime.model.config
        self._codec: CodecConfig = engine.stage.codec.config
        self._limit, self._clients = engine.config.max_frames, clients
        self._clone, self._generator = clone, torch.Generator().manual_seed(seed)

    def __call__(self, index: int) -> Request:
        frames = self._frames(rest=index < self._clients)
        common = {"params": SamplingParams(seed=index), "max_frames": min(frames, self._limit)}
        if self._clone:
            return Request("", references=[self._clip(index if index % 2 else 0)], **common)
        return Request(prompt=random_prompt(self._config, PROMPT_TOKENS, self._generator), **common)

    def _frames(self, *, rest: bool) -> int:
        lengths = torch.arange(FRAMES[0], FRAMES[1] + 1)
        # A request is under way the longer, the more frames it has.
        weights = lengths.float() if rest else torch.ones(len(lengths))
        frames = int(lengths[torch.multinomial(weights, 1, generator=self._generator)])
        return int(torch.randint(1, frames + 1, (), generator=self._generator)) if rest else frames

    def _clip(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        samples = int(CLIP_SECONDS * self._codec.sampling_rate)
        return torch.rand(self._codec.channels, samples, generator=generator) - 0.5


class RandomPrompts:
    """Stands in for a `PromptBuilder` where there is no tokenizer."""

    def __init__(self, config: ModelConfig):
        self._config = config

    def build(self, text: str, *, references: Sequence[Tensor] = ()) -> Tensor:
        """Random rows, the reference codes, and the last row: `PROMPT_TOKENS` in all besides the codes."""
        rows = random_prompt(self._config, PROMPT_TOKENS, torch.Generator().manual_seed(len(text)))
        codes = [
            torch.cat((torch.full((len(clip), 1), self._config.audio_user_slot_token_id), clip.long()), 1)
            for clip in references
        ]
        return torch.cat([rows[:-1], *codes, rows[-1:]])


def random_prompt(config: ModelConfig, tokens: int, generator: torch.Generator) -> Tensor:
    """[tokens, 1+n_vq] int64. Rows of text, then the row that begins the audio."""
    rows = torch.full((tokens, 1 + config.n_vq), config.audio_pad_token_id)
    rows[:, 0] = torch.randint(config.backbone.vocab_size, (tokens,), generator=generator)
    rows[-1, 0] = config.audio_start_token_id
    return rows


def for_load(config: EngineConfig, concurrency: int) -> EngineConfig:
    """Settings with a row for each client and just enough tokens for the workload.

    Raises:
        UserError: some clients would get errors for audio.
    """
    if config.slot_policy == "reject" and config.codec_slots is not None and config.codec_slots < concurrency:
        raise UserError(f"{concurrency} clients need as many `codec_slots`, or a `slot_policy` other than reject")
    clip = int(CLIP_SECONDS * 12.5) + 1
    sizes = {"rows": concurrency, "max_tokens": PROMPT_TOKENS + clip + FRAMES[1], "max_frames": FRAMES[1]}
    return dataclasses.replace(config, max_waiting=max(config.max_waiting, concurrency), **sizes)


def random_engine(
    size: str, config: EngineConfig, *, device: torch.device | str, dtype: torch.dtype, encoder: bool = False
) -> Engine:
    """An engine over random weights that never stop."""
    codec = random_codec(codec_config(size), device=device, dtype=dtype, encoder=encoder)
    model = random_model(size, device=device, dtype=dtype)
    return Engine(config, model, codec, RandomPrompts(model.config))


def _print(load: Load, engine: Engine) -> None:
    summary, shot = load.summary(), engine.snapshot()
    graphs = ", ".join(f"{name} {graph['hit_ratio']:.3f}" for name, graph in shot["graphs"].items())
    entries = {
        "clients": f"{load.concurrency} ({engine.config.mode})",
        "audio": f"{summary['audio_s_per_s']:.1f} s of audio/s, {summary['requests_per_s']:.2f} requests/s",
        "first audio": _points(summary["first_audio_ms"], "ms"),
        "gaps": _points(summary["gaps_ms"], "ms"),
        "latency": _points(summary["latency_ms"], "ms"),
        "RTF": _points(summary["rtf"], ""),
        "underruns": str(load.underruns),
        "first audio by stage": ", ".join(
            f"{name} {value:.1f} ms" for name, value in summary["stages_ms"].items() if value is not None
        )
        or "none",
        "frame by stage": ", ".join(f"{name} {times['p50']:.2f} ms" for name, times in shot["frame_ms"].items()),
        "codec calls": f"{shot['codec_calls']}, {shot['codec_rows'] / max(shot['codec_calls'], 1):.1f} streams each",
        "graph hits": graphs,
    }
    print_summary(entries)
    print(flush=True)


def _points(values: dict[str, float], unit: str) -> str:
    if not values:
        return "none"
    return ", ".join(f"{name} {values[name]:.4g}" for name in ("p50", "p95", "p99")) + f" {unit}"

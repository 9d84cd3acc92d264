"""What goes into the engine and what comes out."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from moss_kernels import SamplingParams

# Of a request's first audio, in order; they add up to `Result.first_audio`.
FIRST_AUDIO_STAGES = ("reference", "queue", "prefill", "chunk", "codec", "output")


class EngineBusy(RuntimeError):
    """No more requests are accepted now."""


class EngineClosed(RuntimeError):
    """The engine takes no requests any more."""


class DeadlineExceeded(RuntimeError):
    """A request took longer than it was allowed to."""


class NoCodecSlot(RuntimeError):
    """All codec slots are taken, and the engine was told to reject requests then."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to speak, or one finished prompt.

    Attributes:
        text: what to speak; None if `prompt` is given.
        prompt: [T, 1+n_vq] int64 on the CPU, as `PromptBuilder` makes it; None if `text` is given.
        references: clips [channels, n] float32 at the codec's sampling rate whose voice is to be used, with `text`.
        fields: further arguments of `PromptBuilder.build`, with `text`.
        params: sampling parameters; without a seed one is drawn and reported.
        max_frames: limit; None: the engine's. The engine and the end of the context limit too.
        deadline_s: seconds after `submit` at which it ends with DeadlineExceeded; None: never.
    """

    text: str | None = None
    prompt: Tensor | None = None
    references: tuple[Tensor, ...] = ()
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_frames: int | None = None
    deadline_s: float | None = None

    def __post_init__(self):
        """Raises ValueError or TypeError naming the field."""
        if (self.text is None) == (self.prompt is None):
            raise ValueError("Request: exactly one of `text` and `prompt` must be given")
        if self.prompt is not None and (self.references or self.fields):
            raise ValueError("Request: `references` and `fields` go with `text`, a `prompt` holds them already")
        if self.text is not None and not isinstance(self.text, str):
            raise TypeError(f"Request: `text` must be a str, got {type(self.text).__name__}")
        if self.prompt is not None:
            _check_prompt(self.prompt)
        # A tensor would come apart into its rows.
        if isinstance(self.references, Tensor) or not isinstance(self.references, Iterable):
            raise TypeError(f"Request: `references` must be a list of clips, got {type(self.references).__name__}")
        object.__setattr__(self, "references", tuple(self.references))
        for clip in self.references:
            if not isinstance(clip, Tensor):
                raise TypeError(f"Request: `references` must be tensors [channels, n], got {type(clip).__name__}")
        if not isinstance(self.fields, Mapping):
            raise TypeError(f"Request: `fields` must be a mapping, got {type(self.fields).__name__}")
        taken = {"text", "references"} & self.fields.keys()
        if taken:
            raise ValueError(f"Request: `fields` must not hold what has a field of its own, got {sorted(taken)}")
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"Request: `params` must be a SamplingParams, got {type(self.params).__name__}")
        limit = self.max_frames
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ValueError(f"Request: `max_frames` must be an integer of at least 1, got {limit!r}")
        if self.deadline_s is not None and not (
            isinstance(self.deadline_s, (int, float))
            and not isinstance(self.deadline_s, bool)
            and 0 < self.deadline_s <= sys.float_info.max
        ):
            raise ValueError(f"Request: `deadline_s` must be a positive number of seconds, got {self.deadline_s!r}")


def _check_prompt(prompt: Any) -> None:
    """What the engine relies on before the model has looked at it; the dtype, the width and the ids are the model's."""
    if not isinstance(prompt, Tensor):
        raise TypeError(f"Request: `prompt` must be a tensor, got {type(prompt).__name__}")
    if prompt.device.type != "cpu" or prompt.layout != torch.strided or prompt.is_nested:
        kind = "nested" if prompt.is_nested else prompt.layout
        raise ValueError(f"Request: `prompt` must be a dense tensor on the CPU, got {kind} on {prompt.device}")
    if prompt.dim() != 2:
        raise ValueError(f"Request: `prompt` must be [T, 1+n_vq], got {tuple(prompt.shape)}")


@dataclasses.dataclass(frozen=True)
class AudioChunk:
    """The next audio of a request.

    Attributes:
        pcm: [channels, n] float32 (full scale 1) or int16. The reader's own memory.
        first_frame: number of its first frame.
        frames: number of its frames; n / frames is the codec's samples per frame.
        time: seconds from `submit` until it was there for the reader.
    """

    pcm: numpy.ndarray
    first_frame: int
    frames: int
    time: float


@dataclasses.dataclass(frozen=True)
class Result:
    """How a request ended.

    Attributes:
        codes: [n, n_vq] int16 on the CPU. Frames that became audio; of an aborted or failed request those so far.
        seed: in force; the same request with it repeats the codes. None if the request never got that far.
        finish_reason: "stop" (the model stopped), "length" (cut at a limit), "abort" or "error".
        error: what went wrong, of an error.
        frames: n.
        seconds: of audio.
        chunks: audio came in so many pieces.
        first_audio: seconds from `submit` to the first audio; None without audio.
        latency: seconds from `submit` to the end.
        stages: seconds of each of FIRST_AUDIO_STAGES: encoding references, waiting for a row, from there to the first
            frame, waiting for the codec, in the codec and on the way to the host, handing out. Empty without audio.
    """

    codes: Tensor
    seed: int | None
    finish_reason: str
    error: Exception | None
    frames: int
    seconds: float
    chunks: int
    first_audio: float | None
    latency: float
    stages: dict[str, float]


def no_codes(codebooks: int) -> Tensor:
    """Codes of a request without frames."""
    return torch.empty(0, codebooks, dtype=torch.int16)

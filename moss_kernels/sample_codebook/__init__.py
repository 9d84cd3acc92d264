"""Draws one code per batch row, with per-request parameters, history and counter-based random numbers."""

import torch

from .params import SamplingParams
from .reference import EMPTY, NONFINITE, sample_codebook_reference
from .state import SamplingState

__all__ = ["EMPTY", "NONFINITE", "SamplingParams", "SamplingState", "sample_codebook", "sample_codebook_reference"]

MAX_VOCAB = 4096

_LIBRARY = torch.library.Library("moss", "FRAGMENT")
_LIBRARY.define(
    "sample_codebook(Tensor logits, Tensor row_map, Tensor active, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor? repetition_penalty, Tensor seed, Tensor frame, Tensor(a!)? seen, int channel, int codebook, int pad_id, "
    "Tensor(b!) code, Tensor(c!) status, Tensor? random_words=None) -> ()"
)
_LIBRARY.impl("sample_codebook", sample_codebook_reference, "CPU")
_LIBRARY.impl("sample_codebook", sample_codebook_reference, "CUDA")
torch.library.register_fake("moss::sample_codebook", lambda *args, **kwargs: None, lib=_LIBRARY)


def sample_codebook(
    logits: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    seed: torch.Tensor,
    frame: torch.Tensor,
    seen: torch.Tensor | None,
    channel: int,
    codebook: int,
    pad_id: int,
    code: torch.Tensor,
    status: torch.Tensor,
    random_words: torch.Tensor | None = None,
) -> None:
    torch.ops.moss.sample_codebook(
        logits,
        row_map,
        active,
        temperature,
        top_k,
        top_p,
        repetition_penalty,
        seed,
        frame,
        seen,
        channel,
        codebook,
        pad_id,
        code,
        status,
        random_words,
    )

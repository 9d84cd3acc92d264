"""Profiler ranges (NVTX): all names, and how one is opened."""

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch

_DOMAIN = "moss"


class Range(enum.StrEnum):
    """Stages as a profile shows them. Ranges opened while a graph is captured do not show in its replays."""

    WARM_UP = "moss/warm_up"
    ADMIT = "moss/admit"
    PREFILL = "moss/prefill"
    FRAME = "moss/frame"
    BACKBONE = "moss/backbone"
    LOCAL_FRAME = "moss/local_frame"
    BOOKKEEPING = "moss/bookkeeping"
    CODEC_CHUNK = "moss/codec_chunk"


def annotate(name: Range) -> AbstractContextManager:
    """A context that a profiler shows as a range of the calling thread. Without CUDA it does nothing."""
    return _opener()(name.value)


@cache
def _opener() -> Callable[[str], AbstractContextManager]:
    if not torch.cuda.is_available():
        return lambda name: nullcontext()
    try:
        import nvtx
    except ImportError:
        return torch.cuda.nvtx.range
    return partial(nvtx.annotate, domain=_DOMAIN)

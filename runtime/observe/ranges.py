"""Profiler ranges (NVTX): all names, and how one is opened."""

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial

import torch

_DOMAIN = "moss"
_for_torch = False


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
    ENGINE = "moss/engine"


def annotate(name: Range) -> AbstractContextManager:
    """A context that a profiler shows as a range of the calling thread. Without CUDA it does nothing."""
    return (torch.profiler.record_function if _for_torch else _opener())(name.value)


@contextmanager
def torch_ranges() -> Iterator[None]:
    """Ranges of all threads are those of the torch profiler inside, on any device, in place of NVTX's."""
    global _for_torch
    _for_torch = True
    try:
        yield
    finally:
        _for_torch = False


@cache
def _opener() -> Callable[[str], AbstractContextManager]:
    if not torch.cuda.is_available():
        return lambda name: nullcontext()
    try:
        import nvtx
    except ImportError:
        return torch.cuda.nvtx.range
    return partial(nvtx.annotate, domain=_DOMAIN)

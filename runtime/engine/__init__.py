"""The streaming engine: requests in, audio out while it is made."""

from moss_runtime.engine.config import EngineConfig
from moss_runtime.engine.engine import Engine
from moss_runtime.engine.handle import Handle
from moss_runtime.engine.loading import load_engine
from moss_runtime.engine.request import (
    AudioChunk,
    DeadlineExceeded,
    EngineBusy,
    EngineClosed,
    NoCodecSlot,
    Request,
    Result,
)

__all__ = [
    "AudioChunk",
    "DeadlineExceeded",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "Handle",
    "NoCodecSlot",
    "Request",
    "Result",
    "load_engine",
]

"""The audio codec: waveforms to codes and back, offline and streaming."""

from moss_runtime.model.codec.codec import Codec
from moss_runtime.model.codec.config import CodecConfig
from moss_runtime.model.codec.stream import CodecStream

__all__ = ["Codec", "CodecConfig", "CodecStream"]

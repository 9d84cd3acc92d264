"""CUDA graphs over static buffers: what is captured, for which shapes, and what happens to a shape that is not."""

from moss_runtime.graphs.codec_chunk import CodecChunk
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.graphs.speech import generate

__all__ = ["CodecChunk", "Runtime", "generate"]

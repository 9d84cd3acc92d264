"""CUDA graphs over static buffers: what is captured, for which shapes, and what happens to a shape that is not."""

from moss_runtime.graphs.codec_chunk import CodecChunk

__all__ = ["CodecChunk"]

"""Kernels for MOSS-TTS-Local-Transformer-v1.5. They know tensors and nothing of models or requests."""

from .codec_linear import codec_linear
from .dequantize_codes import dequantize_codes
from .embed_codes import embed_codes
from .local_frame_decode import LocalFrameDecoder
from .local_rope_attention import local_rope_attention, local_rope_attention_lookup
from .ring_attention import ring_attention
from .ring_kv_write import ring_kv_write
from .sample_codebook import SamplingParams, SamplingState, sample_codebook

__all__ = [
    "LocalFrameDecoder",
    "SamplingParams",
    "SamplingState",
    "codec_linear",
    "dequantize_codes",
    "embed_codes",
    "local_rope_attention",
    "local_rope_attention_lookup",
    "ring_attention",
    "ring_kv_write",
    "sample_codebook",
]

"""Kernels for MOSS-TTS-Local-Transformer-v1.5. They know tensors and nothing of models or requests."""

from .backbone_linear import backbone_linear
from .chunk_epilogue import chunk_epilogue
from .chunk_prologue import chunk_prologue
from .codec_linear import codec_linear
from .embed_codes import embed_codes
from .frame_bookkeeping import frame_bookkeeping_begin, frame_bookkeeping_end
from .kv_append import kv_append
from .local_frame_decode import LocalFrameDecoder
from .local_rope_attention import local_rope_attention, local_rope_attention_lookup
from .paged_attention import AttentionScratch, paged_attention
from .prefill_attention import prefill_attention
from .prefill_linear import prefill_linear
from .ring_attention import ring_attention
from .ring_kv_write import ring_kv_write
from .rms_norm import rms_norm
from .sample_codebook import SamplingParams, SamplingState, sample_codebook
from .sample_head import sample_head, sample_head_workspace

__all__ = [
    "AttentionScratch",
    "LocalFrameDecoder",
    "SamplingParams",
    "SamplingState",
    "backbone_linear",
    "chunk_epilogue",
    "chunk_prologue",
    "codec_linear",
    "embed_codes",
    "frame_bookkeeping_begin",
    "frame_bookkeeping_end",
    "kv_append",
    "local_rope_attention",
    "local_rope_attention_lookup",
    "paged_attention",
    "prefill_attention",
    "prefill_linear",
    "ring_attention",
    "ring_kv_write",
    "rms_norm",
    "sample_codebook",
    "sample_head",
    "sample_head_workspace",
]

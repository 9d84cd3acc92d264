"""Windowed causal attention of a chunk of tokens over a ring of earlier keys and values, read in place by slot id."""

from moss_kernels.ring_attention.reference import (
    masked_attention,
    ring_attention_reference,
    ring_visibility,
    rope_tables,
    rotate_interleaved,
)

__all__ = ["masked_attention", "ring_attention_reference", "ring_visibility", "rope_tables", "rotate_interleaved"]

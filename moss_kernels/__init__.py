"""Kernels for MOSS-TTS-Local-Transformer-v1.5. They know tensors and nothing of models or requests."""

from .sample_codebook import SamplingParams, SamplingState, sample_codebook

__all__ = ["SamplingParams", "SamplingState", "sample_codebook"]

"""The models in eager PyTorch: what every kernel is held to."""

from moss_runtime.model.config import BackboneConfig, LocalConfig, ModelConfig
from moss_runtime.model.tts import Generation, MossTTS, with_seeds

__all__ = ["BackboneConfig", "Generation", "LocalConfig", "ModelConfig", "MossTTS", "with_seeds"]

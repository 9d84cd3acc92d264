"""MOSS-TTS-Local-Transformer-v1.5 as a library: prompts, the model, the codec, and audio files."""

from moss_runtime.audio import load_audio, save_wav
from moss_runtime.model.codec import Codec
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.model.tts import Generation, MossTTS

__all__ = ["Codec", "Generation", "MossTTS", "PromptBuilder", "load_audio", "save_wav"]

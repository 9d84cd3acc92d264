"""Configuration of the TTS model, read from the official `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moss_runtime.errors import CheckpointError, UserError
from moss_runtime.model.checkpoint import parse_config

if TYPE_CHECKING:
    from moss_runtime.model.codec.config import CodecConfig

DEFAULT_ROPE_THETA = 1e6  # Qwen3, where the config names none
DEFAULT_LOCAL_ROPE_BASE = 1e4  # fallback of the official local transformer
# Beyond these a number is a mistake, and building the modules would take all memory before any tensor is compared.
LARGEST_SIZE = 2**24
LARGEST_COUNT = 1024


@dataclass(frozen=True)
class BackboneConfig:
    """Qwen3 decoder. Field names are those of the `qwen3_config` object."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "qwen3_config") -> "BackboneConfig":
        """Read the `qwen3_config` (or `language_config`) object; `where` is its name in error messages."""
        reader = _Reader(config, where)
        reader.expect("hidden_act", "silu")
        reader.expect("attention_bias", False, absent_is_fine=True)
        reader.expect("use_sliding_window", False, absent_is_fine=True)
        reader.expect("tie_word_embeddings", True, absent_is_fine=True)
        backbone = cls(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            intermediate_size=reader.positive("intermediate_size"),
            num_hidden_layers=reader.positive("num_hidden_layers", LARGEST_COUNT),
            num_attention_heads=reader.positive("num_attention_heads", LARGEST_COUNT),
            num_key_value_heads=reader.positive("num_key_value_heads", LARGEST_COUNT),
            head_dim=reader.positive("head_dim"),
            max_position_embeddings=reader.positive("max_position_embeddings"),
            rms_norm_eps=reader.number("rms_norm_eps"),
            rope_theta=_rope_theta(reader),
        )
        if backbone.num_attention_heads % backbone.num_key_value_heads:
            raise reader.error(
                "num_attention_heads",
                f"a multiple of num_key_value_heads = {backbone.num_key_value_heads}",
                backbone.num_attention_heads,
            )
        if backbone.head_dim % 2:
            raise reader.error("head_dim", "even", backbone.head_dim)
        return backbone


@dataclass(frozen=True)
class LocalConfig:
    """The one block of the local transformer. Field names are those of the `gpt2_config` object."""

    n_embd: int
    n_head: int
    n_inner: int
    layer_norm_epsilon: float
    rope_base: float

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LocalConfig":
        """Read the `gpt2_config` object."""
        reader = _Reader(config, "gpt2_config")
        reader.expect("n_layer", 1)
        reader.expect("position_embedding_type", "rope")
        reader.expect("activation_function", "silu")
        reader.expect("scale_attn_weights", True, absent_is_fine=True)
        reader.expect("scale_attn_by_inverse_layer_idx", False, absent_is_fine=True)
        local = cls(
            n_embd=reader.positive("n_embd"),
            n_head=reader.positive("n_head", LARGEST_COUNT),
            n_inner=reader.positive("n_inner"),
            layer_norm_epsilon=reader.number("layer_norm_epsilon"),
            rope_base=reader.number("rope_base", DEFAULT_LOCAL_ROPE_BASE),
        )
        if local.n_embd % (2 * local.n_head):
            raise reader.error("n_embd", f"a multiple of 2 * n_head = {2 * local.n_head}", local.n_embd)
        return local


@dataclass(frozen=True)
class ModelConfig:
    """MOSS-TTS-Local-Transformer-v1.5. Field names are those of `config.json`.

    `audio_pad_token_id` is the code that stands for "no code here"; it lies outside the codebooks and no embedding
    table has a row for it.
    """

    backbone: BackboneConfig
    local: LocalConfig
    n_vq: int
    audio_vocab_size: int
    audio_pad_token_id: int
    pad_token_id: int
    im_start_token_id: int
    im_end_token_id: int
    audio_start_token_id: int
    audio_end_token_id: int
    audio_user_slot_token_id: int
    audio_assistant_slot_token_id: int

    def check_codec(self, codec: "CodecConfig") -> None:
        """Raise UserError unless a codec has the codebooks that the model speaks."""
        ours, theirs = (self.n_vq, self.audio_vocab_size), (codec.codebooks, codec.codebook_size)
        if ours != theirs:
            raise UserError(
                f"the model speaks {ours[0]} codebooks of {ours[1]}, "
                f"the codec {theirs[0]} of {theirs[1]}: they do not belong together"
            )

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelConfig":
        """Read `config.json` of a checkpoint directory.

        Raises:
            CheckpointError: as `from_dict`, or the file is missing, not JSON or that of a codec.
        """
        return parse_config(directory, "model", cls.from_dict)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of an official `config.json`.

        Raises:
            CheckpointError: a key is missing, has the wrong type, contradicts another, or asks for a variant of the
                architecture that this project does not implement. The message names the key.
        """
        reader = _Reader(config, "config")
        reader.expect("local_text_head_mode", "binary")
        backbone = _backbone(reader)
        local = LocalConfig.from_dict(reader.mapping("gpt2_config"))
        if local.n_embd != backbone.hidden_size:
            raise reader.error("gpt2_config.n_embd", f"the hidden_size {backbone.hidden_size}", local.n_embd)
        n_vq, audio_vocab_size = reader.positive("n_vq", LARGEST_COUNT), reader.positive("audio_vocab_size")
        reader.expect("audio_codebook_sizes", [audio_vocab_size] * n_vq, absent_is_fine=True)
        for key, size in (
            ("hidden_size", backbone.hidden_size),
            ("local_hidden_size", backbone.hidden_size),
            ("vocab_size", backbone.vocab_size),
        ):
            reader.expect(key, size, absent_is_fine=True)
        audio_pad = reader.positive("audio_pad_token_id")
        reader.expect("audio_pad_code", audio_pad, absent_is_fine=True)
        if audio_pad < audio_vocab_size:
            raise reader.error("audio_pad_token_id", f"at least audio_vocab_size = {audio_vocab_size}", audio_pad)
        token_ids = {
            key: reader.index(key, backbone.vocab_size)
            for key in (
                "pad_token_id",
                "im_start_token_id",
                "im_end_token_id",
                "audio_start_token_id",
                "audio_end_token_id",
                "audio_user_slot_token_id",
                "audio_assistant_slot_token_id",
            )
        }
        return cls(backbone, local, n_vq, audio_vocab_size, audio_pad, **token_ids)


def _backbone(reader: "_Reader") -> BackboneConfig:
    """The official files hold the same object under two names; either may be absent, and both must agree."""
    names = [name for name in ("qwen3_config", "language_config") if reader.config.get(name) is not None]
    if not names:
        raise reader.error("qwen3_config", "present", "no such key")
    found = [BackboneConfig.from_dict(reader.mapping(name), name) for name in names]
    if found[0] != found[-1]:
        raise reader.error("language_config", "the same as qwen3_config", "different values")
    return found[0]


def _rope_theta(reader: "_Reader") -> float:
    """Theta is a key of its own in older files and part of `rope_parameters` in newer ones."""
    if reader.config.get("rope_scaling") is not None:
        raise reader.error("rope_scaling", "null", reader.config["rope_scaling"])
    if reader.config.get("rope_parameters") is None:
        return reader.number("rope_theta", DEFAULT_ROPE_THETA)
    parameters = _Reader(reader.mapping("rope_parameters"), f"{reader.where}.rope_parameters")
    parameters.expect("rope_type", "default", absent_is_fine=True)
    theta = parameters.number("rope_theta", DEFAULT_ROPE_THETA)
    reader.expect("rope_theta", theta, absent_is_fine=True)
    return theta


class _Reader:
    """Typed access to one JSON object, with errors that name the key."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config = config
        self.where = where

    def error(self, key: str, expected: str, got: object) -> CheckpointError:
        return CheckpointError(f"{self.where}: `{key}` must be {expected}, got {got!r}")

    def positive(self, key: str, largest: int = LARGEST_SIZE) -> int:
        value = self._get(key)
        if not _is_int(value) or not 1 <= value <= largest:
            raise self.error(key, f"an integer in 1..{largest}", value)
        return value

    def index(self, key: str, size: int) -> int:
        value = self._get(key)
        if not _is_int(value) or not 0 <= value < size:
            raise self.error(key, f"an integer in 0..{size - 1}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key) if default is None or self.config.get(key) is not None else default
        if not (_is_int(value) or isinstance(value, float)) or not 0 < value < 1e300:
            raise self.error(key, "a positive number", value)
        return float(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return value

    def expect(self, key: str, expected: object, *, absent_is_fine: bool = False) -> None:
        """The only value of `key` that this project implements, or that agrees with what was read before."""
        if absent_is_fine and self.config.get(key) is None:
            return
        value = self._get(key)
        if value != expected:
            raise self.error(key, f"{expected!r}", value)

    def _get(self, key: str) -> Any:
        if key not in self.config:
            raise CheckpointError(f"{self.where}: `{key}` is missing")
        return self.config[key]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""The codec's `config.json` as frozen dataclasses, checked for consistency."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moss_runtime.errors import CheckpointError
from moss_runtime.model.checkpoint import parse_config
from moss_runtime.model.config import LARGEST_COUNT, LARGEST_SIZE

COUNTS = ("num_heads", "num_layers", "num_quantizers", "number_channels")
QUANTIZER_TYPES = ("rlfq", "random_prefix_rlfq")
REQUIRED_SETTINGS = {"causal": True, "norm": "layer_norm", "positional_embedding": "rope", "gating": "none"}


@dataclass(frozen=True)
class PatchConfig:
    """A step that trades features for rate: the encoder folds `patch_size` tokens into one, the decoder unfolds."""

    patch_size: int


@dataclass(frozen=True)
class TransformerConfig:
    """One transformer stage. `context` is the attention window in tokens, the query itself included."""

    input_size: int
    output_size: int
    d_model: int
    heads: int
    layers: int
    feedforward_size: int
    context: int
    max_period: float

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


@dataclass(frozen=True)
class QuantizerConfig:
    """Residual quantizer: `codebooks` tables of `codebook_size` rows of `codebook_dim` values."""

    input_size: int
    rvq_size: int
    output_size: int
    codebooks: int
    codebook_size: int
    codebook_dim: int


@dataclass(frozen=True)
class CodecConfig:
    """The whole codec. `samples_per_frame` counts samples of one channel."""

    sampling_rate: int
    channels: int
    samples_per_frame: int
    quantizer: QuantizerConfig
    encoder: tuple[PatchConfig | TransformerConfig, ...]
    decoder: tuple[PatchConfig | TransformerConfig, ...]

    @property
    def frame_rate(self) -> float:
        """Frames per second."""
        return self.sampling_rate / self.samples_per_frame

    @property
    def codebooks(self) -> int:
        return self.quantizer.codebooks

    @property
    def codebook_size(self) -> int:
        return self.quantizer.codebook_size

    @classmethod
    def from_directory(cls, directory: str | Path) -> "CodecConfig":
        """Read `config.json` of a codec checkpoint.

        Raises:
            CheckpointError: as `from_dict`, or the file is missing, not JSON or that of a MOSS-TTS model.
        """
        return parse_config(directory, "codec", cls.from_dict)

    @classmethod
    def from_dict(cls, config: dict) -> "CodecConfig":
        """Read the official config.

        Raises:
            CheckpointError: a key is missing or has an impossible value, a setting is not supported, or sizes and
                rates do not fit each other.
        """
        sampling_rate = _positive(config, "sampling_rate")
        channels = _positive(config, "number_channels")
        samples_per_frame = _positive(config, "downsample_rate")
        if channels > 1 and config.get("enable_channel_interleave") is not True:
            raise CheckpointError(
                f"codec config: enable_channel_interleave must be true with {channels} channels, "
                f"got {config.get('enable_channel_interleave')!r}"
            )
        stream_rate = float(sampling_rate * channels)
        fallback = config.get("causal_transformer_context_duration")
        encoder = _modules(config, "encoder_kwargs", stream_rate, fallback, patch_gain=-1)
        decoder = _modules(config, "decoder_kwargs", sampling_rate / samples_per_frame, fallback, patch_gain=1)
        quantizer = _quantizer(config)
        values_per_frame = samples_per_frame * channels
        _check_chain("encoder_kwargs", encoder, 1, quantizer.input_size, values_per_frame, folds=True)
        _check_chain("decoder_kwargs", decoder, quantizer.output_size, 1, values_per_frame, folds=False)
        return cls(sampling_rate, channels, samples_per_frame, quantizer, encoder, decoder)


def _positive(section: dict, key: str, where: str = "") -> int:
    value, largest = section.get(key), LARGEST_COUNT if key in COUNTS else LARGEST_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise CheckpointError(f"codec config: {where}{key} must be an integer in 1..{largest}, got {value!r}")
    return value


def _positive_number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST_SIZE:
        raise CheckpointError(f"codec config: {name} must be a positive number up to {LARGEST_SIZE}, got {value!r}")
    return float(value)


def _section(config: dict, key: str, kind: type) -> dict | list:
    value = config.get(key)
    if not isinstance(value, kind) or not value:
        raise CheckpointError(f"codec config: {key} must be a {kind.__name__} with entries, got {value!r}")
    return value


def _quantizer(config: dict) -> QuantizerConfig:
    section = _section(config, "quantizer_kwargs", dict)
    for kind in (config.get("quantizer_type"), section.get("quantizer_type", config.get("quantizer_type"))):
        if kind not in QUANTIZER_TYPES:
            raise CheckpointError(f"codec config: quantizer_type must be one of {QUANTIZER_TYPES}, got {kind!r}")
    keys = ("input_dim", "rvq_dim", "output_dim", "num_quantizers", "codebook_size", "codebook_dim")
    return QuantizerConfig(*(_positive(section, key, "quantizer_kwargs.") for key in keys))


def _modules(
    config: dict, key: str, rate: float, fallback: float | None, *, patch_gain: int
) -> tuple[PatchConfig | TransformerConfig, ...]:
    """`rate`: tokens/s at the input; a patch multiplies it by `patch_size ** patch_gain`."""
    modules = []
    for index, section in enumerate(_section(config, key, list)):
        where = f"{key}[{index}]."
        kind = section.get("module_type") if isinstance(section, dict) else None
        if kind == "PatchedPretransform":
            modules.append(PatchConfig(_positive(section, "patch_size", where)))
            rate *= modules[-1].patch_size ** float(patch_gain)
        elif kind == "Transformer":
            modules.append(_transformer(section, where, rate, fallback))
        else:
            raise CheckpointError(
                f"codec config: {where}module_type must be 'Transformer' or 'PatchedPretransform', got {kind!r}"
            )
    return tuple(modules)


def _transformer(section: dict, where: str, rate: float, fallback: float | None) -> TransformerConfig:
    for key, expected in REQUIRED_SETTINGS.items():
        if section.get(key) != expected:
            raise CheckpointError(f"codec config: {where}{key} must be {expected!r}, got {section.get(key)!r}")
    _positive_number(section.get("layer_scale"), f"{where}layer_scale")
    duration = section.get("context_duration")
    duration = _positive_number(fallback if duration is None else duration, f"{where}context_duration")
    keys = ("input_dimension", "output_dimension", "d_model", "num_heads", "num_layers", "dim_feedforward")
    stage = TransformerConfig(
        *(_positive(section, key, where) for key in keys),
        context=round(rate * duration),
        max_period=_positive_number(section.get("max_period"), f"{where}max_period"),
    )
    if stage.d_model % stage.heads or stage.head_dim % 2:
        raise CheckpointError(
            f"codec config: {where}d_model must be num_heads times an even head size, got {stage.d_model} and "
            f"{stage.heads} heads"
        )
    if not 1 <= stage.context <= LARGEST_SIZE:
        raise CheckpointError(
            f"codec config: {where}context_duration {duration} s is {stage.context} tokens, not 1..{LARGEST_SIZE}"
        )
    return stage


def _check_chain(
    key: str,
    modules: Sequence[PatchConfig | TransformerConfig],
    first_size: int,
    last_size: int,
    rate_change: int,
    *,
    folds: bool,
) -> None:
    """Follow the feature size through the modules; the patches together must change the rate by `rate_change`."""
    size, patches = first_size, 1
    for index, module in enumerate(modules):
        if isinstance(module, TransformerConfig):
            if module.input_size != size:
                raise CheckpointError(
                    f"codec config: {key}[{index}].input_dimension must be {size}, the size that reaches it, "
                    f"got {module.input_size}"
                )
            size = module.output_size
            continue
        if not folds and size % module.patch_size:
            raise CheckpointError(
                f"codec config: {key}[{index}].patch_size must divide {size}, the size that reaches it, "
                f"got {module.patch_size}"
            )
        patches *= module.patch_size
        size = size * module.patch_size if folds else size // module.patch_size
    if size != last_size:
        raise CheckpointError(f"codec config: {key} must end with {last_size} features, got {size}")
    if patches != rate_change:
        raise CheckpointError(
            f"codec config: the patch sizes of {key} must multiply to {rate_change}, downsample_rate x "
            f"number_channels, got {patches}"
        )

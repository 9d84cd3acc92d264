"""The codec's weights as its steps over buffers use them: shared with the codec, but for what pays to be packed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moss_kernels.codec_linear import layer_norm_sums
from moss_runtime.model.codec.codec import Codec
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.model.codec.quantizer import Quantizer
from moss_runtime.model.codec.transformer import TransformerLayer, TransformerStage


@dataclass(frozen=True)
class LayerWeights:
    """Arguments of the four `codec_linear` calls of a layer, as they are named there."""

    in_proj: dict[str, torch.Tensor]
    out_proj: dict[str, torch.Tensor]
    linear1: dict[str, torch.Tensor]
    linear2: dict[str, torch.Tensor]


@dataclass(frozen=True)
class StageWeights:
    """One transformer stage and the patch steps beside it, which are views.

    Attributes:
        tokens_per_frame: rate of the stage.
        input_proj: [d_model, input_size], columns in the order of [B, T * p, d] read as [B, T, p * d]. None in the
            decoder, where the code table or the stage before leaves the residual stream as this one begins it.
        output_proj: [output_size, d_model]. In the decoder with the next stage's input projection in it, rows in the
            order in which the patch step lays tokens out: [p * d_model of the next stage, d_model].
        layers: in order.
    """

    config: TransformerConfig
    tokens_per_frame: int
    input_proj: torch.Tensor | None
    output_proj: torch.Tensor
    layers: list[LayerWeights]


def decoder_weights(codec: Codec) -> list[StageWeights]:
    """The stages of a codec's decoder.

    Raises:
        ValueError: the decoder does not begin with a transformer stage.
    """
    modules = list(codec.decoder)
    if not isinstance(modules[0], TransformerStage):
        raise ValueError(f"`codec` must have a decoder that begins with a transformer, got {type(modules[0]).__name__}")
    starts = [index for index, module in enumerate(modules) if isinstance(module, TransformerStage)]
    stages, rate = [], 1
    for start, end in zip(starts, [*starts[1:], len(modules)], strict=True):
        stage = modules[start]
        order = _patched(
            torch.arange(stage.config.output_size, device=codec.device)[None, None], modules[start + 1 : end]
        )
        output_proj = stage.output_proj.weight.detach()[order.flatten()]
        if end < len(modules):
            output_proj = _product(modules[end].input_proj, output_proj.unflatten(0, order.shape[1:])).flatten(0, 1)
        stages.append(StageWeights(stage.config, rate, None, output_proj.contiguous(), _layers(stage)))
        rate *= order.shape[1]
    return stages


def encoder_weights(codec: Codec) -> list[StageWeights]:
    """The stages of a codec's encoder.

    Raises:
        ValueError: the encoder does not end with a transformer stage.
    """
    modules = list(codec.encoder)
    if not isinstance(modules[-1], TransformerStage):
        raise ValueError(f"`codec` must have an encoder that ends with a transformer, got {type(modules[-1]).__name__}")
    stages, start, values = [], 0, 1
    rate = codec.config.samples_per_frame * codec.config.channels
    for end in (index for index, module in enumerate(modules) if isinstance(module, TransformerStage)):
        stage = modules[end]
        columns = torch.arange(stage.config.input_size, device=codec.device).view(1, -1, values)
        rate //= columns.shape[1]
        # Place in the view of each feature.
        order = _patched(columns, modules[start:end]).flatten()
        input_proj = stage.input_proj.weight.detach()[:, order.argsort()].contiguous()
        stages.append(StageWeights(stage.config, rate, input_proj, stage.output_proj.weight.detach(), _layers(stage)))
        start, values = end + 1, stage.config.output_size
    return stages


def _product(input_proj: nn.Linear, before: torch.Tensor) -> torch.Tensor:
    """What comes before the input projection, [.., input_size, K], with it, in one: [.., d_model, K]."""
    return (input_proj.weight.detach().double() @ before.double()).to(before.dtype)


def _patched(x: torch.Tensor, patches: Sequence[nn.Module]) -> torch.Tensor:
    for patch in patches:
        x = patch(x)
    return x


def _layers(stage: TransformerStage) -> list[LayerWeights]:
    return [_layer(layer) for layer in stage.transformer.layers]


def _layer(layer: TransformerLayer) -> LayerWeights:
    attention = layer.self_attn
    return LayerWeights(
        in_proj=_normed(layer.norm1, attention.in_projs[0]),
        out_proj={"weight": attention.out_projs[0].weight.detach(), "scale": layer.layer_scale_1.scale.detach()},
        linear1=_normed(layer.norm2, layer.linear1),
        linear2={"weight": layer.linear2.weight.detach(), "scale": layer.layer_scale_2.scale.detach()},
    )


def _normed(norm: nn.LayerNorm, linear: nn.Linear) -> dict[str, torch.Tensor]:
    weight, norm_weight, norm_bias = linear.weight.detach(), norm.weight.detach(), norm.bias.detach()
    sums = layer_norm_sums(weight, norm_weight, norm_bias)
    return {"weight": weight, "norm_weight": norm_weight, "norm_bias": norm_bias, "norm_sums": sums}


@torch.no_grad()
def code_table(quantizer: Quantizer, input_proj: nn.Linear) -> torch.Tensor:
    """[codebooks, codebook_size, d_model] float32. What each code adds to the first stage's residual stream.

    All of `Quantizer.decode` is linear in the codebook rows, its last projection included, and so is the stage's input
    projection; the bias is in the rows of the first codebook.
    """
    codebooks = [codebook.out_proj(codebook.codebook.weight) for codebook in quantizer.quantizers]
    bias = quantizer.output_proj(torch.zeros_like(codebooks[0][:1]))
    table = torch.stack([quantizer.output_proj(rows) - bias for rows in codebooks])
    table[0] += bias
    return _product(input_proj, table.mT).mT.contiguous()

"""A transformer stage of the codec, and the patch steps between stages. All of it is token-major: [B, T, features]."""

import torch
from torch import nn

from moss_kernels.codec_linear import codec_linear_reference
from moss_kernels.codec_linear.reference import NORM_EPS
from moss_kernels.ring_attention import masked_attention, rope_tables, rotate_interleaved
from moss_runtime.model.codec.config import TransformerConfig


class StageAttention:
    """Rotary embedding and attention for the layers of one stage over one input.

    What the layers share (positions, cosines, masks) is computed once, when the object is made.
    """

    def __init__(self, config: TransformerConfig, positions: torch.Tensor):
        """Args: positions: [T] or [B, T] int64. Absolute positions of the tokens."""
        self.config = config
        self.cos_sin = rope_tables(positions, config.head_dim, config.max_period)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Args: qkv: [B, T, 3*H*D] of layer number `layer`, not yet rotated. Returns: [B, T, H*D]."""
        raise NotImplementedError


class OfflineAttention(StageAttention):
    """Causal attention with the stage's window over a whole sequence that starts at position 0."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unflatten(-1, (3, self.config.heads, -1)).unbind(2)
        q, k = rotate_interleaved(q, self.cos_sin), rotate_interleaved(k, self.cos_sin)
        window, length = self.config.context, q.shape[1]
        out = torch.empty_like(q)
        # Blocks of one window: a score matrix over the whole length would grow with its square.
        for start in range(0, length, window):
            end, first = min(start + window, length), max(0, start - window + 1)
            query = torch.arange(start, end, device=q.device)[:, None]
            key = torch.arange(first, end, device=q.device)
            visible = (key <= query) & (key > query - window)
            out[:, start:end] = masked_attention(q[:, start:end], k[:, first:end], v[:, first:end], visible[None])
        return out.flatten(2)


class SelfAttention(nn.Module):
    """Holds the weights around the attention."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.in_projs = nn.ModuleList([nn.Linear(config.d_model, 3 * config.d_model, bias=False)])
        self.out_projs = nn.ModuleList([nn.Linear(config.d_model, config.d_model, bias=False)])


class LayerScale(nn.Module):
    """Holds the weights that a branch is multiplied by before it joins the residual stream."""

    def __init__(self, size: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class TransformerLayer(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.self_attn = SelfAttention(config)
        self.layer_scale_1 = LayerScale(config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.linear1 = nn.Linear(config.d_model, config.feedforward_size, bias=False)
        self.linear2 = nn.Linear(config.feedforward_size, config.d_model, bias=False)
        self.layer_scale_2 = LayerScale(config.d_model)

    def forward(self, x: torch.Tensor, layer: int, attention: StageAttention) -> torch.Tensor:
        in_proj, out_proj = self.self_attn.in_projs[0].weight, self.self_attn.out_projs[0].weight
        qkv = codec_linear_reference(x, in_proj, norm_weight=self.norm1.weight, norm_bias=self.norm1.bias)
        attended = attention(layer, qkv)
        x = codec_linear_reference(attended, out_proj, scale=self.layer_scale_1.scale, residual=x)
        hidden = codec_linear_reference(
            x, self.linear1.weight, norm_weight=self.norm2.weight, norm_bias=self.norm2.bias, gelu=True
        )
        return codec_linear_reference(hidden, self.linear2.weight, scale=self.layer_scale_2.scale, residual=x)


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))

    def forward(self, x: torch.Tensor, attention: StageAttention) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attention)
        return x


class TransformerStage(nn.Module):
    """Input projection, layers, output projection: [B, T, input_size] -> [B, T, output_size]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.input_size, config.d_model, bias=False)
        self.transformer = Transformer(config)
        self.output_proj = nn.Linear(config.d_model, config.output_size, bias=False)

    def forward(self, x: torch.Tensor, attention: StageAttention | None = None) -> torch.Tensor:
        """Args: attention: None means offline, over the whole of `x`."""
        if attention is None:
            attention = OfflineAttention(self.config, torch.arange(x.shape[1], device=x.device))
        return self.output_proj(self.transformer(self.input_proj(x), attention))


class Patch(nn.Module):
    """Fold `patch_size` tokens into one: [B, T * p, d] -> [B, T, d * p]; feature = d index * p + phase."""

    def __init__(self, patch_size: int):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.patch_size)).transpose(2, 3).flatten(2)


class Unpatch(nn.Module):
    """The inverse of `Patch`: [B, T, d * p] -> [B, T * p, d]."""

    def __init__(self, patch_size: int):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, self.patch_size)).transpose(2, 3).flatten(1, 2)

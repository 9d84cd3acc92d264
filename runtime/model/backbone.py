"""Qwen3 decoder over input embeddings, with a KV cache. Module names are the official ones."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moss_kernels.kv_append import rotate_half_split
from moss_kernels.rms_norm import rms_norm_reference
from moss_runtime.model.config import BackboneConfig


class KVCache:
    """Keys and values of all layers for a batch whose rows may be padded on the left. Grows as it is written.

    Attributes:
        length: columns written so far, the same for every row.
        keys: [layers, B, KV heads, capacity, D]. Rotated keys.
        values: [layers, B, KV heads, capacity, D].
        valid: [B, capacity] bool. Column holds a token, not padding.
    """

    def __init__(self, config: BackboneConfig, batch: int, *, dtype: torch.dtype, device: torch.device):
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, 0, config.head_dim)
        self.length = 0
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.valid = torch.empty(batch, 0, dtype=torch.bool, device=device)

    def append(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for the columns of mask [B, T] bool, which marks tokens.

        Returns:
            positions: [B, T] i64. Number of tokens before each column of its row; 0 in the padding before the first.
            attention_mask: [B, 1, T, length] bool. Tokens up to the column itself; padding sees itself only.
        """
        start, self.length = self.length, self.length + mask.shape[1]
        if self.length > self.valid.shape[1]:
            self._grow(max(self.length, 2 * start))
        self.valid[:, start : self.length] = mask
        valid = self.valid[:, : self.length]
        positions = (valid.cumsum(1)[:, start:] - 1).clamp(min=0)
        columns = torch.arange(self.length, device=mask.device)
        queries = columns[start:, None]
        # A row of padding that saw nothing would be NaN, and 0 x NaN would reach the tokens of the next layer.
        visible = (valid[:, None] & (columns <= queries)) | (columns == queries)
        return positions, visible[:, None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, KV heads, T, D] in the newest T columns; returns all columns of the layer."""
        newest = slice(self.length - keys.shape[2], self.length)
        self.keys[layer, :, :, newest] = keys
        self.values[layer, :, :, newest] = values
        return self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]

    def _grow(self, capacity: int) -> None:
        more = capacity - self.valid.shape[1]
        self.keys = F.pad(self.keys, (0, 0, 0, more))
        self.values = F.pad(self.values, (0, 0, 0, more))
        self.valid = F.pad(self.valid, (0, more))


def embedding(rows: int, size: int) -> nn.Embedding:
    """A table that a checkpoint fills: the random values of nn.Embedding take seconds, on the meta device too."""
    return nn.Embedding(rows, size, _weight=torch.empty(rows, size))


class RMSNorm(nn.Module):
    """Root mean square norm in fp32, rounded to the input's dtype before the weight is applied."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_reference(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of q and k before the rotation."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KVCache, layer: int) -> Tensor:
        q = self._heads(self.q_proj(x))
        k = self._heads(self.k_proj(x))
        v = self._heads(self.v_proj(x))
        q, k = rotate_half_split(self.q_norm(q), cos, sin), rotate_half_split(self.k_norm(k), cos, sin)
        keys, values = cache.write(layer, k, v)
        # The query heads of one KV head become further queries of it, so that no key or value is repeated.
        groups = q.shape[1] // k.shape[1]
        grouped = q.unflatten(1, (k.shape[1], groups)).flatten(2, 3)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
        output = output.unflatten(2, (groups, -1)).flatten(1, 2)
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads*D] -> [B, heads, T, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KVCache, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """The decoder stack; text embeddings live here, the sum with the code embeddings is the caller's."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def new_cache(self, batch: int) -> KVCache:
        """An empty cache in the dtype and on the device of the weights."""
        weight = self.embed_tokens.weight
        return KVCache(self.config, batch, dtype=weight.dtype, device=weight.device)

    def forward(self, embeds: Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
        """Run T more columns of every row.

        Args:
            embeds: [B, T, H] dtype of the weights. Input embeddings.
            cache: what the rows hold so far; the T columns are appended.
            mask: [B, T] bool. False marks padding on the left, which no token sees; None: no padding.

        Returns:
            [B, T, H]. Hidden states after the final norm; of padding, arbitrary finite values.
        """
        if mask is None:
            mask = embeds.new_ones(embeds.shape[:2], dtype=torch.bool)
        positions, attention_mask = cache.append(mask)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta, embeds.dtype)
        x = embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attention_mask, cache, index)
        return self.norm(x)


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, D/2] for positions [B, T], computed in fp32 and rounded to the model's dtype."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)

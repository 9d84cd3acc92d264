"""What the backbone step is compared with: eager modules for its accuracy, torch operators in a graph for its time."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from moss_kernels.kv_append import rotate_half_split
from moss_kernels.testing.backbone import PagedInputs
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.model.backbone import Backbone, KVCache, rope_tables


def cached_tokens(kv: PagedInputs, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, H, tokens, D] of a batch row."""
    pool_row = int(kv.row_map[row])
    pages, length = kv.page_table[pool_row].long(), int(kv.positions[pool_row])

    def gathered(store: Tensor) -> Tensor:
        return store[:, pages].transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2)

    return gathered(kv.key_pages), gathered(kv.value_pages)


@torch.no_grad()
def eager_hidden(backbone: Backbone, kv: PagedInputs, embeds: Tensor, row: int, dtype: torch.dtype) -> Tensor:
    """Hidden state [H] of one more token of a batch row by the eager modules, one layer at a time in a dtype."""
    keys, values = cached_tokens(kv, row)
    cache = KVCache(backbone.config, 1, dtype=dtype, device=embeds.device)
    for count in (keys.shape[2], 1):
        positions, mask = cache.append(torch.ones(1, count, dtype=torch.bool, device=embeds.device))
    for mine, theirs in ((cache.keys, keys), (cache.values, values)):
        mine[:, 0, :, : theirs.shape[2]] = theirs.to(dtype)
    tables = rope_tables(positions, backbone.config.head_dim, backbone.config.rope_theta, dtype)
    x = embeds[row][None, None].to(dtype)
    for index, layer in enumerate(backbone.layers):
        x = copy.deepcopy(layer).to(dtype)(x, *tables, mask, cache, index)
    return copy.deepcopy(backbone.norm).to(dtype)(x)[0, 0]


class TorchGraphBackbone:
    """A step of cuBLAS linears, torch's RMSNorm and scaled_dot_product_attention: made to be captured in a graph.

    Keys and values lie in a row of their own for each request, and all requests have the same length: less than paged,
    ragged rows ask for.
    """

    def __init__(self, step: BackboneStep, kv: PagedInputs):
        """Takes a copy of the rows of `kv`, all of them active; weights are those of the step."""
        self._step, self._config = step, step.backbone.config
        self.position = int(kv.positions[kv.row_map.long()].unique())
        tokens = [cached_tokens(kv, row) for row in range(len(kv.row_map))]
        self._keys, self._values = (F.pad(torch.stack(part, 1), (0, 0, 0, 1)) for part in zip(*tokens, strict=True))

    def run(self, embeds: Tensor) -> Tensor:
        """Hidden states [B, H] of one more token of each row."""
        eps, width = self._config.rms_norm_eps, [self._config.hidden_size]
        x = embeds
        for index, layer in enumerate(self._step.layers):
            x = x + F.linear(self._attention(F.rms_norm(x, width, layer.input_norm, eps), layer, index), layer.o)
            gate, up = self.gate_up(F.rms_norm(x, width, layer.mlp_norm, eps), layer.gate_up)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, width, self._step.backbone.norm.weight, eps)

    @staticmethod
    def gate_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = F.linear(x, weight)
        return product[:, 0::2], product[:, 1::2]

    def _attention(self, x: Tensor, layer, index: int) -> Tensor:
        config = self._config
        kv_heads, head_dim, eps = config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        heads = F.linear(x, layer.qkv).unflatten(1, (-1, head_dim))
        q, k, v = heads.split((config.num_attention_heads, kv_heads, kv_heads), 1)
        cos, sin = self._step.cos_sin[self.position].chunk(2)
        q = rotate_half_split(F.rms_norm(q, [head_dim], layer.q_norm, eps), cos, sin)
        self._keys[index, :, :, -1] = rotate_half_split(F.rms_norm(k, [head_dim], layer.k_norm, eps), cos, sin)
        self._values[index, :, :, -1] = v
        return attend(q, self._keys[index], self._values[index])


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """torch's attention: q [B, Hq, D], keys and values [B, H, N, D] -> [B, Hq*D].

    Query heads of one key head are further queries of it, as in the eager module: nothing is repeated.
    """
    grouped = q.unflatten(1, (keys.shape[1], -1))
    return F.scaled_dot_product_attention(grouped, keys, values).flatten(1)

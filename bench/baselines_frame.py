"""What the frame graph is compared with: the same frame as a graph of cuBLAS, SDPA and torch operators."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines_local_frame import TorchGraphFrame
from moss_kernels.kv_append import rotate_half_split
from moss_kernels.sample_codebook import SamplingState
from moss_kernels.testing.local_frame import frame_state
from moss_runtime.graphs.backbone_step import BackboneStep, StepLayer
from moss_runtime.model.tts import MossTTS


class TorchFrame:
    """One frame of rows that all hold `context` tokens, over dense keys and values; made to be captured.

    Attributes:
        codes: [B, Q] int64, written by `run`.
        continues: [B] bool, written.
    """

    def __init__(self, model: MossTTS, step: BackboneStep, batch: int, context: int):
        config, device = model.config.backbone, model.device
        self._config, self._step, self._context = config, step, context
        shape = (2, config.num_hidden_layers, batch, config.num_key_value_heads, context + 1, config.head_dim)
        self._cache = torch.randn(shape, dtype=model.dtype, device=device)
        self._staging = torch.randn(batch, config.hidden_size, dtype=model.dtype, device=device)
        self._hidden = torch.empty_like(self._staging)
        self._norm = model.transformer.norm.weight
        weights = model.frame_weights()
        weights = dataclasses.replace(weights, audio_embeddings=torch.stack(tuple(weights.audio_embeddings)))
        state: SamplingState = frame_state(weights, batch)
        row_map = torch.arange(batch, dtype=torch.int32, device=device)
        self._frame = TorchGraphFrame(weights, self._hidden, state, row_map)
        self.codes, self.continues = self._frame.codes, self._frame.continues

    def run(self) -> None:
        """One frame; the context does not grow."""
        x = self._staging
        for index, layer in enumerate(self._step.layers):
            x = self._layer(index, layer, x)
        self._hidden.copy_(self._rms_norm(x, self._norm))
        self._frame.run()
        self._staging.copy_(self._frame.feedback)

    def _layer(self, index: int, layer: StepLayer, x: Tensor) -> Tensor:
        heads = self._config.num_attention_heads, self._config.num_key_value_heads, self._config.num_key_value_heads
        qkv = F.linear(self._rms_norm(x, layer.input_norm), layer.qkv)
        q, k, v = qkv.unflatten(1, (-1, self._config.head_dim)).split(heads, 1)
        cos, sin = self._step.cos_sin[self._context].chunk(2)
        q, k = (
            rotate_half_split(self._rms_norm(part, norm), cos, sin)
            for part, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
        keys, values = self._cache[:, index]
        keys[:, :, self._context] = k
        values[:, :, self._context] = v
        attended = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        x = x + F.linear(attended.flatten(1), layer.o)
        gate_up = F.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up)
        return x + F.linear(F.silu(gate_up[:, 0::2]) * gate_up[:, 1::2], layer.down)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self._config.rms_norm_eps)

"""The codec chunk step of plain torch ops, as a graph of library kernels would run it."""

import torch
from torch.nn import functional as F

from moss_kernels.codec_linear.reference import NORM_EPS
from moss_kernels.ring_attention import ring_attention
from moss_kernels.ring_kv_write import ring_kv_write
from moss_runtime.graphs import CodecChunk


class TorchOpsChunk(CodecChunk):
    """cuBLAS linears, torch LayerNorm, GELU and residuals; the other kernels are the project's own.

    Attention of long chunks of many rows is Triton's: the kernel in CUDA C++ takes queries that the linear before has
    rotated, and torch operators would take longer for that than is won.
    """

    def _stage(self, index: int, x: torch.Tensor, cos_sin: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        stage, rings = self.stages[index], self.slots.stages[index]
        config = stage.config
        batch, tokens = cos_sin.shape[:2]
        slots = self.buffers.slots[:batch]
        x = x.view(batch, tokens, config.d_model)
        for number, layer in enumerate(stage.layers):
            qkv = _normed_linear(x, layer.in_proj)
            step = (qkv, cos_sin, rings.keys[number], rings.values[number], slots, valid, rings.offset)
            attended = torch.empty_like(x)
            ring_attention(*step, config.context, False, attended)
            ring_kv_write(*step)
            x = x + layer.out_proj["scale"] * F.linear(attended, layer.out_proj["weight"])
            hidden = F.gelu(_normed_linear(x, layer.linear1))
            x = x + layer.linear2["scale"] * F.linear(hidden, layer.linear2["weight"])
        out = F.linear(x, stage.output_proj)
        return out.float() if stage is self.stages[-1] else out


def _normed_linear(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weights["norm_weight"], weights["norm_bias"], NORM_EPS)
    return F.linear(normed, weights["weight"])

"""Residual quantizer of the `rlfq` family: features <-> one code per codebook. All of it runs in fp32."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from moss_runtime.model.backbone import embedding
from moss_runtime.model.codec.config import QuantizerConfig


class Projection(nn.Conv1d):
    """A 1x1 convolution (the shape of the stored weights) over token-major features [B, T, features]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.squeeze(-1), self.bias)


def _projection(inputs: int, outputs: int) -> nn.Module:
    """Weight-normed projection; the official code has none where the sizes are equal."""
    return nn.Identity() if inputs == outputs else weight_norm(Projection(inputs, outputs, 1))


class Codebook(nn.Module):
    """One codebook with its projections into and out of the small space where neighbours are compared."""

    def __init__(self, config: QuantizerConfig):
        super().__init__()
        self.in_proj = _projection(config.rvq_size, config.codebook_dim)
        self.out_proj = _projection(config.codebook_dim, config.rvq_size)
        self.codebook = embedding(config.codebook_size, config.codebook_dim)

    def nearest(self, residual: torch.Tensor) -> torch.Tensor:
        """[B, T, rvq_size] -> [B, T] int64, the row nearest in direction; of equal distances the first."""
        value = F.normalize(self.in_proj(residual), dim=-1)
        rows = F.normalize(self.codebook.weight, dim=-1)
        # Both sides have length 1 only up to rounding, so the squares stay in, as in the official code.
        distance = value.square().sum(-1, keepdim=True) - 2 * value @ rows.T + rows.square().sum(-1)
        return distance.argmin(-1)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """[B, T] int64 -> [B, T, rvq_size]."""
        return self.out_proj(self.codebook(codes))


class Quantizer(nn.Module):
    def __init__(self, config: QuantizerConfig):
        super().__init__()
        self.input_proj = _projection(config.input_size, config.rvq_size)
        self.quantizers = nn.ModuleList(Codebook(config) for _ in range(config.codebooks))
        self.output_proj = _projection(config.rvq_size, config.output_size)

    def encode(self, hidden: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Codes of encoder features.

        Args:
            hidden: [B, T, input_size] floating.
            frames: [B] int64. Valid frames; the residual of later ones is zero before every projection, so that
                their codes depend on the biases alone.

        Returns:
            [B, T, codebooks] int64.
        """
        valid = (torch.arange(hidden.shape[1], device=hidden.device) < frames[:, None])[..., None]
        residual = torch.where(valid, self.input_proj(hidden.float()), 0)
        codes = []
        for codebook in self.quantizers:
            codes.append(codebook.nearest(residual))
            residual = residual - torch.where(valid, codebook(codes[-1]), 0)
        return torch.stack(codes, dim=-1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """[B, T, codebooks] int64 -> features [B, T, output_size] float32."""
        return self.output_proj(sum(codebook(codes[..., q]) for q, codebook in enumerate(self.quantizers)))

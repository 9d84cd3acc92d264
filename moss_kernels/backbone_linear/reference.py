"""`backbone_linear` in plain PyTorch. B rows, K inputs, N outputs, S slices of K."""

import torch
from torch.nn import functional as F


def gated(product: torch.Tensor) -> torch.Tensor:
    """SiLU of the even columns times the odd ones: [B, N] -> [B, N/2]."""
    return F.silu(product[:, 0::2]) * product[:, 1::2]


def backbone_linear_reference(x: torch.Tensor, weight: torch.Tensor, gate_up: bool, out: torch.Tensor) -> None:
    """See `moss_kernels.backbone_linear`."""
    if out.dim() == 3:
        slices = x.shape[1] // out.shape[0]
        parts = zip(x.split(slices, 1), weight.split(slices, 1), strict=True)
        out.copy_(torch.stack([F.linear(part.float(), part_weight.float()) for part, part_weight in parts]))
    else:
        product = F.linear(x, weight)
        out.copy_(gated(product) if gate_up else product)

"""`silu_gate` in plain PyTorch."""

import torch

from moss_kernels.backbone_linear.reference import gated


def silu_gate_reference(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See `moss_kernels.silu_gate`."""
    out.copy_(gated(gate_up.float()))

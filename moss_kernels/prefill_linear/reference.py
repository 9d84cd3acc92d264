"""`prefill_linear` in plain PyTorch. B rows, K inputs, N outputs, S slices of K."""

import torch

from moss_kernels.backbone_linear import backbone_linear_reference, split_count


def prefill_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, gate_up: bool, add: bool, out: torch.Tensor
) -> None:
    """See `moss_kernels.prefill_linear`."""
    if not add:
        backbone_linear_reference(x, weight, gate_up, out)
        return
    sums = torch.empty(split_count(*weight.shape), *out.shape, device=out.device)
    backbone_linear_reference(x, weight, False, sums)
    add_slices(sums, out)


def add_slices(sums: torch.Tensor, out: torch.Tensor) -> None:
    """out [B, N] plus slices [S, B, N], one after the other in float32, rounded once: as `rms_norm` does it."""
    out.copy_(sum(sums, out.float()))

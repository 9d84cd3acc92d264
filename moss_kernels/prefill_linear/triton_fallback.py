"""`prefill_linear` by the Triton kernel of `backbone_linear`, for GPUs and shapes that CUDA C++ does not serve."""

import torch

from moss_kernels.backbone_linear import split_count
from moss_kernels.backbone_linear.triton_kernel import backbone_linear_triton

from .reference import add_slices


def prefill_linear_triton(x: torch.Tensor, weight: torch.Tensor, gate_up: bool, add: bool, out: torch.Tensor) -> None:
    """Triton implementation of `moss_kernels.prefill_linear`, which documents and checks the arguments."""
    if not add:
        backbone_linear_triton(x, weight, gate_up, out)
        return
    sums = torch.empty(split_count(*weight.shape), *out.shape, device=out.device)
    backbone_linear_triton(x, weight, False, sums)
    add_slices(sums, out)

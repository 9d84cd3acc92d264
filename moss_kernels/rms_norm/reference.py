"""`rms_norm` in plain PyTorch. B rows, H values, S partial sums."""

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm in float32 (float64 stays), rounded to the dtype of `x` before the weight is applied.

    Args:
        x: [..., H] floating.
        weight: [H] floating.
        eps: added to the mean square.

    Returns:
        [..., H], the dtype of `x`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, partials: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """See `moss_kernels.rms_norm`."""
    if partials is not None:
        x.copy_(x.float() + partials.sum(0))
    out.copy_(rms_norm_reference(x, weight, eps))

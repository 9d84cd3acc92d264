"""`codec_linear` in plain PyTorch. M rows, K inputs, N outputs."""

import torch
from torch.nn import functional as F

from moss_kernels.ring_attention.reference import rotate_interleaved

from .arguments import CodecLinearArguments

NORM_EPS = 1e-5


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LayerNorm of x [..., K] with weight and bias [K], all floating: [..., K], the dtype of `x`."""
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), NORM_EPS)


def codec_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    gelu: bool = False,
    scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear of the codec's transformer with what surrounds it: `residual + scale * gelu(norm(x) @ weight.T)`.

    Each part rounds to the dtype of its input, as eager modules do.

    Args:
        x: [..., K] floating.
        weight: [N, K] floating.
        norm_weight, norm_bias: [K] floating. LayerNorm before the product, eps 1e-5; None leaves it out.
        gelu: whether the exact (erf) GELU follows the product.
        scale: [N] floating. Layer scale; needs `residual`.
        residual: [..., N] floating.
        cos_sin: [..., D / 2, 2] float32. The outputs are q, k and v of heads of D, of which q and k are rotated.

    Returns:
        [..., N], the dtype of `residual`, or without one that of `weight`.
    """
    if norm_weight is not None:
        x = layer_norm_reference(x, norm_weight, norm_bias)
    y = F.linear(x.to(weight.dtype), weight)
    if gelu:
        y = F.gelu(y)
    if cos_sin is not None:
        q_and_k, v = y.tensor_split((y.shape[-1] // 3 * 2,), -1)
        turned = rotate_interleaved(q_and_k.unflatten(-1, (-1, 2 * cos_sin.shape[-2])), cos_sin)
        y = torch.cat((turned.flatten(-2), v), -1)
    return y if scale is None else residual + scale.to(residual.dtype) * y


def partial_sums_reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Sums over equal slices of the inputs: x [M, K], weight [N, K] floating -> out [S, M, N] floating, written."""
    for part, x_slice, w_slice in zip(out, x.chunk(len(out), 1), weight.chunk(len(out), 1), strict=True):
        part.copy_(F.linear(x_slice.to(out.dtype), w_slice.to(out.dtype)))


def add_partials_reference(x: torch.Tensor, partials: torch.Tensor, scale: torch.Tensor) -> None:
    """Adds `scale` [K] times the sum of `partials` [P, M, K] to the residual stream x [M, K], all floating."""
    x.copy_(x.to(partials.dtype) + scale.to(partials.dtype) * partials.sum(0))


def codec_linear_op_reference(*arguments: object) -> None:
    """The op, for `CodecLinearArguments`; only what it has to write is written."""
    given = CodecLinearArguments(*arguments)
    x, weight, out = given.x, given.weight, given.out
    norm = {"norm_weight": given.norm_weight, "norm_bias": given.norm_bias}
    if given.partials is not None:
        add_partials_reference(x, given.partials, given.partials_scale)
    if out.dim() == 3:
        if given.norm_weight is not None:
            x = layer_norm_reference(x, *norm.values()).to(weight.dtype)
        return partial_sums_reference(x, weight, out)
    parts = norm | {"gelu": given.gelu, "scale": given.scale, "cos_sin": given.cos_sin}
    out.copy_(codec_linear_reference(x, weight, **parts, residual=None if given.scale is None else out))
    if given.normed is not None:
        given.normed.copy_(layer_norm_reference(out, given.next_norm_weight, given.next_norm_bias))


def layer_norm_sums(weight: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor) -> torch.Tensor:
    """What a product with a LayerNorm before it needs to apply the mean and the bias after it.

    With mean m and deviation s of a row, `norm(x) @ W.T = (x * g) @ W.T / s - m / s * (W @ g) + W @ b`.

    Args:
        weight: [N, K] floating.
        norm_weight, norm_bias: [K] floating. g and b.

    Returns:
        [2, N] float32. W @ g, and W @ b.
    """
    return torch.stack((norm_weight, norm_bias)).float() @ weight.float().T

"""Plain PyTorch meaning of `local_rope_attention`."""

import torch
from torch import Tensor


def local_rope_attention_reference(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, position: int, rope_base: float
) -> Tensor:
    """Rotate q and k, store k and v at `position`, and attend over positions 0..`position`.

    The semantics are those of the official GPT-2 style block with interleaved (GPT-J) RoPE. Rotated q and k and the
    output are rounded to the dtype of `qkv`; scores, softmax and the weighted sum are fp32 (fp64 for fp64 input).

    Args:
        qkv: [B, 3*H*D] floating point. Output of `c_attn`: all of q, then k, then v.
        k_cache: [B, P, H, D] same dtype. Rotated keys of this frame; row `position` is written, later rows not read.
        v_cache: [B, P, H, D] same dtype. Values of this frame, likewise.
        position: position in the frame, 0..P-1.
        rope_base: base of the RoPE frequencies `rope_base ** (-2i / D)`.

    Returns:
        [B, H*D] dtype of `qkv`. Attention output before `c_proj`.
    """
    heads, head_dim = k_cache.shape[2:]
    q, k, v = qkv.unflatten(-1, (3, heads, head_dim)).unbind(1)
    cos, sin = _rope(position, head_dim, rope_base, qkv)
    k_cache[:, position] = _rotate(k, cos, sin)
    v_cache[:, position] = v

    wide = torch.promote_types(qkv.dtype, torch.float32)
    q = _rotate(q, cos, sin).to(wide)
    keys, values = k_cache[:, : position + 1].to(wide), v_cache[:, : position + 1].to(wide)
    scores = torch.einsum("bhd,bphd->bhp", q, keys) * head_dim**-0.5
    output = torch.einsum("bhp,bphd->bhd", scores.softmax(-1), values)
    return output.to(qkv.dtype).flatten(1)


def _rope(position: int, head_dim: int, rope_base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [D/2], computed in fp32 and rounded to the model's dtype before any product."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angles = position * (1.0 / rope_base**exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

"""Plain PyTorch meaning of `local_rope_attention` and `local_rope_attention_lookup`."""

import torch
from torch import Tensor


def local_rope_tables(
    positions: int, head_dim: int, rope_base: float, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of the frame's positions, computed in fp32 and rounded to the model's dtype before any product.

    Args:
        positions: P, positions of a frame.
        head_dim: D, even.
        rope_base: base of the frequencies `rope_base ** (-2i / D)`.
        dtype: dtype of the tables.
        device: where to put them.

    Returns:
        cos: [P, D/2].
        sin: [P, D/2].
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope_base**exponents
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension of x [..., D] by cos and sin [D/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def local_rope_attention_reference(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, position: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """Rotate q and k, store k and v at `position`, and attend over positions 0..`position`.

    The semantics are those of the official GPT-2 style block with interleaved (GPT-J) RoPE. Rotated q and k and the
    output are rounded to the dtype of `qkv`; scores, softmax and the weighted sum are fp32 (fp64 for fp64 input).

    Args:
        qkv: [B, 3*H*D] floating point. Output of `c_attn`: all of q, then k, then v.
        k_cache: [B, P, H, D] same dtype. Rotated keys of this frame; row `position` is written, later rows not read.
        v_cache: [B, P, H, D] same dtype. Values of this frame, likewise.
        position: position in the frame, 0..P-1.
        cos: [P, D/2] same dtype. From `local_rope_tables`, as `sin`.
        sin: [P, D/2] same dtype.

    Returns:
        [B, H*D] dtype of `qkv`. Attention output before `c_proj`.
    """
    q, k, v = qkv.unflatten(-1, (3, *k_cache.shape[2:])).unbind(1)
    k_cache[:, position] = rotate_pairs(k, cos[position], sin[position])
    v_cache[:, position] = v
    return _attend(rotate_pairs(q, cos[position], sin[position]), k_cache, v_cache, position)


def local_rope_attention_lookup_reference(
    codes: Tensor, table: Tensor, audio_embeddings: Tensor, k_cache: Tensor, v_cache: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """The same with q, k and v taken from a table by the code drawn at the position before.

    Args:
        codes: [B] i64. Codes of codebook `position` - 1; in a row whose code is outside 0..V-1 (a pad code) nothing is
            stored and the outputs are 0.
        table: [P-1, V, 3*H*D] floating point. q and k (both rotated) and v of each code of each codebook.
        audio_embeddings: [Q, V, H*D] same dtype, Q >= P-1. Embeddings of the codes.
        k_cache: [B, P, H, D] same dtype, as in `local_rope_attention_reference`.
        v_cache: [B, P, H, D] same dtype.
        position: position in the frame, 1..P-1.

    Returns:
        out: [B, H*D]. Attention output before `c_proj`.
        residual: [B, H*D]. The codes' embeddings: the input of the block.
    """
    valid = ((codes >= 0) & (codes < table.shape[1]))[:, None]
    rows = codes.where(valid[:, 0], 0)
    q, k, v = table[position - 1][rows].unflatten(-1, (3, *k_cache.shape[2:])).unbind(1)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[:, position] = torch.where(valid[..., None], new, cache[:, position])
    out = _attend(q, k_cache, v_cache, position)
    return torch.where(valid, out, 0.0), torch.where(valid, audio_embeddings[position - 1][rows], 0.0)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: int) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = k_cache[:, : position + 1].to(wide), v_cache[:, : position + 1].to(wide)
    scores = torch.einsum("bhd,bphd->bhp", q.to(wide), keys) * q.shape[-1] ** -0.5
    output = torch.einsum("bhp,bphd->bhd", scores.softmax(-1), values)
    return output.to(q.dtype).flatten(1)

"""`ring_attention` in plain PyTorch, and the rotary embedding and masks that come with it.

B rows of a step, T tokens of a chunk, H heads, D head_dim, S slots (slot S is the null slot), C ring capacity.
Token n of a stream lies at ring position n mod C.
"""

import math

import torch


def rope_frequencies(head_dim: int, max_period: float, device: torch.device | str) -> torch.Tensor:
    """Angle of each pair of the rotary embedding from one token to the next.

    Formed as the official codec forms them, exp(-i * 2 ln(max_period) / head_dim) in fp32: at the positions that long
    streams reach, one ulp of a frequency turns a key visibly.

    Args:
        head_dim: even.
        max_period: period of the slowest pair, in tokens / (2 pi).
        device: where to form them.

    Returns:
        [head_dim / 2] float32.
    """
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    return torch.exp(pairs * (-math.log(max_period) * 2 / head_dim))


def rope_rotations(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of the rotary embedding.

    Args:
        positions: [...] int64. Absolute token positions.
        frequencies: [D / 2] float32.

    Returns:
        [..., D / 2, 2] float32. Cosine and sine of each pair's angle.
    """
    angle = frequencies * positions[..., None].float()
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def rope_tables(positions: torch.Tensor, head_dim: int, max_period: float) -> torch.Tensor:
    """`rope_rotations` of `rope_frequencies`: [...] int64 positions -> [..., head_dim / 2, 2] float32."""
    return rope_rotations(positions, rope_frequencies(head_dim, max_period, positions.device))


def rotate_interleaved(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of each head in fp32, rounding once, at the end.

    Args:
        x: [..., T, H, D] floating. Queries or keys.
        cos_sin: [..., T, D / 2, 2] float32. See `rope_tables`.

    Returns:
        [..., T, H, D], the dtype of `x`.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_sin[..., None, :, :].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attention in fp32 where a key that no query sees may hold anything, NaN included.

    Args:
        q: [B, T, H, D] floating.
        k, v: [B, N, H, D] floating.
        visible: [B or 1, T, N] bool. Which keys each query sees; a query that sees none gives 0.

    Returns:
        [B, T, H, D], the dtype of `q`.
    """
    # Selected, not multiplied: 0 x NaN is NaN, so weights of zero alone would let stale values through.
    used = visible.any(1)[..., None, None]
    k, v = torch.where(used, k, 0).float(), torch.where(used, v, 0).float()
    visible = visible[:, None]
    scores = torch.einsum("bthd,bnhd->bhtn", q.float(), k) * q.shape[-1] ** -0.5
    weights = torch.where(visible, scores, -torch.inf).softmax(-1)
    weights = torch.where(visible, weights, 0)
    return torch.einsum("bhtn,bnhd->bthd", weights, v).to(q.dtype)


def ring_visibility(
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    *,
    tokens: int,
    capacity: int,
    window: int,
    chunk_in_ring: bool,
) -> torch.Tensor:
    """Which keys the queries of a step see: query position p sees the tokens max(0, p - window + 1) .. p.

    Args:
        slots: [B] int. Slot of each row.
        valid: [B] int. Valid tokens of each row, 0 .. tokens; queries beyond see nothing.
        offset: [S+1] int64. Tokens that each slot had consumed before this step.
        tokens: T.
        capacity: C.
        window: at most `capacity`.
        chunk_in_ring: False: the ring holds the tokens before the chunk, and the chunk's own T keys follow it. True:
            the chunk has been written to the ring already and there are no other keys.

    Returns:
        [B, T, C + T] bool, or [B, T, C] with `chunk_in_ring`.
    """
    valid = valid[:, None].long()
    start = offset[slots.long()][:, None]
    newest = start - 1 + (valid if chunk_in_ring else 0)
    place = torch.arange(capacity, device=offset.device)
    held = newest - torch.remainder(newest - place, capacity)  # [B, C]; negative where nothing was ever written
    step = torch.arange(tokens, device=offset.device)
    if not chunk_in_ring:
        held = torch.cat((held, start + step), dim=1)
    held, position = held[:, None], (start + step)[..., None]
    live = (step < valid)[..., None]
    return live & (held >= 0) & (held <= position) & (held > position - window)


def whole_qkv(qkv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Queries, keys and values as `ring_kv_write` takes them.

    Args:
        qkv: [B, T, 3*H*D], which is returned as it is, or float32 sums over P slices, [P, B, T, 3*H*D].
        dtype: to which the sum of these is rounded, added one slice behind the other.

    Returns:
        [B, T, 3*H*D].
    """
    if qkv.dim() == 3:
        return qkv
    total = qkv[0]
    for part in qkv[1:]:
        total = total + part
    return total.to(dtype)


def ring_attention_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    window: int,
    chunk_in_ring: bool,
    out: torch.Tensor,
    *,
    visible: torch.Tensor | None = None,
) -> None:
    """See `moss_kernels.ring_attention`.

    Args:
        visible: [B, T, C + T] or [B, T, C] bool. What `ring_visibility` gives, for a caller that shares it between
            the layers of a stage; None computes it.
    """
    heads, capacity = ring_k.shape[1:3]
    qkv = whole_qkv(qkv, ring_k.dtype)
    if visible is None:
        visible = ring_visibility(
            slots,
            valid,
            offset,
            tokens=qkv.shape[1],
            capacity=capacity,
            window=window,
            chunk_in_ring=chunk_in_ring,
        )
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    if cos_sin is not None:
        q, k = rotate_interleaved(q, cos_sin), rotate_interleaved(k, cos_sin)
    keys, values = (ring[slots.long()].transpose(1, 2) for ring in (ring_k, ring_v))
    if not chunk_in_ring:
        keys, values = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
    out.copy_(masked_attention(q, keys, values, visible).flatten(2))

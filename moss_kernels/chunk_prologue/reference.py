"""`chunk_prologue` in plain PyTorch. B rows of T frames, Q codebooks of V codes, F features, S slots, L stages."""

import torch

from moss_kernels.ring_attention.reference import rope_rotations


def dequantize_codes_reference(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Features of codes: the sum over the codebooks of the table's rows.

    Args:
        codes: [..., Q] int. A code outside 0 .. V-1 (a pad code) adds nothing.
        table: [Q, V, F] float32.

    Returns:
        [..., F] float32.
    """
    vocab = table.shape[1]
    features = torch.zeros(*codes.shape[:-1], table.shape[2], device=table.device)
    for rows, code in zip(table, codes.long().unbind(-1), strict=True):
        known = (code >= 0) & (code < vocab)
        features = features + torch.where(known[..., None], rows[torch.where(known, code, 0)], 0)
    return features


def chunk_prologue_reference(
    codes: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offsets: torch.Tensor,
    rates: torch.Tensor,
    frequencies: torch.Tensor,
    features: torch.Tensor,
    stage_valid: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    """See `moss_kernels.chunk_prologue`. It waits for no device: where a token's angles go is worked out there, too."""
    features.copy_(dequantize_codes_reference(codes, table))
    torch.mul(valid, rates[:, None], out=stage_valid)
    rows, frames = codes.shape[:2]
    if rows * frames == 0:
        return
    rates, frame = rates.long(), torch.arange(rows * frames, device=rates.device)[:, None]
    token = torch.arange(len(cos_sin) // (rows * frames), device=rates.device)
    stage = torch.searchsorted(rates.cumsum(0), token, right=True)
    before, rate = (rates.cumsum(0) - rates)[stage], rates[stage]
    step = token - before
    start = offsets[stage, slots.long().repeat_interleave(frames)[:, None]]
    position = start + frame % frames * rate + step
    cos_sin[rows * frames * before + frame * rate + step] = rope_rotations(position, frequencies)

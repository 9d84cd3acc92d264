"""`dequantize_codes` in plain PyTorch. Q codebooks of V codes, D features."""

import torch


def dequantize_codes_reference(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Features of codes: the sum over the codebooks of the table's rows.

    Args:
        codes: [..., Q] int. A code outside 0 .. V-1 (a pad code) adds nothing.
        table: [Q, V, D] float32.

    Returns:
        [..., D] float32.
    """
    vocab = table.shape[1]
    features = torch.zeros(*codes.shape[:-1], table.shape[2], device=table.device)
    for rows, code in zip(table, codes.long().unbind(-1), strict=True):
        known = (code >= 0) & (code < vocab)
        features = features + torch.where(known[..., None], rows[torch.where(known, code, 0)], 0)
    return features

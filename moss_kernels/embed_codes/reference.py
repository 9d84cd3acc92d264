"""Plain PyTorch meaning of `embed_codes`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def embed_codes_reference(
    text_ids: Tensor, codes: Tensor, embed_tokens: Tensor, audio_embeddings: Tensor | Sequence[Tensor], pad_id: int
) -> Tensor:
    """Sum of the text embedding and the code embeddings.

    The official code adds the Q terms one after the other in the model's dtype, with a rounding at each add.

    Args:
        text_ids: [...] i64. Rows of `embed_tokens`; an id outside of it stands for a row of zeros.
        codes: [..., Q] i64. Codes in 0..V-1; `pad_id`, and whatever else is outside, adds nothing.
        embed_tokens: [N, H] floating point.
        audio_embeddings: [Q, V, H] or Q tensors [V, H], same dtype.
        pad_id: the pad code; the tables need not have a row for it.

    Returns:
        [..., H] dtype of `embed_tokens`.
    """
    embeds = _rows(embed_tokens, text_ids, _within(text_ids, embed_tokens))
    for q in range(codes.shape[-1]):
        table, code = audio_embeddings[q], codes[..., q]
        embeds = embeds + _rows(table, code, _within(code, table) & (code != pad_id))
    return embeds


def _within(ids: Tensor, table: Tensor) -> Tensor:
    return (ids >= 0) & (ids < table.shape[0])


def _rows(table: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    # Selected, not multiplied by zero: a NaN in row 0 of the table must not reach a row that takes nothing from it.
    return torch.where(valid[..., None], table[ids.where(valid, 0)], 0.0)

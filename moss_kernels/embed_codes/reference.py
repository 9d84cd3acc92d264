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
        text_ids: [...] i64. Rows of `embed_tokens`.
        codes: [..., Q] i64. Codes in 0..V-1, or `pad_id`, which adds nothing.
        embed_tokens: [vocab, H] floating point.
        audio_embeddings: [Q, V, H] or Q tensors [V, H], same dtype.
        pad_id: the pad code; no table has a row for it.

    Returns:
        [..., H] dtype of `embed_tokens`.
    """
    embeds = embed_tokens[text_ids]
    for q in range(codes.shape[-1]):
        is_pad = codes[..., q] == pad_id
        term = audio_embeddings[q][codes[..., q].masked_fill(is_pad, 0)]
        # Selected, not multiplied by zero: a NaN in row 0 of the table must not reach a padded row.
        embeds = embeds + torch.where(is_pad[..., None], 0.0, term)
    return embeds

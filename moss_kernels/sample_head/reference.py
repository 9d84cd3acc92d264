"""`sample_head` in plain PyTorch. B rows, K inputs, V codes."""

import torch
from torch.nn import functional as F

from moss_kernels.sample_codebook import sample_codebook_reference


def sample_head_reference(hidden: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, *draw: object) -> None:
    """See `moss_kernels.sample_head`. `workspace` is not used."""
    sample_codebook_reference(F.linear(hidden, weight), *draw)

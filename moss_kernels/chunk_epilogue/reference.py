"""`chunk_epilogue` in plain PyTorch. B rows of T frames, N samples a frame of C channels, S slots, L stages."""

import torch


def chunk_epilogue_reference(
    samples: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    stage_valid: torch.Tensor,
    offsets: torch.Tensor,
    audio: torch.Tensor,
) -> None:
    """See `moss_kernels.chunk_epilogue`."""
    rows, frames, count, channels = samples.shape
    live = torch.arange(frames, device=valid.device) < valid[:, None]
    heard = torch.where(live[..., None, None], samples, 0)
    audio.view(rows, channels, frames, count).copy_(heard.permute(0, 3, 1, 2))
    offsets.index_add_(1, slots, stage_valid.long())

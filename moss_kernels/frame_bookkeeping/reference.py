"""`frame_bookkeeping` in plain PyTorch. B batch rows, S pool rows (row S is null), Q codebooks, F frames, H hidden."""

import torch
from torch import Tensor


def frame_bookkeeping_begin_reference(
    row_map: Tensor, active: Tensor, staging: Tensor, finished: Tensor, embeds: Tensor, live: Tensor
) -> None:
    """See `moss_kernels.frame_bookkeeping_begin`."""
    rows = row_map.long()
    torch.index_select(staging, 0, rows, out=embeds)
    torch.logical_and(active, ~finished[rows], out=live)


def frame_bookkeeping_end_reference(
    row_map: Tensor,
    live: Tensor,
    codes: Tensor,
    continues: Tensor,
    feedback: Tensor,
    draw_status: Tensor,
    staging: Tensor,
    pool_codes: Tensor,
    history: Tensor,
    positions: Tensor,
    frames: Tensor,
    max_frames: Tensor,
    stopped: Tensor,
    finished: Tensor,
    status: Tensor,
) -> None:
    """See `moss_kernels.frame_bookkeeping_end`."""
    rows, null_row = row_map.long(), frames.shape[0] - 1
    is_frame = live & continues & (draw_status == 0)
    produced = frames[rows] + is_frame
    ended = live & (~is_frame | (produced >= max_frames[rows]))

    def write(state: Tensor, where: Tensor, value: Tensor) -> None:
        """Rows that are not to be written write what the null row holds to it: shapes stay static, nothing races."""
        mask = where.view(-1, *[1] * (state.dim() - 1))
        state[torch.where(where, rows, null_row)] = torch.where(mask, value, state[null_row])

    target, frame = torch.where(is_frame, rows, null_row), torch.where(is_frame, frames[rows], 0).long()
    history[target, frame] = torch.where(is_frame[:, None], codes.to(history.dtype), history[null_row, 0])
    write(staging, is_frame, feedback)
    write(pool_codes, is_frame, codes)
    write(positions, is_frame, positions[rows] + 1)
    write(frames, is_frame, produced)
    write(stopped, live & ~continues, torch.ones_like(live))
    write(finished, ended, torch.ones_like(live))
    write(status, live, status[rows] | draw_status)

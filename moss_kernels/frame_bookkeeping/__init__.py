"""`frame_bookkeeping`: what a frame reads from the pool of requests when it begins, and what it leaves when it ends."""

import torch
from torch import Tensor

from moss_kernels import _checks, _library

from .reference import frame_bookkeeping_begin_reference, frame_bookkeeping_end_reference

__all__ = [
    "frame_bookkeeping_begin",
    "frame_bookkeeping_begin_reference",
    "frame_bookkeeping_end",
    "frame_bookkeeping_end_reference",
]

_OP = "frame_bookkeeping"
_BEGIN, _END = f"{_OP}_begin", f"{_OP}_end"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check_all(op: str, tensors: dict[str, tuple[Tensor, str, tuple[torch.dtype, ...]]]) -> None:
    sizes: dict[str, int] = {}
    device = tensors["row_map"][0].device
    for name, (tensor, layout, dtypes) in tensors.items():
        _checks.require_shape(op, name, tensor, layout, sizes)
        _checks.require_dtype(op, name, tensor, *dtypes)
        _checks.require_device(op, name, tensor, device)
        _checks.require_contiguous(op, name, tensor)


def _check_begin(
    row_map: Tensor, active: Tensor, staging: Tensor, finished: Tensor, embeds: Tensor, live: Tensor
) -> None:
    _check_all(
        _BEGIN,
        {
            "row_map": (row_map, "[B]", (torch.int32,)),
            "active": (active, "[B]", (torch.bool,)),
            "staging": (staging, "[S+1, H]", _FLOATS),
            "finished": (finished, "[S+1]", (torch.bool,)),
            "embeds": (embeds, "[B, H]", (staging.dtype,)),
            "live": (live, "[B]", (torch.bool,)),
        },
    )


def _check_end(
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
    _check_all(
        _END,
        {
            "row_map": (row_map, "[B]", (torch.int32,)),
            "live": (live, "[B]", (torch.bool,)),
            "codes": (codes, "[B, Q]", (torch.int64,)),
            "continues": (continues, "[B]", (torch.bool,)),
            "feedback": (feedback, "[B, H]", _FLOATS),
            "draw_status": (draw_status, "[B]", (torch.int32,)),
            "staging": (staging, "[S+1, H]", (feedback.dtype,)),
            "pool_codes": (pool_codes, "[S+1, Q]", (torch.int64,)),
            "history": (history, "[S+1, F, Q]", (torch.int16,)),
            "positions": (positions, "[S+1]", (torch.int32,)),
            "frames": (frames, "[S+1]", (torch.int32,)),
            "max_frames": (max_frames, "[S+1]", (torch.int32,)),
            "stopped": (stopped, "[S+1]", (torch.bool,)),
            "finished": (finished, "[S+1]", (torch.bool,)),
            "status": (status, "[S+1]", (torch.int32,)),
        },
    )


def _backend(op: str, arguments: tuple[Tensor, ...]) -> str:
    return _library.backend_for(op, ("triton", "reference"), arguments[0].device)


def _begin_cpu(*arguments: Tensor) -> None:
    _check_begin(*arguments)
    frame_bookkeeping_begin_reference(*arguments)


def _begin_cuda(*arguments: Tensor) -> None:
    _check_begin(*arguments)
    if _backend(_BEGIN, arguments) == "triton":
        from .triton_kernel import frame_bookkeeping_begin_triton as implementation
    else:
        implementation = frame_bookkeeping_begin_reference
    implementation(*arguments)


def _end_cpu(*arguments: Tensor) -> None:
    _check_end(*arguments)
    frame_bookkeeping_end_reference(*arguments)


def _end_cuda(*arguments: Tensor) -> None:
    _check_end(*arguments)
    if _backend(_END, arguments) == "triton":
        from .triton_kernel import frame_bookkeeping_end_triton as implementation
    else:
        implementation = frame_bookkeeping_end_reference
    implementation(*arguments)


_library.OPS.define(
    f"{_BEGIN}(Tensor row_map, Tensor active, Tensor staging, Tensor finished, Tensor(a!) embeds, Tensor(b!) live) "
    "-> ()"
)
_library.OPS.define(
    f"{_END}(Tensor row_map, Tensor live, Tensor codes, Tensor continues, Tensor feedback, Tensor draw_status, "
    "Tensor(a!) staging, Tensor(b!) pool_codes, Tensor(c!) history, Tensor(d!) positions, Tensor(e!) frames, "
    "Tensor max_frames, Tensor(f!) stopped, Tensor(g!) finished, Tensor(h!) status) -> ()"
)
for _name, _cpu, _cuda, _check in (
    (_BEGIN, _begin_cpu, _begin_cuda, _check_begin),
    (_END, _end_cpu, _end_cuda, _check_end),
):
    _library.OPS.impl(_name, _cpu, "CPU")
    _library.OPS.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"moss::{_name}", _check, lib=_library.OPS)


def frame_bookkeeping_begin(
    row_map: Tensor, active: Tensor, staging: Tensor, finished: Tensor, embeds: Tensor, live: Tensor
) -> None:
    """Gathers the inputs of a frame, and masks rows that finished although the host does not know yet.

    Args:
        row_map: [B] int32, 0 .. S (not checked). Pool row of each batch row; row S is the null row of padding.
        active: [B] bool. Rows that the host wants to run.
        staging: [S+1, H] float32, bfloat16 or float16. Next backbone input of each pool row.
        finished: [S+1] bool.
        embeds: [B, H], the dtype of `staging`, written in every row: staging[row_map].
        live: [B] bool, written: active and not finished.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here.

    Graph-safe: yes.
    """
    torch.ops.moss.frame_bookkeeping_begin(row_map, active, staging, finished, embeds, live)


def frame_bookkeeping_end(
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
    """Writes what a frame made into the pool; the outcome of each batch row decides what its pool row gets.

    - Not live: nothing; every bit of its pool row stays.
    - Live, continues, draw status 0: a frame. `history` at `frames`, `pool_codes` and `staging` get the codes and the
      feedback; `frames` and `positions` grow by 1; `finished` is set if that reaches `max_frames`.
    - Live, else: `finished` is set and the draw status is or-ed into `status`; a row that does not continue also sets
      `stopped`. Nothing else is written, so a row ends with the reason "error" (status not 0), "stop" (stopped) or
      "length" (neither).

    Args:
        row_map: [B] int32, 0 .. S (not checked). Live rows name distinct pool rows, never the null row S.
        live: [B] bool. As `frame_bookkeeping_begin` wrote it.
        codes: [B, Q] int64. Drawn codes, 0 .. 32767.
        continues: [B] bool. The row drew "continue".
        feedback: [B, H] float32, bfloat16 or float16. Input of the next backbone step.
        draw_status: [B] int32. Status bits of the row's draws.
        staging: [S+1, H], the dtype of `feedback`, written.
        pool_codes: [S+1, Q] int64, written. The newest codes.
        history: [S+1, F, Q] int16, written. Codes of all frames.
        positions: [S+1] int32, written. Tokens that the KV cache holds.
        frames: [S+1] int32, written. Frames so far; less than F in live rows (not checked).
        max_frames: [S+1] int32. Limit of the request, 1 .. F.
        stopped: [S+1] bool, written.
        finished: [S+1] bool, written.
        status: [S+1] int32, written.

    Raises:
        As `frame_bookkeeping_begin`.

    Graph-safe: yes.
    """
    torch.ops.moss.frame_bookkeeping_end(
        row_map,
        live,
        codes,
        continues,
        feedback,
        draw_status,
        staging,
        pool_codes,
        history,
        positions,
        frames,
        max_frames,
        stopped,
        finished,
        status,
    )

"""`frame_bookkeeping` in Triton: one program per batch row."""

import triton
import triton.language as tl
from torch import Tensor

_NOT_SPECIALIZED = ("max_history",)


@triton.jit
def frame_bookkeeping_begin_kernel(
    row_map_ptr,
    active_ptr,
    staging_ptr,
    finished_ptr,
    embeds_ptr,
    live_ptr,
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.load(row_map_ptr + batch_row).to(tl.int64)
    live = (tl.load(active_ptr + batch_row) != 0) & (tl.load(finished_ptr + row) == 0)
    tl.store(live_ptr + batch_row, live)
    columns = tl.arange(0, BLOCK_HIDDEN)
    inside = columns < HIDDEN
    embeds = tl.load(staging_ptr + row * HIDDEN + columns, mask=inside, other=0.0)
    tl.store(embeds_ptr + batch_row * HIDDEN + columns, embeds, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def frame_bookkeeping_end_kernel(
    row_map_ptr,
    live_ptr,
    codes_ptr,
    continues_ptr,
    feedback_ptr,
    draw_status_ptr,
    staging_ptr,
    pool_codes_ptr,
    history_ptr,
    positions_ptr,
    frames_ptr,
    max_frames_ptr,
    stopped_ptr,
    finished_ptr,
    status_ptr,
    max_history,
    CODEBOOKS: tl.constexpr,
    BLOCK_CODEBOOKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    batch_row = tl.program_id(0).to(tl.int64)
    if tl.load(live_ptr + batch_row) != 0:
        row = tl.load(row_map_ptr + batch_row).to(tl.int64)
        continues = tl.load(continues_ptr + batch_row) != 0
        draw_status = tl.load(draw_status_ptr + batch_row)
        if continues & (draw_status == 0):
            frame = tl.load(frames_ptr + row)
            codebooks = tl.arange(0, BLOCK_CODEBOOKS)
            is_code = codebooks < CODEBOOKS
            codes = tl.load(codes_ptr + batch_row * CODEBOOKS + codebooks, mask=is_code, other=0)
            tl.store(pool_codes_ptr + row * CODEBOOKS + codebooks, codes, mask=is_code)
            entry = history_ptr + (row * max_history + frame) * CODEBOOKS
            tl.store(entry + codebooks, codes.to(tl.int16), mask=is_code)
            columns = tl.arange(0, BLOCK_HIDDEN)
            inside = columns < HIDDEN
            feedback = tl.load(feedback_ptr + batch_row * HIDDEN + columns, mask=inside, other=0.0)
            tl.store(staging_ptr + row * HIDDEN + columns, feedback, mask=inside)
            tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
            tl.store(frames_ptr + row, frame + 1)
            if frame + 1 >= tl.load(max_frames_ptr + row):
                tl.store(finished_ptr + row, True)
        else:
            tl.store(finished_ptr + row, True)
            tl.store(status_ptr + row, tl.load(status_ptr + row) | draw_status)
            if not continues:
                tl.store(stopped_ptr + row, True)


def frame_bookkeeping_begin_triton(
    row_map: Tensor, active: Tensor, staging: Tensor, finished: Tensor, embeds: Tensor, live: Tensor
) -> None:
    """Triton implementation of `moss_kernels.frame_bookkeeping_begin`, which documents and checks the arguments."""
    batch, hidden = embeds.shape
    if batch == 0:
        return
    frame_bookkeeping_begin_kernel[(batch,)](
        row_map,
        active,
        staging,
        finished,
        embeds,
        live,
        HIDDEN=hidden,
        BLOCK_HIDDEN=triton.next_power_of_2(hidden),
    )


def frame_bookkeeping_end_triton(
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
    """Triton implementation of `moss_kernels.frame_bookkeeping_end`, which documents and checks the arguments."""
    batch, codebooks = codes.shape
    hidden = feedback.shape[1]
    if batch == 0:
        return
    frame_bookkeeping_end_kernel[(batch,)](
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
        history.shape[1],
        CODEBOOKS=codebooks,
        BLOCK_CODEBOOKS=triton.next_power_of_2(codebooks),
        HIDDEN=hidden,
        BLOCK_HIDDEN=triton.next_power_of_2(hidden),
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype in ("bf16", "fp32"):
        row = {"HIDDEN": 2560, "BLOCK_HIDDEN": 4096}
        begin = {"row_map_ptr": "*i32", "active_ptr": "*i1", "staging_ptr": f"*{dtype}", "finished_ptr": "*i1"}
        begin |= {"embeds_ptr": f"*{dtype}", "live_ptr": "*i1", **dict.fromkeys(row, "constexpr")}
        specs.append((frame_bookkeeping_begin_kernel, begin, row, {}))
        frame = {"CODEBOOKS": 12, "BLOCK_CODEBOOKS": 16, **row}
        end = {"row_map_ptr": "*i32", "live_ptr": "*i1", "codes_ptr": "*i64", "continues_ptr": "*i1"}
        end |= {"feedback_ptr": f"*{dtype}", "draw_status_ptr": "*i32", "staging_ptr": f"*{dtype}"}
        end |= {"pool_codes_ptr": "*i64", "history_ptr": "*i16", "positions_ptr": "*i32", "frames_ptr": "*i32"}
        end |= {"max_frames_ptr": "*i32", "stopped_ptr": "*i1", "finished_ptr": "*i1", "status_ptr": "*i32"}
        end |= {"max_history": "i32", **dict.fromkeys(frame, "constexpr")}
        specs.append((frame_bookkeeping_end_kernel, end, frame, {}))
    return specs

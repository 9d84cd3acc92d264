"""`chunk_epilogue` in Triton: one program per frame of each row and block of samples."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from moss_kernels._launch import dependent_launch

# Divides the 3840 samples of a frame.
BLOCK_SAMPLES = 256
NUM_WARPS = 4
# One compiled kernel serves all chunks.
_NOT_SPECIALIZED = ("frames", "slot_stride", "valid_stride")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def chunk_epilogue_kernel(
    samples_ptr,
    slots_ptr,
    valid_ptr,
    stage_valid_ptr,
    offsets_ptr,
    audio_ptr,
    frames,
    slot_stride,
    valid_stride,
    STAGES: tl.constexpr,
    SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_STAGES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    frame = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row, frame_of_row = frame // frames, frame % frames
    if DEPENDENT:
        gdc_wait()
    if (frame_of_row == 0) & (part == 0):
        stage = tl.arange(0, BLOCK_STAGES).to(tl.int64)
        consumed = tl.load(stage_valid_ptr + stage * valid_stride + row, mask=stage < STAGES, other=0)
        # A row that consumes nothing may name the slot of another row, so it must not write to it at all.
        offset_ptrs = offsets_ptr + stage * slot_stride + tl.load(slots_ptr + row)
        offset = tl.load(offset_ptrs, mask=consumed > 0, other=0)
        tl.store(offset_ptrs, offset + consumed, mask=consumed > 0)
    live = frame_of_row < tl.load(valid_ptr + row)
    sample = (part * BLOCK_SAMPLES + tl.arange(0, BLOCK_SAMPLES))[:, None]
    channel = tl.arange(0, BLOCK_CHANNELS)[None, :]
    inside = (sample < SAMPLES) & (channel < CHANNELS)
    source = samples_ptr + frame * (SAMPLES * CHANNELS) + sample * CHANNELS + channel
    value = tl.load(source, mask=inside & live, other=0.0)
    target = audio_ptr + ((row * CHANNELS + channel) * frames + frame_of_row) * SAMPLES + sample
    tl.store(target, value, mask=inside)


def chunk_epilogue_triton(
    samples: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    stage_valid: torch.Tensor,
    offsets: torch.Tensor,
    audio: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.chunk_epilogue`, which documents and checks the arguments.

    With dependent launch it waits for the kernel before it at its start.
    """
    batch, frames, count, channels = samples.shape
    if samples.numel() == 0:
        return
    stages = len(offsets)
    dependent = dependent_launch(samples.device, default=True)
    chunk_epilogue_kernel[(batch * frames, triton.cdiv(count, BLOCK_SAMPLES))](
        samples,
        slots,
        valid,
        stage_valid,
        offsets,
        audio,
        frames,
        offsets.shape[1],
        stage_valid.stride(0),
        STAGES=stages,
        SAMPLES=count,
        CHANNELS=channels,
        BLOCK_STAGES=triton.next_power_of_2(stages),
        BLOCK_CHANNELS=triton.next_power_of_2(channels),
        BLOCK_SAMPLES=BLOCK_SAMPLES,
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        launch_pdl=dependent,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    constexprs: dict[str, object] = {"STAGES": 6, "SAMPLES": 3840, "CHANNELS": 2, "BLOCK_STAGES": 8}
    constexprs |= {"BLOCK_CHANNELS": 2, "BLOCK_SAMPLES": BLOCK_SAMPLES, "DEPENDENT": True}
    kinds = dict.fromkeys(("slots_ptr", "valid_ptr", "stage_valid_ptr"), "*i32")
    kinds |= {"samples_ptr": "*fp32", "offsets_ptr": "*i64", "audio_ptr": "*fp32"}
    kinds |= dict.fromkeys(constexprs, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in chunk_epilogue_kernel.arg_names}
    return [(chunk_epilogue_kernel, signature, constexprs, {"num_warps": NUM_WARPS, "launch_pdl": True})]

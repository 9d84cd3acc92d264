"""`chunk_epilogue`: the audio of a codec chunk's last layer, and the slots' offsets after the chunk."""

import torch

from moss_kernels import _checks, _library

from .reference import chunk_epilogue_reference

__all__ = ["chunk_epilogue", "chunk_epilogue_reference"]

_OP = "chunk_epilogue"


def _check(
    samples: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    stage_valid: torch.Tensor,
    offsets: torch.Tensor,
    audio: torch.Tensor,
) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, dtype: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, dtype)
        _checks.require_device(_OP, name, tensor, samples.device)
        (_checks.require_contiguous_rows if name == "stage_valid" else _checks.require_contiguous)(_OP, name, tensor)

    check("samples", samples, "[B, T, N, C]", torch.float32)
    sizes["T*N"] = sizes["T"] * sizes["N"]
    check("slots", slots, "[B]", torch.int32)
    check("valid", valid, "[B]", torch.int32)
    check("stage_valid", stage_valid, "[L, B]", torch.int32)
    check("offsets", offsets, "[L, S+1]", torch.int64)
    check("audio", audio, "[B, C, T*N]", torch.float32)


def _run_cpu(*arguments: torch.Tensor) -> None:
    _check(*arguments)
    chunk_epilogue_reference(*arguments)


def _run_cuda(*arguments: torch.Tensor) -> None:
    _check(*arguments)
    if _library.backend_for(_OP, ("triton", "reference"), arguments[0].device) == "triton":
        from .triton_kernel import chunk_epilogue_triton

        chunk_epilogue_triton(*arguments)
    else:
        chunk_epilogue_reference(*arguments)


_library.OPS.define(
    "chunk_epilogue(Tensor samples, Tensor slots, Tensor valid, Tensor stage_valid, Tensor(a!) offsets, "
    "Tensor(b!) audio) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::chunk_epilogue", _check, lib=_library.OPS)


def chunk_epilogue(
    samples: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    stage_valid: torch.Tensor,
    offsets: torch.Tensor,
    audio: torch.Tensor,
) -> None:
    """Channel by channel what lies sample by sample, silence beyond the valid frames, and the chunk counts as consumed.

    Args:
        samples: [B, T, N, C] float32. Frames at or beyond a row's `valid` may hold anything, NaN included.
        slots: [B] int32, 0 .. S (not checked). Rows with valid frames name distinct slots.
        valid: [B] int32. Valid frames of each row, 0 .. T.
        stage_valid: [L, B] int32 with contiguous rows. Valid tokens of each row in each stage; 0 where `valid` is.
        offsets: [L, S+1] int64, written. Of the slots of rows with valid frames: grown by the valid tokens.
        audio: [B, C, T * N] float32, written; 0 beyond each row's valid frames.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.chunk_epilogue(samples, slots, valid, stage_valid, offsets, audio)

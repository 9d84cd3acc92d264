"""`chunk_prologue`: all that the layers of a codec chunk need of its codes and of the slots."""

import torch

from moss_kernels import _checks, _library

from .reference import chunk_prologue_reference, dequantize_codes_reference

__all__ = ["chunk_prologue", "chunk_prologue_reference", "dequantize_codes_reference"]

_OP = "chunk_prologue"


def _check(
    codes: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offsets: torch.Tensor,
    rates: torch.Tensor,
    frequencies: torch.Tensor,
    features: torch.Tensor,
    stage_valid: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, codes.device)
        (_checks.require_contiguous_rows if name == "stage_valid" else _checks.require_contiguous)(_OP, name, tensor)

    check("codes", codes, "[B, T, Q]", torch.int64, torch.int32, torch.int16)
    check("table", table, "[Q, V, F]", torch.float32)
    check("slots", slots, "[B]", torch.int32)
    check("valid", valid, "[B]", torch.int32)
    check("offsets", offsets, "[L, S+1]", torch.int64)
    check("rates", rates, "[L]", torch.int32)
    check("frequencies", frequencies, "[D/2]", torch.float32)
    check("features", features, "[B, T, F]", torch.float32, torch.bfloat16)
    check("stage_valid", stage_valid, "[L, B]", torch.int32)
    check("cos_sin", cos_sin, "[N, D/2, 2]", torch.float32)


def _run_cpu(*arguments: torch.Tensor) -> None:
    _check(*arguments)
    chunk_prologue_reference(*arguments)


def _run_cuda(*arguments: torch.Tensor) -> None:
    _check(*arguments)
    if _library.backend_for(_OP, ("triton", "reference"), arguments[0].device) == "triton":
        from .triton_kernel import chunk_prologue_triton

        chunk_prologue_triton(*arguments)
    else:
        chunk_prologue_reference(*arguments)


_library.OPS.define(
    "chunk_prologue(Tensor codes, Tensor table, Tensor slots, Tensor valid, Tensor offsets, Tensor rates, "
    "Tensor frequencies, Tensor(a!) features, Tensor(b!) stage_valid, Tensor(c!) cos_sin) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::chunk_prologue", _check, lib=_library.OPS)


def chunk_prologue(
    codes: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offsets: torch.Tensor,
    rates: torch.Tensor,
    frequencies: torch.Tensor,
    features: torch.Tensor,
    stage_valid: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    """Features of a chunk's codes, and valid tokens and rotary tables of its L stages.

    The features are the sum over the codebooks of the table's rows: added in float32, one after the other, and rounded
    once, so that they are bitwise the same in every implementation and for every batch.

    Args:
        codes: [B, T, Q] int64, int32 or int16. A code outside 0 .. V-1 (a pad code) adds nothing.
        table: [Q, V, F] float32. What each code of each codebook contributes.
        slots: [B] int32, 0 .. S (not checked).
        valid: [B] int32. Valid frames of each row.
        offsets: [L, S+1] int64. Tokens that each slot has consumed.
        rates: [L] int32. Tokens of a frame in each stage; B * T times their sum is N (not checked).
        frequencies: [D/2] float32. As `rope_frequencies` makes them.
        features: [B, T, F] float32 or bfloat16, written.
        stage_valid: [L, B] int32 with contiguous rows, written. Valid tokens of each row.
        cos_sin: [N, D/2, 2] float32, written. For each stage, one after the other, [B, T * rate, D/2, 2]: the
            `rope_tables` of the positions offsets[stage, slots[b]] + t, beyond the valid tokens as well.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.chunk_prologue(
        codes, table, slots, valid, offsets, rates, frequencies, features, stage_valid, cos_sin
    )

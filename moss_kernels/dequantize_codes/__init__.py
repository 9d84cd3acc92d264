"""`dequantize_codes`: the features of one code per codebook, looked up and summed."""

import torch

from moss_kernels import _checks, _library

from .reference import dequantize_codes_reference

__all__ = ["dequantize_codes", "dequantize_codes_reference"]

_OP = "dequantize_codes"


def _check(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, codes.device)
        _checks.require_contiguous(_OP, name, tensor)

    check("codes", codes, "[B, T, Q]", torch.int64, torch.int32, torch.int16)
    check("table", table, "[Q, V, D]", torch.float32)
    check("out", out, "[B, T, D]", torch.float32, torch.bfloat16)


def _run_cpu(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    _check(codes, table, out)
    out.copy_(dequantize_codes_reference(codes, table))


def _run_cuda(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    _check(codes, table, out)
    if _library.backend_for(_OP, ("triton", "reference"), out.device) == "triton":
        from .triton_kernel import dequantize_codes_triton

        dequantize_codes_triton(codes, table, out)
    else:
        out.copy_(dequantize_codes_reference(codes, table))


_library.OPS.define("dequantize_codes(Tensor codes, Tensor table, Tensor(a!) out) -> ()")
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::dequantize_codes", _check, lib=_library.OPS)


def dequantize_codes(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Sum over the codebooks of the table's rows of a frame's codes.

    The terms are added in float32, one after the other, and the sum is rounded once, so that the result is bitwise the
    same in every implementation and for every batch. That of the residual quantizer whose projections are in the table.

    Args:
        codes: [B, T, Q] int64, int32 or int16. A code outside 0 .. V-1 (a pad code) adds nothing.
        table: [Q, V, D] float32. What each code of each codebook contributes.
        out: [B, T, D] float32 or bfloat16, written.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.dequantize_codes(codes, table, out)

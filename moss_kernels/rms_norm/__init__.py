"""`rms_norm`: the residual sum after a linear that was cut along K, and the norm before the next one."""

import torch

from moss_kernels import _checks, _library

from .reference import add_rms_norm_reference, rms_norm_reference

__all__ = ["add_rms_norm_reference", "rms_norm", "rms_norm_reference"]

_OP = "rms_norm"


def _check(x: torch.Tensor, partials: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, x.device)
        _checks.require_contiguous(_OP, name, tensor)

    check("x", x, "[B, H]", torch.float32, torch.bfloat16)
    if partials is not None:
        check("partials", partials, "[S, B, H]", torch.float32)
    check("weight", weight, "[H]", x.dtype)
    check("out", out, "[B, H]", x.dtype)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    add_rms_norm_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    if _library.backend_for(_OP, ("triton", "reference"), arguments[0].device) == "triton":
        from .triton_kernel import rms_norm_triton as implementation
    else:
        implementation = add_rms_norm_reference
    implementation(*arguments)


_library.OPS.define("rms_norm(Tensor(a!) x, Tensor? partials, Tensor weight, float eps, Tensor(b!) out) -> ()")
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::rms_norm", _check, lib=_library.OPS)


def rms_norm(
    x: torch.Tensor, partials: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Adds partial sums to the residual stream, then writes its root mean square norm.

    The sum of the slices and of `x` is formed in float32, in a fixed order, and rounded once. The norm is that of the
    rounded stream, in float32, rounded to the dtype before the weight is applied. A row's result is bitwise the same
    whatever the number of rows.

    Args:
        x: [B, H] float32 or bfloat16. Residual stream; written where there are `partials`.
        partials: [S, B, H] float32, or None. Slices of a linear's result, as `backbone_linear` gives them.
        weight: [H], the dtype of `x`.
        eps: added to the mean square.
        out: [B, H], the dtype of `x`, written.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.rms_norm(x, partials, weight, eps, out)

"""`silu_gate`: the activation of a gated feed-forward layer, where a library made the product before it."""

import torch

from moss_kernels import _checks, _library

from .reference import silu_gate_reference

__all__ = ["silu_gate", "silu_gate_reference"]

_OP = "silu_gate"


def _check(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    sizes: dict[str, int] = {}
    for name, tensor, layout, dtypes in (
        ("out", out, "[M, F]", (torch.float32, torch.bfloat16)),
        ("gate_up", gate_up, "[M, 2*F]", (out.dtype,)),
    ):
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, out.device)
        _checks.require_contiguous(_OP, name, tensor)
        sizes.setdefault("2*F", 2 * sizes["F"])


def _run_cpu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    _check(gate_up, out)
    silu_gate_reference(gate_up, out)


def _run_cuda(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    _check(gate_up, out)
    if _library.backend_for(_OP, ("triton", "reference"), out.device) == "triton":
        from .triton_kernel import silu_gate_triton as implementation
    else:
        implementation = silu_gate_reference
    implementation(gate_up, out)


_library.OPS.define("silu_gate(Tensor gate_up, Tensor(a!) out) -> ()")
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::silu_gate", _check, lib=_library.OPS)


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """SiLU(gate) * up for a product with interleaved weights; see `moss_kernels.backbone_linear.interleave`.

    Computed in float32 and rounded once. Each value depends on its own two inputs alone.

    Args:
        gate_up: [M, 2*F] float32 or bfloat16. Gate and up projection of each inner value in turn.
        out: [M, F], the dtype of `gate_up`, written.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.silu_gate(gate_up, out)

"""`prefill_linear`: a linear of the backbone for the tokens of whole prompts, at the speed of the tensor cores."""

import torch

from moss_kernels import _checks, _library
from moss_kernels.backbone_linear import split_count

from . import cuda_kernel
from .reference import prefill_linear_reference

__all__ = ["prefill_linear", "prefill_linear_reference"]

_OP = "prefill_linear"


def _check(x: torch.Tensor, weight: torch.Tensor, gate_up: bool, add: bool, out: torch.Tensor) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, x.device)
        _checks.require_contiguous(_OP, name, tensor)

    if gate_up and add:
        raise ValueError(f"`{_OP}`: `add` must be false with gate_up")
    check("x", x, "[B, K]", torch.float32, torch.bfloat16)
    check("weight", weight, "[N, K]", x.dtype)
    if gate_up:
        if sizes["N"] % 2:
            raise ValueError(f"`{_OP}`: `weight` must have an even number of rows with gate_up, got {sizes['N']}")
        sizes["N/2"] = sizes["N"] // 2
        check("out", out, "[B, N/2]", x.dtype)
    elif out.dim() == 3 and not add:
        sizes["S"] = split_count(sizes["N"], sizes["K"])
        check("out", out, "[S, B, N]", torch.float32)
    else:
        check("out", out, "[B, N]", x.dtype)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    prefill_linear_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    x, weight = arguments[:2]
    backends = ("cuda", "triton", "reference") if cuda_kernel.takes(x, weight) else ("triton", "reference")
    backend = _library.backend_for(_OP, backends, x.device)
    if backend == "cuda":
        implementation = cuda_kernel.prefill_linear_cuda
    elif backend == "triton":
        from .triton_fallback import prefill_linear_triton as implementation
    else:
        implementation = prefill_linear_reference
    implementation(*arguments)


_library.OPS.define("prefill_linear(Tensor x, Tensor weight, bool gate_up, bool add, Tensor(a!) out) -> ()")
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::prefill_linear", _check, lib=_library.OPS)


def prefill_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, gate_up: bool = False, add: bool = False
) -> None:
    """`x @ weight.T`: whole, gated, added to a residual stream, or as sums over slices of K that `rms_norm` adds up.

    Products accumulate in float32. On a GPU a row's result is bitwise the same whatever the number of rows and its
    place among them, the same as `backbone_linear` gives it, and the same whether it is added here or by `rms_norm`.

    Args:
        x: [B, K] float32 or bfloat16.
        weight: [N, K], the dtype of `x`.
        out: written; one of
            [B, N], the dtype of `x`: the product;
            [B, N], the dtype of `x`, with `add`: gets the slices, one after the other in float32, rounded once;
            [B, N/2], the dtype of `x`, with `gate_up`: SiLU(gate) * up;
            [S, B, N] float32: the sum over each of the S = `split_count`(N, K) slices of K. For so few rows that whole
            sums would leave multiprocessors idle.
        gate_up: whether `weight` holds rows of a gate and of an up projection in turn; see `interleave`.
        add: whether the product is added to what `out` holds.

    Raises:
        ValueError: A shape, layout or device is wrong, or both flags are set; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here. CUDA C++ takes bfloat16, N in
            multiples of 16 and slices of whole 64 columns.

    Graph-safe: yes.
    """
    torch.ops.moss.prefill_linear(x, weight, gate_up, add, out)

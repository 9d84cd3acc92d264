"""`backbone_linear`: a linear of the backbone for one token of each row, in the time of streaming its weights once."""

import torch

from moss_kernels import _checks, _library

from . import cuda_kernel
from .reference import backbone_linear_reference

__all__ = ["backbone_linear", "backbone_linear_reference", "interleave", "split_count"]

_OP = "backbone_linear"
# Outputs from which tiles of the weights alone keep a large GPU busy, and the part of K that a split takes at least.
_ENOUGH_OUTPUTS = 6000
_LEAST_SLICE = 512


def split_count(n: int, k: int) -> int:
    """Slices S of K whose sums are worth keeping apart for N outputs; a function of the weight's shape alone."""
    if n >= _ENOUGH_OUTPUTS:
        return 1
    return next((splits for splits in (4, 2) if k % splits == 0 and k // splits >= _LEAST_SLICE), 1)


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of two weights [F, K] in turn, as `gate_up` expects: [2*F, K]. Views [0::2] and [1::2] give them back."""
    return torch.stack((gate, up), 1).flatten(0, 1)


def _check(x: torch.Tensor, weight: torch.Tensor, gate_up: bool, out: torch.Tensor) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, x.device)
        _checks.require_contiguous(_OP, name, tensor)

    check("x", x, "[B, K]", torch.float32, torch.bfloat16)
    check("weight", weight, "[N, K]", x.dtype)
    if not gate_up and out.dim() == 3:
        check("out", out, "[S, B, N]", torch.float32)
        if sizes["S"] == 0 or sizes["K"] % sizes["S"]:
            raise ValueError(f"`{_OP}`: `out` must have a number of slices that divides K = {sizes['K']}, "
                             f"got {sizes['S']}")  # fmt: skip
    elif gate_up:
        if sizes["N"] % 2:
            raise ValueError(f"`{_OP}`: `weight` must have an even number of rows with gate_up, got {sizes['N']}")
        sizes["N/2"] = sizes["N"] // 2
        check("out", out, "[B, N/2]", x.dtype)
    else:
        check("out", out, "[B, N]", x.dtype)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    backbone_linear_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    x, weight, _, out = arguments
    backends = ("cuda", "triton", "reference") if cuda_kernel.takes(x, weight, out) else ("triton", "reference")
    backend = _library.backend_for(_OP, backends, x.device)
    if backend == "cuda":
        implementation = cuda_kernel.backbone_linear_cuda
    elif backend == "triton":
        from .triton_kernel import backbone_linear_triton as implementation
    else:
        implementation = backbone_linear_reference
    implementation(*arguments)


_library.OPS.define("backbone_linear(Tensor x, Tensor weight, bool gate_up, Tensor(a!) out) -> ()")
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::backbone_linear", _check, lib=_library.OPS)


def backbone_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, gate_up: bool = False) -> None:
    """`x @ weight.T` for few rows: whole, gated, or as sums over S slices of K that `rms_norm` adds up.

    Products accumulate in float32. A row's result is bitwise the same whatever the number of rows and its place among
    them: how K is cut depends on the shapes of `weight` and `out` alone.

    Args:
        x: [B, K] float32 or bfloat16.
        weight: [N, K], the dtype of `x`.
        out: written; one of
            [B, N], the dtype of `x`: the product;
            [B, N/2], the dtype of `x`, with `gate_up`: SiLU(gate) * up;
            [S, B, N] float32: slice s holds the sum over columns s * K/S .. (s+1) * K/S. See `split_count`.
        gate_up: whether `weight` holds rows of a gate and of an up projection in turn; see `interleave`.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here. CUDA C++ takes up to 128 rows
            of bfloat16, N in multiples of 16 and slices of whole 64 columns.

    Graph-safe: yes.
    """
    torch.ops.moss.backbone_linear(x, weight, gate_up, out)

"""`codec_linear`: a linear of the codec's transformer, with the LayerNorm before it and what follows it."""

import torch

from moss_kernels import _checks, _library

from . import cuda_kernel
from .reference import codec_linear_reference, layer_norm_sums

__all__ = ["codec_linear", "codec_linear_reference", "layer_norm_sums", "scratch_size"]

_OP = "codec_linear"
_DTYPES = (torch.float32, torch.bfloat16)


def scratch_size(m: int, n: int, k: int, *, norm: bool) -> int:
    """Elements of `scratch` that `codec_linear` needs for M rows: normalised inputs, or a product before its scale."""
    return m * (k if norm else n)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, x.device)
        _checks.require_contiguous(_OP, name, tensor)

    check("x", x, "[M, K]", *_DTYPES)
    check("weight", weight, "[N, K]", *_DTYPES)
    check("out", out, "[M, N]", *_DTYPES)
    norm = (norm_weight, norm_bias, norm_sums)
    if any(part is None for part in norm) and norm != (None, None, None):
        raise ValueError(f"`{_OP}`: `norm_weight`, `norm_bias` and `norm_sums` must be given together, or none of them")
    if norm_weight is not None:
        if scale is not None:
            raise ValueError(f"`{_OP}`: `scale` must be None with a norm, got one")
        check("norm_weight", norm_weight, "[K]", weight.dtype)
        check("norm_bias", norm_bias, "[K]", weight.dtype)
        check("norm_sums", norm_sums, "[2, N]", torch.float32)
    if scale is not None:
        check("scale", scale, "[N]", weight.dtype)
        _checks.require_dtype(_OP, "x", x, weight.dtype)
    if norm_weight is not None or scale is not None:
        least = scratch_size(sizes["M"], sizes["N"], sizes["K"], norm=norm_weight is not None)
        if scratch is None or scratch.dim() != 1 or scratch.numel() < least:
            got = None if scratch is None else tuple(scratch.shape)
            raise ValueError(f"`{_OP}`: `scratch` must be [n] with n >= {least}, got {got}")
        check("scratch", scratch, "[n]", weight.dtype)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    _reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    x, weight, norm_weight, _, _, gelu, scale, _, out = arguments
    taken = cuda_kernel.takes(x, weight, norm_weight, gelu, scale, out)
    backends = ("cuda", "triton", "reference") if taken else ("triton", "reference")
    backend = _library.backend_for(_OP, backends, x.device)
    if backend == "cuda":
        implementation = cuda_kernel.codec_linear_cuda
    elif backend == "triton":
        from .triton_kernel import codec_linear_triton as implementation
    else:
        implementation = _reference
    implementation(*arguments)


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm_sums: torch.Tensor | None,
    gelu: bool,
    scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    parts = {"norm_weight": norm_weight, "norm_bias": norm_bias, "gelu": gelu, "scale": scale}
    out.copy_(codec_linear_reference(x, weight, **parts, residual=None if scale is None else out))


_library.OPS.define(
    "codec_linear(Tensor x, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, Tensor? norm_sums, bool gelu, "
    "Tensor? scale, Tensor(a!)? scratch, Tensor(b!) out) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::codec_linear", _check, lib=_library.OPS)


def codec_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_sums: torch.Tensor | None = None,
    gelu: bool = False,
    scale: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """`gelu(norm(x) @ weight.T)`, stored in `out`; or, with a layer scale, added to the residual stream in `out`.

    The norm is LayerNorm over K with eps 1e-5, GELU is the exact one (erf), where bfloat16 is stored to within 3e-5 +
    3e-4 |x|: a part of the rounding of a bfloat16 as large as x, but more than that of the result where x is far below
    0. Sums and everything after the product are float32; an implementation may round less often than eager modules,
    never more. A bfloat16 product takes its input rounded to bfloat16: `x` times `norm_weight`, or the normalised `x`.
    The result of a row depends on the number of rows, by such roundings, but not on its place among them.

    Args:
        x: [M, K] float32 or bfloat16. With `scale` the dtype of `weight`.
        weight: [N, K] float32 or bfloat16.
        out: [M, N] float32 or bfloat16, written. With `scale` the residual stream: read, and `scale` times the result
            is added.
        norm_weight: [K], the dtype of `weight`; None leaves the LayerNorm out.
        norm_bias: [K], the dtype of `weight`; given with `norm_weight`.
        norm_sums: [2, N] float32. `layer_norm_sums(weight, norm_weight, norm_bias)`; given with `norm_weight`.
        gelu: whether GELU follows the product.
        scale: [N], the dtype of `weight`; not with a norm.
        scratch: [n], the dtype of `weight`, at least `scratch_size(...)`; needed with a norm or `scale`. What it holds
            afterwards is undefined.

    Raises:
        ValueError: A shape, layout or device is wrong, or arguments exclude each other; the message names them.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.codec_linear(x, weight, norm_weight, norm_bias, norm_sums, gelu, scale, scratch, out)

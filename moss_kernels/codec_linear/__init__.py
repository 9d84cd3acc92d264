"""`codec_linear`: a linear of the codec's transformer, with the LayerNorm before it and what follows it."""

import torch

from moss_kernels import _checks, _library

from . import cuda_kernel
from .arguments import CodecLinearArguments
from .reference import codec_linear_op_reference, codec_linear_reference, layer_norm_sums
from .tiles import normed_rows, normed_tile_for, partial_elements, partial_tile_for

__all__ = [
    "codec_linear",
    "codec_linear_reference",
    "layer_norm_sums",
    "leaves_normed",
    "moments_size",
    "normed_rows",
    "partial_elements",
    "partial_slices",
    "scratch_size",
]

_OP = "codec_linear"
_DTYPES = (torch.float32, torch.bfloat16)
_BACKENDS = ("cuda", "triton", "reference")


def scratch_size(m: int, n: int, k: int, *, norm: bool) -> int:
    """Elements of `scratch` that `codec_linear` needs for M rows: normalised inputs, or a product before its scale."""
    return m * (k if norm else n)


def partial_slices(m: int, weight: torch.Tensor) -> int:
    """Slices of the inputs whose sums for M rows are best left to what comes next; 0: none, whole.

    That is a norm, which takes them as `partials`, or for q, k and v of one weight `ring_attention`. `weight`: [N, K].
    """
    tile = partial_tile_for(m, *weight.shape) if weight.is_cuda and weight.dtype == torch.bfloat16 else None
    if tile is None or _library.backend_for(_OP, _BACKENDS, weight.device) != "cuda":
        return 0
    return tile.slices


def leaves_normed(m: int, weight: torch.Tensor, stream: torch.dtype) -> bool:
    """Whether a linear that is added to M rows of a residual stream had best leave them normalised, as `normed`.

    `weight`: [N, K]; `stream`: dtype of the residual stream.
    """
    both = weight.dtype == stream == torch.bfloat16
    if not both or not weight.is_cuda or normed_tile_for(m, *weight.shape) is None:
        return False
    return _library.backend_for(_OP, _BACKENDS, weight.device) == "cuda"


def moments_size(m: int) -> int:
    """Elements of `moments` that `codec_linear` needs for M rows with `normed`."""
    return -(-m // 16) * 288  # SharedRows of csrc/device/row_moments.cuh


def _check(*arguments: object) -> None:
    given = CodecLinearArguments(*arguments)
    x, weight, scale, out, norm_weight = given.x, given.weight, given.scale, given.out, given.norm_weight
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, x.device)
        _checks.require_contiguous(_OP, name, tensor)

    check("x", x, "[M, K]", *_DTYPES)
    check("weight", weight, "[N, K]", *_DTYPES)
    if out.dim() == 3:
        check("out", out, "[S, M, N]", torch.float32)
        if given.gelu or scale is not None:
            raise ValueError(f"`{_OP}`: `out` must be [M, N] with GELU or `scale`, got {tuple(out.shape)}")
        if sizes["S"] == 0 or sizes["K"] % sizes["S"]:
            raise ValueError(f"`{_OP}`: `out` must have slices of K = {sizes['K']} alike, got {sizes['S']}")
    else:
        check("out", out, "[M, N]", *_DTYPES)
    norm = (norm_weight, given.norm_bias, given.norm_sums)
    if any(part is None for part in norm) and norm != (None, None, None):
        raise ValueError(f"`{_OP}`: `norm_weight`, `norm_bias` and `norm_sums` must be given together, or none of them")
    if norm_weight is not None:
        if scale is not None:
            raise ValueError(f"`{_OP}`: `scale` must be None with a norm, got one")
        check("norm_weight", norm_weight, "[K]", weight.dtype)
        check("norm_bias", given.norm_bias, "[K]", weight.dtype)
        check("norm_sums", given.norm_sums, "[2, N]", torch.float32)
    partials, partials_scale = given.partials, given.partials_scale
    if (partials is None) != (partials_scale is None) or (partials is not None and norm_weight is None):
        raise ValueError(f"`{_OP}`: `partials` and `partials_scale` must be given together, with a norm")
    if partials is not None:
        check("partials", partials, "[P, M, K]", torch.float32)
        check("partials_scale", partials_scale, "[K]", weight.dtype)
    if scale is not None:
        check("scale", scale, "[N]", weight.dtype)
        _checks.require_dtype(_OP, "x", x, weight.dtype)
    following = ("next_norm_weight", "next_norm_bias", "normed", "moments")
    there = [name for name in following if getattr(given, name) is not None]
    if there and len(there) < len(following):
        names = ", ".join(f"`{name}`" for name in following)
        raise ValueError(f"`{_OP}`: {names} must be given together, or none of them, got {', '.join(there)} alone")
    if given.normed is not None:
        if scale is None:
            raise ValueError(f"`{_OP}`: `normed` must be None without `scale`, got one")
        check("next_norm_weight", given.next_norm_weight, "[N]", weight.dtype)
        check("next_norm_bias", given.next_norm_bias, "[N]", weight.dtype)
        check("normed", given.normed, "[M, N]", weight.dtype)
        moments, least = given.moments, moments_size(sizes["M"])
        if moments.dim() != 1 or moments.numel() < least:
            raise ValueError(f"`{_OP}`: `moments` must be [n] with n >= {least}, got {tuple(moments.shape)}")
        _checks.require_dtype(_OP, "moments", moments, torch.int32)
        _checks.require_device(_OP, "moments", moments, x.device)
        _checks.require_contiguous(_OP, "moments", moments)
    if given.cos_sin is not None:
        if given.gelu or scale is not None or out.dim() == 3:
            raise ValueError(f"`{_OP}`: `cos_sin` must be None with GELU, `scale` or slices, got one")
        check("cos_sin", given.cos_sin, "[M, D/2, 2]", torch.float32)
        if sizes["D/2"] == 0 or sizes["N"] % (6 * sizes["D/2"]):
            raise ValueError(f"`{_OP}`: `out` must have 3 * H * D columns, D = {2 * sizes['D/2']}, got {sizes['N']}")
    if norm_weight is not None or scale is not None:
        least = scratch_size(sizes["M"], sizes["N"], sizes["K"], norm=norm_weight is not None)
        scratch = given.scratch
        if scratch is None or scratch.dim() != 1 or scratch.numel() < least:
            got = None if scratch is None else tuple(scratch.shape)
            raise ValueError(f"`{_OP}`: `scratch` must be [n] with n >= {least}, got {got}")
        check("scratch", scratch, "[n]", weight.dtype)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    codec_linear_op_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    given = CodecLinearArguments(*arguments)
    left_out = {"triton"} if given.out.dim() == 3 or given.cos_sin is not None else set()
    parts = (given.norm_weight, given.gelu, given.scale, given.out, given.cos_sin)
    left_out |= set() if cuda_kernel.takes(given.x, given.weight, *parts) else {"cuda"}
    backend = _library.backend_for(_OP, tuple(b for b in _BACKENDS if b not in left_out), given.x.device)
    if backend == "cuda":
        cuda_kernel.codec_linear_cuda(*arguments)
    elif backend == "triton":
        from .triton_kernel import codec_linear_triton

        codec_linear_triton(*arguments)
    else:
        codec_linear_op_reference(*arguments)


_library.OPS.define(
    "codec_linear(Tensor(c!) x, Tensor weight, Tensor? norm_weight, Tensor? norm_bias, Tensor? norm_sums, bool gelu, "
    "Tensor? scale, Tensor(a!)? scratch, Tensor(b!) out, Tensor? partials=None, Tensor? partials_scale=None, "
    "Tensor? next_norm_weight=None, Tensor? next_norm_bias=None, Tensor(d!)? normed=None, Tensor(e!)? moments=None, "
    "Tensor? cos_sin=None) -> ()"
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
    partials: torch.Tensor | None = None,
    partials_scale: torch.Tensor | None = None,
    next_norm_weight: torch.Tensor | None = None,
    next_norm_bias: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    moments: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
) -> None:
    """`gelu(norm(x) @ weight.T)`, stored in `out`; or, with a layer scale, added to the residual stream in `out`.

    Where `partial_slices` says so, the product is better left in slices for the call behind it, which adds them to the
    stream ahead of its norm: the first with an `out` of three dimensions, the other with `partials`. Slices of q, k and
    v, which come after a norm, `ring_attention` adds. Where `leaves_normed` says so, the call that adds to the stream
    had best do the next call's norm as well: that one then takes `normed` as its `x`, and no norm.

    The norm is LayerNorm over K with eps 1e-5, GELU is the exact one (erf), where bfloat16 is stored to within 3e-5 +
    3e-4 |x|: a part of the rounding of a bfloat16 as large as x, but more than that of the result where x is far below
    0. Sums and everything after the product are float32; an implementation may round less often than eager modules,
    never more; what is rotated is rounded before. A bfloat16 product takes its input rounded to bfloat16: `x` times
    `norm_weight`, or the normalised `x`. The result of a row depends on the number of rows, by such roundings, but not
    on its place among them.

    Args:
        x: [M, K] float32 or bfloat16. With `scale` the dtype of `weight`. With `partials` the residual stream: written.
        weight: [N, K] float32 or bfloat16.
        out: [M, N] float32 or bfloat16, written. With `scale` the residual stream: read, and `scale` times the result
            is added. Or [S, M, N] float32: the sums over S equal slices of the inputs, with none of what follows; it
            may lie where `partials` do, which are read before.
        norm_weight: [K], the dtype of `weight`; None leaves the LayerNorm out.
        norm_bias: [K], the dtype of `weight`; given with `norm_weight`.
        norm_sums: [2, N] float32. `layer_norm_sums(weight, norm_weight, norm_bias)`; given with `norm_weight`.
        gelu: whether GELU follows the product.
        scale: [N], the dtype of `weight`; not with a norm.
        scratch: [n], the dtype of `weight`, at least `scratch_size(...)`; needed with a norm or `scale`. What it holds
            afterwards is undefined; `normed` may lie there.
        partials: [P, M, K] float32, or None; with a norm. `partials_scale` times their sum is added to `x` first, which
            is rounded as a residual stream in `out` would be.
        partials_scale: [K], the dtype of `weight`; given with `partials`.
        next_norm_weight, next_norm_bias: [N], the dtype of `weight`; given with `normed`.
        normed: [M, N], the dtype of `weight`, written; with `scale`, or None. The norm of what `out` then holds.
        moments: [n] int32, at least `moments_size(M)`; given with `normed`. Workspace, zero before its first use,
            for such calls alone, one after the other.
        cos_sin: [M, D/2, 2] float32. The outputs are q, k and v of heads of D, and interleaved pairs of q and k are
            rotated by these cosines and sines, as by `ring_attention`; not with GELU, `scale` or slices.

    Raises:
        ValueError: A shape, layout or device is wrong, or arguments exclude each other; the message names them.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    norm = (norm_weight, norm_bias, norm_sums)
    following = (next_norm_weight, next_norm_bias, normed, moments)
    torch.ops.moss.codec_linear(
        x, weight, *norm, gelu, scale, scratch, out, partials, partials_scale, *following, cos_sin
    )

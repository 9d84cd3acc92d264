"""`kv_append`: norms and rotation of the new token's queries and keys, and its place in the paged cache."""

import torch

from moss_kernels import _checks, _library

from .reference import kv_append_reference, rotate_half_split

__all__ = ["check_token", "kv_append", "kv_append_reference", "rotate_half_split"]

_OP = "kv_append"


def check_token(
    op: str,
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: tuple[str, torch.Tensor],
) -> dict[str, int]:
    """Check the arguments that `kv_append` and `paged_attention` share; returns the sizes by name.

    Args:
        op: for the messages.
        out: name and value of the op's output [B, Hq*D].
        The others: as in `kv_append`.
    """
    sizes: dict[str, int] = {}

    def check(name: str, tensor: torch.Tensor, layout: str, dtype: torch.dtype) -> None:
        _checks.require_shape(op, name, tensor, layout, sizes)
        _checks.require_dtype(op, name, tensor, dtype)
        _checks.require_device(op, name, tensor, qkv.device)
        _checks.require_contiguous(op, name, tensor)

    _checks.require_dtype(op, "qkv", qkv, torch.float32, torch.bfloat16)
    check("key_pages", key_pages, "[P+1, H, Z, D]", qkv.dtype)
    check("value_pages", value_pages, "[P+1, H, Z, D]", qkv.dtype)
    if sizes["D"] % 2:
        raise ValueError(f"`{op}`: `key_pages` must have an even head_dim, got {sizes['D']}")
    check("page_table", page_table, "[S+1, N]", torch.int32)
    check("positions", positions, "[S+1]", torch.int32)
    check("row_map", row_map, "[B]", torch.int32)
    check("active", active, "[B]", torch.bool)
    check(*out, "[B, Hq*D]", qkv.dtype)
    group_width = sizes["H"] * sizes["D"]
    if sizes["Hq*D"] == 0 or sizes["Hq*D"] % group_width:
        raise ValueError(f"`{op}`: `{out[0]}` must have a multiple of H*D = {group_width} columns, got {sizes['Hq*D']}")
    sizes["(Hq+2*H)*D"] = sizes["Hq*D"] + 2 * group_width
    check("qkv", qkv, "[B, (Hq+2*H)*D]", qkv.dtype)
    check("q_norm", q_norm, "[D]", qkv.dtype)
    check("k_norm", k_norm, "[D]", qkv.dtype)
    check("cos_sin", cos_sin, "[L, D]", qkv.dtype)
    return sizes


def _check(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    q_out: torch.Tensor,
) -> None:
    pages = (key_pages, value_pages, page_table, positions, row_map, active)
    check_token(_OP, qkv, q_norm, k_norm, cos_sin, *pages, ("q_out", q_out))


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    kv_append_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    if _library.backend_for(_OP, ("triton", "reference"), arguments[0].device) == "triton":
        from .triton_kernel import kv_append_triton as implementation
    else:
        implementation = kv_append_reference
    implementation(*arguments)


_library.OPS.define(
    "kv_append(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps, Tensor cos_sin, Tensor(a!) key_pages, "
    "Tensor(b!) value_pages, Tensor page_table, Tensor positions, Tensor row_map, Tensor active, Tensor(c!) q_out) "
    "-> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::kv_append", _check, lib=_library.OPS)


def kv_append(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    q_out: torch.Tensor,
) -> None:
    """Normalises and rotates q and k of one new token per row, stores k and v in its page, and gives q.

    Each head of q and k has a root mean square norm of its own, as `rms_norm` without partial sums; the rotation is
    half-split, at the row's position. An implementation may round the rotated values once. An inactive row writes
    nothing. A row's result does not depend on the batch.

    Args:
        qkv: [B, (Hq+2*H)*D] float32 or bfloat16. All query heads, all key heads, all value heads.
        q_norm, k_norm: [D], the dtype of `qkv`.
        eps: of both norms.
        cos_sin: [L, D], the dtype of `qkv`. Cosines of the D/2 pairs at each position, then their sines.
        key_pages: [P+1, H, Z, D], the dtype of `qkv`. Pages of Z tokens of one layer; page P is the null page.
        value_pages: [P+1, H, Z, D], likewise.
        page_table: [S+1, N] int32, 0 .. P (not checked). Token t of pool row s lies in page `page_table[s, t // Z]` at
            place t % Z. Row S is the null row of padding.
        positions: [S+1] int32. Tokens that each pool row holds, less than L and N*Z (not checked): the position of
            the new token.
        row_map: [B] int32, 0 .. S (not checked). Pool row of each row; no two active rows share one.
        active: [B] bool.
        q_out: [B, Hq*D], the dtype of `qkv`, written.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    pages = (key_pages, value_pages, page_table, positions, row_map, active)
    torch.ops.moss.kv_append(qkv, q_norm, k_norm, eps, cos_sin, *pages, q_out)

"""`paged_attention`: attention of one new token per row over the keys and values of its pages."""

import dataclasses

import torch

from moss_kernels import _checks, _library
from moss_kernels.kv_append import check_pages

from .reference import MAX_SPLITS, paged_attention_reference

__all__ = ["AttentionScratch", "paged_attention", "paged_attention_reference"]

_OP = "paged_attention"


@dataclasses.dataclass(frozen=True)
class AttentionScratch:
    """Memory that `paged_attention` works in; one for each stream that graphs replay on.

    Attributes:
        partials: [B, H, 16, G, D+2] float32. For each of up to 16 splits of a row's keys the weighted values of the
            G query heads of a key head, then the sum of the weights and the highest score. Contents do not matter.
        arrived: [B, H] int32. Splits done; 0 between calls.
    """

    partials: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(
        cls, batch: int, query_heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> "AttentionScratch":
        """Scratch for up to `batch` rows."""
        shape = (batch, kv_heads, MAX_SPLITS, query_heads // kv_heads, head_dim + 2)
        return cls(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(batch, kv_heads, dtype=torch.int32, device=device),
        )


def _check(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    sizes = check_pages(_OP, ("q", q), key_pages, value_pages, page_table, positions, row_map, active)

    def check(name: str, tensor: torch.Tensor, layout: str, dtype: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, dtype)
        _checks.require_device(_OP, name, tensor, q.device)
        _checks.require_contiguous(_OP, name, tensor)

    check("q", q, "[B, Hq*D]", q.dtype)
    group_width = sizes["H"] * sizes["D"]
    if sizes["Hq*D"] == 0 or sizes["Hq*D"] % group_width:
        raise ValueError(f"`{_OP}`: `q` must have a multiple of H*D = {group_width} columns, got {q.shape[1]}")
    sizes |= {"G": sizes["Hq*D"] // group_width, "D+2": sizes["D"] + 2}
    check("out", out, "[B, Hq*D]", q.dtype)
    check("partials", partials, f"[R, H, {MAX_SPLITS}, G, D+2]", torch.float32)
    check("arrived", arrived, "[R, H]", torch.int32)
    if sizes["R"] < sizes["B"]:
        raise ValueError(f"`{_OP}`: `partials` must have at least B = {sizes['B']} rows, got {sizes['R']}")


def _reference(*arguments: object) -> None:
    paged_attention_reference(*arguments[:-2])


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    _reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    if _library.backend_for(_OP, ("triton", "reference"), arguments[0].device) == "triton":
        from .triton_kernel import paged_attention_triton as implementation
    else:
        implementation = _reference
    implementation(*arguments)


_library.OPS.define(
    "paged_attention(Tensor q, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor positions, "
    "Tensor row_map, Tensor active, Tensor(a!) out, Tensor(b!) partials, Tensor(c!) arrived) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::paged_attention", _check, lib=_library.OPS)


def paged_attention(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
) -> None:
    """Attention of one query token per row over the keys 0 .. positions[row_map[b]] of its pool row.

    Query head h reads key head h // G. Scores, softmax and the weighted sum accumulate in float32. Long rows are split
    along the keys and the parts are put together in order; the split depends on the row's length alone, so a row's
    result is bitwise the same whatever else is in the batch. Pages of other rows, places beyond the length and all of
    an inactive row's inputs may hold anything, NaN included.

    Args:
        q: [B, Hq*D] float32 or bfloat16. Normalised and rotated queries, as `kv_append` gives them.
        key_pages, value_pages, page_table, positions, row_map, active: as in `kv_append`, whose new token is stored.
        out: [B, Hq*D], the dtype of `q`, written; 0 in inactive rows.
        scratch: for at least B rows.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here, or the kernel lacks this D
            or page size.

    Graph-safe: yes, on one stream per scratch.
    """
    pages = (key_pages, value_pages, page_table, positions, row_map, active)
    torch.ops.moss.paged_attention(q, *pages, out, scratch.partials, scratch.arrived)

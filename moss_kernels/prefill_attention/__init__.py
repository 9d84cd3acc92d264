"""`prefill_attention`: new tokens of several prompts attend over the paged cache, which holds them already."""

import torch

from moss_kernels import _checks, _library

from .reference import TILE, prefill_attention_reference

__all__ = ["TILE", "prefill_attention", "prefill_attention_reference"]

_OP = "prefill_attention"


def _check(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:
    sizes: dict[str, int] = {}
    for name, tensor, layout, dtypes in (
        ("q", q, "[M, Hq*D]", (torch.float32, torch.bfloat16)),
        ("key_pages", key_pages, "[P+1, H, Z, D]", (q.dtype,)),
        ("value_pages", value_pages, "[P+1, H, Z, D]", (q.dtype,)),
        ("page_tables", page_tables, "[T, N]", (torch.int32,)),
        ("tiles", tiles, "[T, 2]", (torch.int32,)),
        ("out", out, "[M, Hq*D]", (q.dtype,)),
    ):
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, q.device)
        _checks.require_contiguous(_OP, name, tensor)
    width = sizes["H"] * sizes["D"]
    if sizes["M"] != TILE * sizes["T"]:
        raise ValueError(f"`{_OP}`: `q` must have {TILE}*T = {TILE * sizes['T']} rows, got {sizes['M']}")
    if width == 0 or sizes["Hq*D"] == 0 or sizes["Hq*D"] % width:
        raise ValueError(f"`{_OP}`: `q` must have a multiple of H*D = {width} columns, got {sizes['Hq*D']}")


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    prefill_attention_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    if _library.backend_for(_OP, ("triton", "reference"), arguments[0].device) == "triton":
        from .triton_kernel import prefill_attention_triton as implementation
    else:
        implementation = prefill_attention_reference
    implementation(*arguments)


_library.OPS.define(
    "prefill_attention(Tensor q, Tensor key_pages, Tensor value_pages, Tensor page_tables, Tensor tiles, "
    "Tensor(a!) out) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::prefill_attention", _check, lib=_library.OPS)


def prefill_attention(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Causal attention of prompts' tokens over their pages, after `kv_append` has stored those tokens as well.

    Queries come in tiles of `TILE` consecutive positions of one prompt. The query at position p sees the keys 0 .. p.
    Query head h reads key head h // (Hq / H). Scores, softmax and the weighted sum accumulate in float32. A tile's
    result is bitwise the same whatever the other tiles are, and however many. Queries beyond a tile's number, places
    beyond them in the pages and all other pages may hold anything, NaN included.

    Args:
        q: [M, Hq*D] float32 or bfloat16, M = TILE * T. Rotated queries, tile after tile.
        key_pages: [P+1, H, Z, D], the dtype of `q`. Pages of Z tokens of one layer.
        value_pages: [P+1, H, Z, D], likewise.
        page_tables: [T, N] int32, 0 .. P (not checked). Token t of the prompt of a tile lies in page
            `page_tables[tile, t // Z]` at place t % Z.
        tiles: [T, 2] int32 (not checked). Position of the first query, and number of queries, 0 .. TILE. The last
            query's position is below N*Z.
        out: [M, Hq*D], the dtype of `q`, written; 0 beyond a tile's number.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here, or the kernel lacks this D.

    Graph-safe: yes.
    """
    torch.ops.moss.prefill_attention(q, key_pages, value_pages, page_tables, tiles, out)

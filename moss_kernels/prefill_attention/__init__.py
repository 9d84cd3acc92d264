"""`prefill_attention`: new tokens of several prompts attend over the paged cache, which holds them already."""

import torch

from moss_kernels import _checks, _library

from .reference import prefill_attention_reference

__all__ = ["prefill_attention", "prefill_attention_reference"]

_OP = "prefill_attention"


def _check(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    counts: torch.Tensor,
    start: int,
    out: torch.Tensor,
) -> None:
    sizes: dict[str, int] = {}
    for name, tensor, layout, dtypes in (
        ("q", q, "[B*L, Hq*D]", (torch.float32, torch.bfloat16)),
        ("key_pages", key_pages, "[P+1, H, Z, D]", (q.dtype,)),
        ("value_pages", value_pages, "[P+1, H, Z, D]", (q.dtype,)),
        ("page_tables", page_tables, "[B, N]", (torch.int32,)),
        ("counts", counts, "[B]", (torch.int32,)),
        ("out", out, "[B*L, Hq*D]", (q.dtype,)),
    ):
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, q.device)
        _checks.require_contiguous(_OP, name, tensor)
    rows, batch, width = sizes["B*L"], sizes["B"], sizes["H"] * sizes["D"]
    if rows % batch if batch else rows:
        raise ValueError(f"`{_OP}`: `q` must have a multiple of B = {batch} rows, got {rows}")
    if width == 0 or sizes["Hq*D"] == 0 or sizes["Hq*D"] % width:
        raise ValueError(f"`{_OP}`: `q` must have a multiple of H*D = {width} columns, got {sizes['Hq*D']}")
    if start < 0:
        raise ValueError(f"`{_OP}`: `start` must be at least 0, got {start}")


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
    "prefill_attention(Tensor q, Tensor key_pages, Tensor value_pages, Tensor page_tables, Tensor counts, int start, "
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
    counts: torch.Tensor,
    start: int,
    out: torch.Tensor,
) -> None:
    """Causal attention of B prompts' tokens over their pages, after `kv_append` has stored those tokens as well.

    Token t of a prompt's L is at position start + t and sees the keys 0 .. start + t. Query head h reads key head
    h // (Hq / H). Scores, softmax and the weighted sum accumulate in float32. A prompt's result is bitwise the same
    whatever the other prompts are, and however many. Queries beyond a prompt's tokens, places beyond them in its pages
    and all other pages may hold anything, NaN included.

    Args:
        q: [B*L, Hq*D] float32 or bfloat16. Rotated queries, prompt after prompt, each padded to L tokens.
        key_pages: [P+1, H, Z, D], the dtype of `q`. Pages of Z tokens of one layer.
        value_pages: [P+1, H, Z, D], likewise.
        page_tables: [B, N] int32, 0 .. P (not checked). Token t of prompt b lies in page `page_tables[b, t // Z]` at
            place t % Z.
        counts: [B] int32, 0 .. L (not checked). Tokens of each prompt; start + counts[b] is at most N*Z.
        start: tokens of each prompt that came before.
        out: [B*L, Hq*D], the dtype of `q`, written; 0 beyond a prompt's tokens.

    Raises:
        ValueError: A shape, layout, device or `start` is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here, or the kernel lacks this D.

    Graph-safe: yes.
    """
    torch.ops.moss.prefill_attention(q, key_pages, value_pages, page_tables, counts, start, out)

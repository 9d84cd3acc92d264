"""`paged_attention`: a new token per row joins the paged cache and attends over all tokens of its row."""

import dataclasses

import torch

from moss_kernels import _checks, _library
from moss_kernels.kv_append import check_token

from . import cuda_kernel
from .reference import MAX_SPLITS, paged_attention_reference

__all__ = ["AttentionScratch", "paged_attention", "paged_attention_reference"]

_OP = "paged_attention"


@dataclasses.dataclass(frozen=True)
class AttentionScratch:
    """Memory that `paged_attention` works in; one for each stream that graphs replay on.

    Attributes:
        partials: [B, H, 16, G, D+2] float32. For each of up to 16 splits of a row's keys and the G query heads of a
            key head the weighted values, the sum of the weights and the highest score, in an order of the
            implementation's own. Contents do not matter.
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
    out: torch.Tensor,
    partials: torch.Tensor,
    arrived: torch.Tensor,
    settled: bool,
) -> None:
    pages = (key_pages, value_pages, page_table, positions, row_map, active)
    sizes = check_token(_OP, qkv, q_norm, k_norm, cos_sin, *pages, ("out", out))
    sizes |= {"G": sizes["Hq*D"] // (sizes["H"] * sizes["D"]), "D+2": sizes["D"] + 2}
    for name, tensor, layout, dtype in (
        ("partials", partials, f"[R, H, {MAX_SPLITS}, G, D+2]", torch.float32),
        ("arrived", arrived, "[R, H]", torch.int32),
    ):
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, dtype)
        _checks.require_device(_OP, name, tensor, qkv.device)
        _checks.require_contiguous(_OP, name, tensor)
    if sizes["R"] < sizes["B"]:
        raise ValueError(f"`{_OP}`: `partials` must have at least B = {sizes['B']} rows, got {sizes['R']}")


def _reference(*arguments: object) -> None:
    *inputs, _partials, _arrived, _settled = arguments
    paged_attention_reference(*inputs)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    _reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    qkv, key_pages, out = arguments[0], arguments[5], arguments[11]
    backends = ("cuda", "triton", "reference") if cuda_kernel.takes(qkv, key_pages, out) else ("triton", "reference")
    backend = _library.backend_for(_OP, backends, qkv.device)
    if backend == "cuda":
        *tensors, settled = arguments
        cuda_kernel.paged_attention_cuda(*tensors, settled=settled)
    elif backend == "triton":
        from .triton_kernel import paged_attention_triton

        paged_attention_triton(*arguments[:-1])
    else:
        _reference(*arguments)


_library.OPS.define(
    "paged_attention(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps, Tensor cos_sin, Tensor(a!) key_pages, "
    "Tensor(b!) value_pages, Tensor page_table, Tensor positions, Tensor row_map, Tensor active, Tensor(c!) out, "
    "Tensor(d!) partials, Tensor(e!) arrived, bool settled) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::paged_attention", _check, lib=_library.OPS)


def paged_attention(
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
    out: torch.Tensor,
    scratch: AttentionScratch,
    *,
    settled: bool = False,
) -> None:
    """`kv_append`, and the attention of each row's new token over itself and the tokens before it.

    Query head h reads key head h // G. Scores, softmax and the weighted sum accumulate in float32. Long rows are split
    along the keys and the parts are put together in order; the split depends on the row's length alone, so a row's
    result is bitwise the same whatever else is in the batch. Pages of other rows, places beyond the length and all of
    an inactive row's inputs may hold anything, NaN included.

    Args:
        qkv, q_norm, k_norm, eps, cos_sin, key_pages, value_pages, page_table, positions, row_map, active: as in
            `kv_append`. The new token is stored, and counts as key number positions[row_map[b]].
        out: [B, Hq*D], the dtype of `qkv`, written; 0 in inactive rows.
        scratch: for at least B rows.
        settled: whether `qkv` is the only input that a kernel writes that may still run: those ahead in the stream,
            back to the last one without dependent launch. Then CUDA C++ may read the others at once.

    Raises:
        ValueError: A shape, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work here, or the kernel lacks this D
            or page size. CUDA C++ takes bfloat16, D = 128, G up to 4 and pages of 16, 32, 64, ... tokens.

    Graph-safe: yes, on one stream per scratch.
    """
    pages = (key_pages, value_pages, page_table, positions, row_map, active)
    scratch_tensors = (scratch.partials, scratch.arrived)
    torch.ops.moss.paged_attention(qkv, q_norm, k_norm, eps, cos_sin, *pages, out, *scratch_tensors, settled)

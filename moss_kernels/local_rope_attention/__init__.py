"""`local_rope_attention`: one position of the local transformer's attention, over the positions of its own frame."""

import torch

from moss_kernels import _checks, _library

from .reference import (
    local_rope_attention_lookup_reference,
    local_rope_attention_reference,
    local_rope_tables,
    rotate_pairs,
)

__all__ = [
    "local_rope_attention",
    "local_rope_attention_lookup",
    "local_rope_attention_lookup_reference",
    "local_rope_attention_reference",
    "local_rope_tables",
    "rotate_pairs",
]

MAX_POSITIONS = 32
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128

_OP, _LOOKUP_OP = "local_rope_attention", "local_rope_attention_lookup"
_IMPLEMENTATIONS = ("cuda", "triton", "reference")


class _Checker:
    """Checks tensors of one call against the sizes and the dtype of its caches; all must be contiguous."""

    def __init__(self, op: str, k_cache: torch.Tensor, v_cache: torch.Tensor):
        self.op, self.k_cache, self.sizes = op, k_cache, {}
        _checks.require_dtype(op, "k_cache", k_cache, torch.float32, torch.bfloat16, torch.float16)
        self("k_cache", k_cache, "[B, P, heads, D]")
        self("v_cache", v_cache, "[B, P, heads, D]")
        positions, heads, head_dim = k_cache.shape[1:]
        if positions > MAX_POSITIONS:
            raise ValueError(f"`{op}`: `k_cache` must have at most {MAX_POSITIONS} positions, got {positions}")
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % 4:
            raise ValueError(
                f"`{op}`: `k_cache` must have a head_dim of {MIN_HEAD_DIM} .. {MAX_HEAD_DIM}, a multiple of 4, "
                f"got {head_dim}"
            )
        self.sizes |= {"heads*D": heads * head_dim, "3*heads*D": 3 * heads * head_dim, "D/2": head_dim // 2}
        self.sizes["P-1"] = positions - 1

    def __call__(self, name: str, tensor: torch.Tensor, layout: str, dtype: torch.dtype | None = None) -> None:
        _checks.require_shape(self.op, name, tensor, layout, self.sizes)
        _checks.require_dtype(self.op, name, tensor, dtype or self.k_cache.dtype)
        _checks.require_device(self.op, name, tensor, self.k_cache.device)
        if name != "codes":
            _checks.require_contiguous(self.op, name, tensor)

    def position(self, position: int, lowest: int) -> None:
        if not lowest <= position < self.k_cache.shape[1]:
            raise ValueError(
                f"`{self.op}`: `position` must be in {lowest} .. {self.k_cache.shape[1] - 1}, got {position}"
            )


def _check(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
) -> None:
    check = _Checker(_OP, k_cache, v_cache)
    check("qkv", qkv, "[B, 3*heads*D]")
    check.position(position, 0)
    check("cos", cos, "[P, D/2]")
    check("sin", sin, "[P, D/2]")
    check("out", out, "[B, heads*D]")


def _check_lookup(
    codes: torch.Tensor,
    table: torch.Tensor,
    audio_embeddings: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    out: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    check = _Checker(_LOOKUP_OP, k_cache, v_cache)
    check("codes", codes, "[B]", torch.int64)
    check("table", table, "[P-1, V, 3*heads*D]")
    check("audio_embeddings", audio_embeddings, "[Q, V, heads*D]")
    if audio_embeddings.shape[0] < table.shape[0]:
        raise ValueError(
            f"`{_LOOKUP_OP}`: `audio_embeddings` must have at least P-1 = {table.shape[0]} codebooks, "
            f"got {audio_embeddings.shape[0]}"
        )
    check.position(position, 1)
    check("out", out, "[B, heads*D]")
    check("residual", residual, "[B, heads*D]")


def _reference(*arguments: object) -> None:
    *inputs, out = arguments
    out.copy_(local_rope_attention_reference(*inputs))


def _lookup_reference(*arguments: object) -> None:
    *inputs, out, residual = arguments
    for output, value in zip((out, residual), local_rope_attention_lookup_reference(*inputs), strict=True):
        output.copy_(value)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    _reference(*arguments)


def _run_lookup_cpu(*arguments: object) -> None:
    _check_lookup(*arguments)
    _lookup_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    backend = _library.backend_for(_OP, _IMPLEMENTATIONS, arguments[0].device)
    if backend == "cuda":
        from .cuda_kernel import local_rope_attention_cuda as implementation
    elif backend == "triton":
        from .triton_kernel import local_rope_attention_triton as implementation
    else:
        implementation = _reference
    implementation(*arguments)


def _run_lookup_cuda(*arguments: object) -> None:
    _check_lookup(*arguments)
    backend = _library.backend_for(_LOOKUP_OP, _IMPLEMENTATIONS, arguments[0].device)
    if backend == "cuda":
        from .cuda_kernel import local_rope_attention_lookup_cuda as implementation
    elif backend == "triton":
        from .triton_kernel import local_rope_attention_lookup_triton as implementation
    else:
        implementation = _lookup_reference
    implementation(*arguments)


_library.OPS.define(
    "local_rope_attention(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, int position, Tensor cos, Tensor sin, "
    "Tensor(c!) out) -> ()"
)
_library.OPS.define(
    "local_rope_attention_lookup(Tensor codes, Tensor table, Tensor audio_embeddings, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, int position, Tensor(c!) out, Tensor(d!) residual) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
_library.OPS.impl(_LOOKUP_OP, _run_lookup_cpu, "CPU")
_library.OPS.impl(_LOOKUP_OP, _run_lookup_cuda, "CUDA")
torch.library.register_fake("moss::local_rope_attention", _check, lib=_library.OPS)
torch.library.register_fake("moss::local_rope_attention_lookup", _check_lookup, lib=_library.OPS)


def local_rope_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attention of one position of the local transformer over positions 0 .. `position` of its own frame.

    q and k are rotated (interleaved RoPE) and rounded to the dtype; scores, softmax and the weighted sum are float32;
    the output is rounded. A row's result does not depend on the batch. That of the official GPT-2 style block.

    Args:
        qkv: [B, 3*heads*D] float32, bfloat16 or float16. Output of `c_attn` at this position: all q, all k, all v.
        k_cache: [B, P, heads, D] same dtype. Rotated keys; `position` is written, later positions are never read.
        v_cache: [B, P, heads, D] same dtype. Values, likewise. P up to 32, D a multiple of 4 in 16 .. 128.
        position: 0 .. P-1.
        cos: [P, D/2] same dtype. From `local_rope_tables`, as `sin`.
        sin: [P, D/2] same dtype.
        out: [B, heads*D] same dtype, written.

    Raises:
        ValueError: A shape, range, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.local_rope_attention(qkv, k_cache, v_cache, position, cos, sin, out)


def local_rope_attention_lookup(
    codes: torch.Tensor,
    table: torch.Tensor,
    audio_embeddings: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    out: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """`local_rope_attention` with q, k and v looked up by the code that was drawn at the position before.

    The local transformer is one block, so q, k and v of position q+1 depend on (q, code) alone.

    Args:
        codes: [B] int64, any stride. Codes of codebook `position` - 1. A row whose code is outside 0 .. V-1 (a pad
            code) stores nothing, and its outputs are 0.
        table: [P-1, V, 3*heads*D] float32, bfloat16 or float16. q and k (both rotated for position q+1) and v of
            each code of codebook q; see `moss_kernels.local_frame_decode.qkv_table_reference`.
        audio_embeddings: [Q, V, heads*D] same dtype, Q >= P-1. Embeddings of the codes.
        k_cache: [B, P, heads, D] same dtype, as in `local_rope_attention`.
        v_cache: [B, P, heads, D] same dtype.
        position: 1 .. P-1.
        out: [B, heads*D] same dtype, written. Attention output before `c_proj`.
        residual: [B, heads*D] same dtype, written. The codes' embeddings: the input of the block.

    Raises:
        As `local_rope_attention`.

    Graph-safe: yes.
    """
    torch.ops.moss.local_rope_attention_lookup(
        codes, table, audio_embeddings, k_cache, v_cache, position, out, residual
    )

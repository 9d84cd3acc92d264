"""`embed_codes`: the backbone's input embedding of rows of one text id and Q codes."""

import torch

from moss_kernels import _checks, _library

from .reference import embed_codes_reference

__all__ = ["embed_codes", "embed_codes_reference"]

_OP = "embed_codes"


def _check(
    text_ids: torch.Tensor,
    codes: torch.Tensor,
    embed_tokens: torch.Tensor,
    audio_embeddings: torch.Tensor,
    pad_id: int,
    out: torch.Tensor,
) -> None:
    sizes: dict[str, int] = {}
    floats = (torch.float32, torch.bfloat16, torch.float16)

    def check(name: str, tensor: torch.Tensor, layout: str, *dtypes: torch.dtype) -> None:
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, *dtypes)
        _checks.require_device(_OP, name, tensor, text_ids.device)

    check("text_ids", text_ids, "[B]", torch.int64)
    check("codes", codes, "[B, Q]", torch.int64)
    _checks.require_contiguous_rows(_OP, "codes", codes)
    check("embed_tokens", embed_tokens, "[N, H]", *floats)
    check("audio_embeddings", audio_embeddings, "[Q, V, H]", embed_tokens.dtype)
    check("out", out, "[B, H]", embed_tokens.dtype)
    for name, tensor in (("embed_tokens", embed_tokens), ("audio_embeddings", audio_embeddings), ("out", out)):
        _checks.require_contiguous(_OP, name, tensor)


def _check_ids(name: str, ids: torch.Tensor, count: int, pad_id: int | None = None) -> None:
    wrong = (ids < 0) | (ids >= count)
    expected = f"0 .. {count - 1}"
    if pad_id is not None:
        wrong &= ids != pad_id
        expected += f" or the pad code {pad_id}"
    if wrong.any():
        raise ValueError(f"`{_OP}`: `{name}` must be in {expected}, got {ids[wrong][0].item()}")


def _run_cpu(
    text_ids: torch.Tensor,
    codes: torch.Tensor,
    embed_tokens: torch.Tensor,
    audio_embeddings: torch.Tensor,
    pad_id: int,
    out: torch.Tensor,
) -> None:
    _check(text_ids, codes, embed_tokens, audio_embeddings, pad_id, out)
    _check_ids("text_ids", text_ids, embed_tokens.shape[0])
    _check_ids("codes", codes, audio_embeddings.shape[1], pad_id)
    out.copy_(embed_codes_reference(text_ids, codes, embed_tokens, audio_embeddings, pad_id))


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    *inputs, out = arguments
    backend = _library.backend_for(_OP, ("cuda", "triton", "reference"), out.device)
    if backend == "cuda":
        from .cuda_kernel import embed_codes_cuda

        embed_codes_cuda(*inputs, out)
    elif backend == "triton":
        from .triton_kernel import embed_codes_triton

        embed_codes_triton(*inputs, out)
    else:
        out.copy_(embed_codes_reference(*inputs))


_library.OPS.define(
    "embed_codes(Tensor text_ids, Tensor codes, Tensor embed_tokens, Tensor audio_embeddings, int pad_id, "
    "Tensor(a!) out) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::embed_codes", _check, lib=_library.OPS)


def embed_codes(
    text_ids: torch.Tensor,
    codes: torch.Tensor,
    embed_tokens: torch.Tensor,
    audio_embeddings: torch.Tensor,
    pad_id: int,
    out: torch.Tensor,
) -> None:
    """Adds the embedding of a text id and those of Q codes: the next input of the backbone.

    The terms are added one after the other, text first, each sum rounded to the dtype, as the official code does; so
    the result is bitwise the same in every implementation.

    On the CPU ids are validated. On a GPU that is the caller's duty, since it would need a synchronisation: there an id
    that is outside its table is never looked up and adds nothing, as the pad code.

    Args:
        text_ids: [B] int64, any stride. 0 .. N-1.
        codes: [B, Q] int64, any row stride. 0 .. V-1, or `pad_id`, which adds nothing.
        embed_tokens: [N, H] float32, bfloat16 or float16. Text embeddings.
        audio_embeddings: [Q, V, H] same dtype. Embeddings of each codebook.
        pad_id: The pad code; usually V, so that the tables have no row for it.
        out: [B, H] same dtype, written.

    Raises:
        ValueError: A shape, layout or device is wrong, or (on the CPU) an id; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.embed_codes(text_ids, codes, embed_tokens, audio_embeddings, pad_id, out)

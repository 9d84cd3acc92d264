"""`sample_head`: the head's product and the draw of one code per batch row, without logits in between."""

import torch

from moss_kernels import _checks, _library
from moss_kernels.sample_codebook import check_draw

from . import cuda_kernel
from .reference import sample_head_reference

__all__ = ["WORKSPACE_BYTES", "sample_head", "sample_head_reference", "sample_head_workspace"]

# MOSS_SAMPLE_HEAD_WORKSPACE_BYTES of csrc/include/moss_kernels.h.
WORKSPACE_BYTES = 4_194_304

_OP = "sample_head"


def sample_head_workspace(device: torch.device | str) -> torch.Tensor:
    """[WORKSPACE_BYTES] uint8, as the first call of `sample_head` needs it and each leaves it."""
    return torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device=device)


def _check(hidden: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, *draw: object) -> None:
    sizes = {"WORKSPACE_BYTES": WORKSPACE_BYTES}
    for name, tensor, layout, dtype in (
        ("hidden", hidden, "[B, K]", torch.bfloat16),
        ("weight", weight, "[V, K]", torch.bfloat16),
        ("workspace", workspace, "[WORKSPACE_BYTES]", torch.uint8),
    ):
        _checks.require_shape(_OP, name, tensor, layout, sizes)
        _checks.require_dtype(_OP, name, tensor, dtype)
        _checks.require_device(_OP, name, tensor, hidden.device)
        (_checks.require_contiguous_rows if name == "hidden" else _checks.require_contiguous)(_OP, name, tensor)
    check_draw(_OP, sizes, hidden.device, *draw)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    sample_head_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    backends = ("cuda", "reference") if cuda_kernel.takes(*arguments[:2]) else ("reference",)
    backend = _library.backend_for(_OP, backends, arguments[0].device)
    implementation = cuda_kernel.sample_head_cuda if backend == "cuda" else sample_head_reference
    implementation(*arguments)


_library.OPS.define(
    "sample_head(Tensor hidden, Tensor weight, Tensor(a!) workspace, Tensor row_map, Tensor active, "
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor? repetition_penalty, Tensor seed, Tensor frame, "
    "Tensor(b!)? seen, int channel, int codebook, int pad_id, Tensor(c!) code, Tensor(d!) status, "
    "Tensor? random_words=None) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::sample_head", _check, lib=_library.OPS)


def sample_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    workspace: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    seed: torch.Tensor,
    frame: torch.Tensor,
    seen: torch.Tensor | None,
    channel: int,
    codebook: int,
    pad_id: int,
    code: torch.Tensor,
    status: torch.Tensor,
    random_words: torch.Tensor | None = None,
) -> None:
    """Draws as `sample_codebook` does from the logits `hidden @ weight.T`, rounded to bfloat16, in one launch.

    A logit's sum runs in float32, in an order that depends neither on the number of rows nor on the row's place among
    them. It is not the order of a matrix product elsewhere, so a logit may round to the neighbour of what that gives.

    Args:
        hidden: [B, K] bfloat16, rows contiguous, any row stride; the CUDA C++ kernel takes up to 128 rows of K = 2560,
            aligned to 16 bytes.
        weight: [V, K] bfloat16; for the CUDA C++ kernel V = 1024. It is read ahead of the end of earlier kernels in the
            stream, so none of them may still write it.
        workspace: of `sample_head_workspace`; belongs to one stream or graph at a time.
        row_map: [B] int32. This and all that follow: see `sample_codebook`.
        active: [B] bool.
        temperature: [S+1] float32.
        top_k: [S+1] int32.
        top_p: [S+1] float32.
        repetition_penalty: [S+1] float32, or None.
        seed: [S+1] int64.
        frame: [S+1] int32.
        seen: [S+1, Q, ceil(V/32)] int32, read and written, or None.
        channel: Random channel.
        codebook: Codebook of `seen`.
        pad_id: Code of inactive rows.
        code: [B] int64, any stride, written.
        status: [B] int32, written for active rows.
        random_words: [B] int64, or None.

    Raises:
        ValueError: A shape, range, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device, or for these sizes.

    Graph-safe: yes.
    """
    torch.ops.moss.sample_head(
        hidden,
        weight,
        workspace,
        row_map,
        active,
        temperature,
        top_k,
        top_p,
        repetition_penalty,
        seed,
        frame,
        seen,
        channel,
        codebook,
        pad_id,
        code,
        status,
        random_words,
    )

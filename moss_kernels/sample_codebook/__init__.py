"""`sample_codebook`: draws one code per batch row, with the parameters, history and random numbers of its request."""

import torch

from moss_kernels import _checks, _library

from .params import SamplingParams
from .reference import EMPTY, NONFINITE, sample_codebook_reference
from .state import SamplingState

__all__ = ["EMPTY", "NONFINITE", "SamplingParams", "SamplingState", "sample_codebook", "sample_codebook_reference"]

MIN_VOCAB, MAX_VOCAB = 2, 4096

_OP = "sample_codebook"


def check_draw(
    op: str,
    sizes: dict[str, int],
    device: torch.device,
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
    """Checks all arguments of a draw but its logits, whose B and V are in `sizes`."""

    def check(name: str, tensor: torch.Tensor, layout: str, dtype: torch.dtype) -> None:
        _checks.require_shape(op, name, tensor, layout, sizes)
        _checks.require_dtype(op, name, tensor, dtype)
        _checks.require_device(op, name, tensor, device)
        if name != "code":
            _checks.require_contiguous(op, name, tensor)

    check("row_map", row_map, "[B]", torch.int32)
    check("active", active, "[B]", torch.bool)
    check("temperature", temperature, "[S+1]", torch.float32)
    check("top_k", top_k, "[S+1]", torch.int32)
    check("top_p", top_p, "[S+1]", torch.float32)
    if repetition_penalty is not None:
        check("repetition_penalty", repetition_penalty, "[S+1]", torch.float32)
    check("seed", seed, "[S+1]", torch.int64)
    check("frame", frame, "[S+1]", torch.int32)
    if seen is not None:
        sizes["ceil(V/32)"] = (sizes["V"] + 31) // 32
        check("seen", seen, "[S+1, Q, ceil(V/32)]", torch.int32)
        if not 0 <= codebook < seen.shape[1]:
            raise ValueError(f"`{op}`: `codebook` must be in 0 .. {seen.shape[1] - 1}, got {codebook}")
    if not 0 <= channel < 2**31:
        raise ValueError(f"`{op}`: `channel` must be in 0 .. 2^31-1, got {channel}")
    check("code", code, "[B]", torch.int64)
    check("status", status, "[B]", torch.int32)
    if random_words is not None:
        check("random_words", random_words, "[B]", torch.int64)


def _check(logits: torch.Tensor, *draw: object) -> None:
    sizes: dict[str, int] = {}
    _checks.require_shape(_OP, "logits", logits, "[B, V]", sizes)
    _checks.require_dtype(_OP, "logits", logits, torch.float32, torch.bfloat16, torch.float16)
    _checks.require_contiguous_rows(_OP, "logits", logits)
    vocab = logits.shape[1]
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise ValueError(f"`{_OP}`: `logits` must have {MIN_VOCAB} .. {MAX_VOCAB} columns, got {vocab}")
    check_draw(_OP, sizes, logits.device, *draw)


def _run_cpu(*arguments: object) -> None:
    _check(*arguments)
    sample_codebook_reference(*arguments)


def _run_cuda(*arguments: object) -> None:
    _check(*arguments)
    backend = _library.backend_for(_OP, ("cuda", "triton", "reference"), arguments[0].device)
    if backend == "cuda":
        from .cuda_kernel import sample_codebook_cuda as implementation
    elif backend == "triton":
        from .triton_kernel import sample_codebook_triton as implementation
    else:
        implementation = sample_codebook_reference
    implementation(*arguments)


_library.OPS.define(
    "sample_codebook(Tensor logits, Tensor row_map, Tensor active, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor? repetition_penalty, Tensor seed, Tensor frame, Tensor(a!)? seen, int channel, int codebook, int pad_id, "
    "Tensor(b!) code, Tensor(c!) status, Tensor? random_words=None) -> ()"
)
_library.OPS.impl(_OP, _run_cpu, "CPU")
_library.OPS.impl(_OP, _run_cuda, "CUDA")
torch.library.register_fake("moss::sample_codebook", _check, lib=_library.OPS)


def sample_codebook(
    logits: torch.Tensor,
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
    """Draws one code per batch row and notes it in the request's history.

    Each batch row reads the parameters of pool row `row_map[b]`; greedy, seeded, penalised and plain rows may be mixed.
    The draw uses one Philox4x32-10 word, a function of (seed, frame, channel) alone. All steps are exact or single
    IEEE float32 operations, so the code is bitwise the same in every implementation and on every device:

    1. Scores s: logits as float32; a seen code's s becomes s * r if s < 0, else s / r (r the repetition penalty).
    2. NaN and -inf are no candidates. If +inf is present only the +inf codes are, equal among themselves. Infinities
       are looked for here, after the penalty and before the temperature.
    3. Greedy rows take the highest s, the lowest id among equals (-0.0 equals +0.0).
    4. z = s / temperature. z may overflow: u = z - z_max is 0 where z equals z_max, and a z of -inf weighs 0 otherwise.
    5. top_k keeps every candidate that reaches the k-th highest z.
    6. Weights are integers, 2^30 * 2^(u * log2 e) rounded half to even, 0 where floor(u * log2 e) < -32.
    7. top_p keeps, in the order (z descending, id ascending), a code while the weight before it is
       <= (round_half_even(top_p * 2^32) * total) >> 32.
    8. The code is the first by ascending id among the kept whose inclusive sum exceeds (word * kept total) >> 32.

    A temperature not >= 1e-5 means greedy, a penalty not > 0 means 1, a top_p outside (0, 1) and a top_k <= 0 or >= V
    mean off. The distribution is that of the released sampler (penalty, temperature, top_k, top_p).

    Args:
        logits: [B, V] float32, bfloat16 or float16, rows contiguous, any row stride. V in 2 .. 4096.
        row_map: [B] int32. Pool row of each batch row, 0 .. S; active rows name distinct rows.
        active: [B] bool. An inactive row gets `pad_id`; nothing else of it is written.
        temperature: [S+1] float32.
        top_k: [S+1] int32.
        top_p: [S+1] float32.
        repetition_penalty: [S+1] float32, or None for no penalty.
        seed: [S+1] int64. 0 .. 2^63-1.
        frame: [S+1] int32. Frame being generated; not advanced here.
        seen: [S+1, Q, ceil(V/32)] int32, read and written: bit v & 31 of word v >> 5 of code v. None for no history.
        channel: Random channel: 0 for the stop head, q+1 for codebook q.
        codebook: Codebook of `seen`, 0 .. Q-1.
        pad_id: Code of inactive rows.
        code: [B] int64, any stride, written.
        status: [B] int32, written for active rows: NONFINITE (1) if a NaN or +inf came, plus EMPTY (2) if there was no
            candidate; the code is then 0 and `seen` stays.
        random_words: [B] int64 in 0 .. 2^32-1. Used in place of the Philox words (for tests).

    Raises:
        ValueError: A shape, range, layout or device is wrong; the message names the argument.
        TypeError: A dtype is wrong.
        NotImplementedError: MOSS_BACKEND names an implementation that does not work on this device.

    Graph-safe: yes.
    """
    torch.ops.moss.sample_codebook(
        logits,
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

"""What kernels are compared with: the same work in torch operators, and in the Triton style that servers use."""

import torch
import triton
import triton.language as tl

TRITON_BASELINE_TOP_K = 32


def sample_torch_ops(
    logits: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    seed: torch.Tensor,
    frame: torch.Tensor,
    seen: torch.Tensor,
    channel: int,
    codebook: int,
    pad_id: int,
    code: torch.Tensor,
    status: torch.Tensor,
    random_words: torch.Tensor | None = None,
) -> None:
    """A sampler of torch operators with the arguments of `sample_codebook`.

    The history is `seen` [S+1, Q, V] bool, seeds and frames are not read (the generator is torch's), rows are active
    and finite: less than `sample_codebook` promises.
    """
    rows = row_map.long()
    scores = logits.float()
    penalty = repetition_penalty[rows, None]
    scores = torch.where(seen[rows, codebook], torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    ordered, order = (scores / temperature[rows, None]).sort(dim=1, descending=True)
    vocab = logits.shape[1]
    k = top_k[rows, None].long()
    threshold = ordered.gather(1, torch.where(k > 0, k - 1, vocab - 1).clamp(max=vocab - 1))
    ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    probs = ordered.softmax(1)
    probs = probs.masked_fill(probs.cumsum(1) - probs > top_p[rows, None], 0.0)
    drawn = order.gather(1, probs.multinomial(1))[:, 0]
    # A Python scalar would be copied from the host, which a capture forbids.
    seen[rows, codebook, drawn] = torch.ones_like(drawn, dtype=torch.bool)
    code.copy_(drawn)


@triton.jit
def _sample_top32_kernel(
    logits_ptr,
    row_map_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    repetition_penalty_ptr,
    seed_ptr,
    frame_ptr,
    seen_ptr,
    code_ptr,
    logits_stride,
    seen_row_stride,
    seen_offset,
    code_stride,
    channel,
    VOCAB: tl.constexpr,
    TOP_K: tl.constexpr,
):
    batch_row = tl.program_id(0).to(tl.int64)
    row = tl.load(row_map_ptr + batch_row).to(tl.int64)
    ids = tl.arange(0, VOCAB)
    scores = tl.load(logits_ptr + batch_row * logits_stride + ids).to(tl.float32)
    seen_row_ptr = seen_ptr + row * seen_row_stride + seen_offset
    words = tl.load(seen_row_ptr + (ids >> 5))
    penalty = tl.load(repetition_penalty_ptr + row)
    penalised = tl.where(scores < 0, scores * penalty, scores / penalty)
    scores = tl.where(((words >> (ids & 31)) & 1) == 1, penalised, scores) / tl.load(temperature_ptr + row)

    # Order and id in one integer, so that one selection finds both.
    bits = scores.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    best = tl.topk((key << 32) | (VOCAB - 1 - ids).to(tl.int64), TOP_K)
    best_key = (best >> 32).to(tl.int32)
    best_scores = (best_key ^ ((best_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    rank = tl.arange(0, TOP_K)
    weights = tl.where(rank < tl.load(top_k_ptr + row), tl.exp(best_scores - tl.max(best_scores, 0)), 0.0)
    before = tl.cumsum(weights, 0) - weights
    weights = tl.where(before <= tl.load(top_p_ptr + row) * tl.sum(weights, 0), weights, 0.0)

    target = tl.rand(tl.load(seed_ptr + row), tl.load(frame_ptr + row) * 64 + channel) * tl.sum(weights, 0)
    chosen = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    code = VOCAB - 1 - tl.sum(tl.where(rank == chosen, best & 0xFFFFFFFF, 0), 0).to(tl.int32)
    tl.store(code_ptr + batch_row * code_stride, code.to(tl.int64))
    word_ptr = seen_row_ptr + (code >> 5)
    tl.store(word_ptr, tl.load(word_ptr) | (tl.full((), 1, tl.int32) << (code & 31)))


def sample_triton_baseline(
    logits: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    seed: torch.Tensor,
    frame: torch.Tensor,
    seen: torch.Tensor,
    channel: int,
    codebook: int,
    pad_id: int,
    code: torch.Tensor,
    status: torch.Tensor,
    random_words: torch.Tensor | None = None,
) -> None:
    """A fused sampler over the 32 highest codes with the arguments of `sample_codebook`.

    It needs 1 <= top_k <= 32 in every row and a power-of-two V, draws with a float cumulative sum, and takes rows for
    active, finite and not greedy: less than `sample_codebook` promises.
    """
    _sample_top32_kernel[(logits.shape[0],)](
        logits,
        row_map,
        temperature,
        top_k,
        top_p,
        repetition_penalty,
        seed,
        frame,
        seen,
        code,
        logits.stride(0),
        seen.stride(0),
        seen.stride(1) * codebook,
        code.stride(0),
        channel,
        VOCAB=logits.shape[1],
        TOP_K=TRITON_BASELINE_TOP_K,
        num_warps=4,
    )

"""Plain PyTorch meaning of `local_frame_decode`: the official local transformer, step by step."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moss_kernels.embed_codes import embed_codes_reference
from moss_kernels.local_rope_attention import local_rope_attention_reference, local_rope_tables, rotate_pairs
from moss_kernels.sample_codebook import SamplingState, sample_codebook

CONTINUE, STOP = 0, 1  # rows of the stop head


@dataclasses.dataclass(frozen=True)
class LocalFrameWeights:
    """Everything a frame reads besides its input and the sampling state. All tensors share one floating point dtype.

    Attributes:
        ln_1_weight: [H]. LayerNorm before attention; likewise ln_1_bias, ln_2 (before the MLP) and ln_f (after all).
        c_attn_weight: [3*H, H]. Rows of q, k, v in this order; c_attn_bias [3*H].
        c_proj_weight: [H, H]. Attention output; c_proj_bias [H].
        fc_in_weight: [F, H]. fc_in_bias [F].
        fc_out_weight: [H, F]. fc_out_bias [H].
        stop_head: [2, H]. Row 0 continues, row 1 stops.
        audio_embeddings: [Q, V, H] or Q tensors [V, H]. Code embeddings, and (tied) the heads of the codebooks.
        embed_tokens: [vocab, H]. Text embeddings of the backbone.
        n_head: attention heads.
        rope_base: base of the RoPE frequencies.
        layer_norm_epsilon: of the three LayerNorms.
        pad_token_id: text id of a row that generates nothing.
        audio_pad_token_id: the pad code, outside 0..V-1.
        audio_assistant_slot_token_id: text id of a generated row.
    """

    ln_1_weight: Tensor
    ln_1_bias: Tensor
    c_attn_weight: Tensor
    c_attn_bias: Tensor
    c_proj_weight: Tensor
    c_proj_bias: Tensor
    ln_2_weight: Tensor
    ln_2_bias: Tensor
    fc_in_weight: Tensor
    fc_in_bias: Tensor
    fc_out_weight: Tensor
    fc_out_bias: Tensor
    ln_f_weight: Tensor
    ln_f_bias: Tensor
    stop_head: Tensor
    audio_embeddings: Tensor | Sequence[Tensor]
    embed_tokens: Tensor
    n_head: int
    rope_base: float
    layer_norm_epsilon: float
    pad_token_id: int
    audio_pad_token_id: int
    audio_assistant_slot_token_id: int

    def to(self, dtype: torch.dtype) -> "LocalFrameWeights":
        """The same weights in another dtype; in fp64 they are the yardstick for rounding errors."""
        changes = {
            field.name: getattr(self, field.name).to(dtype)
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        changes["audio_embeddings"] = tuple(table.to(dtype) for table in self.audio_embeddings)
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class LocalFrame:
    """One frame of B rows: its outputs, and what they were computed from.

    Attributes:
        codes: [B, Q] i64. Drawn codes; pad codes in a row that stops or is inactive.
        continues: [B] bool. The row is active and drew "continue": its codes are a frame of audio.
        feedback: [B, H]. Input embedding of the next backbone step; that of a pad row in a row that does not continue.
        status: [B] i32. Status bits of all draws of the row, or-ed; 0 in an inactive row.
        stop_logits: [B, 2]. This and all below hold arbitrary values in rows that do not continue.
        audio_logits: [B, Q, V].
        hidden: [B, Q, H]. Output of ln_f at each position.
        k_cache: [B, Q, heads, D]. Rotated keys.
        v_cache: [B, Q, heads, D].
    """

    codes: Tensor
    continues: Tensor
    feedback: Tensor
    status: Tensor
    stop_logits: Tensor
    audio_logits: Tensor
    hidden: Tensor
    k_cache: Tensor
    v_cache: Tensor


def local_frame_decode_reference(
    hidden: Tensor,
    weights: LocalFrameWeights,
    state: SamplingState | None,
    row_map: Tensor | None,
    active: Tensor,
    *,
    teacher_codes: Tensor | None = None,
) -> LocalFrame:
    """Draw the stop decision, then the Q codes of one frame, one position of the local transformer after the other.

    In bf16 and fp16 the result of each linear (after its bias), LayerNorm, SiLU, rotation, attention and residual sum
    is rounded to the dtype, as eager PyTorch rounds the official code; sums and the softmax are fp32.

    Args:
        hidden: [B, H] dtype of the weights. Last hidden state of the backbone, after its final norm.
        weights: the local transformer, its heads and the embedding tables.
        state: parameters and history of the requests. Of a row that continues the `seen` bits are set and `frame` is
            advanced; a row that stops or is inactive keeps every bit. Not used with `teacher_codes`.
        row_map: [B] i32. Row of `state` for each row of the batch. Not used with `teacher_codes`.
        active: [B] bool. Rows to decode.
        teacher_codes: [B, Q] i64. Given, these codes are fed instead of drawn ones, every active row continues and no
            state is read or written.

    Returns:
        The frame; nothing of it is shared with the state.

    Graph-safe: no (allocates).
    """
    batch, width = hidden.shape
    codebooks = len(weights.audio_embeddings)
    cache_shape = (batch, codebooks, weights.n_head, width // weights.n_head)
    # NaN shows a read of a position that this frame has not written.
    k_cache, v_cache = hidden.new_full(cache_shape, torch.nan), hidden.new_full(cache_shape, torch.nan)
    codes = torch.full((batch, codebooks), weights.audio_pad_token_id, dtype=torch.int64, device=hidden.device)
    status = torch.zeros(batch, dtype=torch.int32, device=hidden.device)
    cos, sin = _rope_tables(weights)
    outputs, audio_logits = [], []

    output = _position(hidden, 0, weights, k_cache, v_cache, cos, sin)
    stop_logits = F.linear(output, weights.stop_head)
    continues = active
    if teacher_codes is None:
        continues = active & (_draw(stop_logits, state, row_map, active, 0, STOP, status) == CONTINUE)
    for q in range(codebooks):
        if q > 0:
            x = weights.audio_embeddings[q - 1][codes[:, q - 1].masked_fill(~continues, 0)]
            output = _position(x, q, weights, k_cache, v_cache, cos, sin)
        logits = F.linear(output, weights.audio_embeddings[q])
        if teacher_codes is None:
            codes[:, q] = _draw(logits, state, row_map, continues, q + 1, weights.audio_pad_token_id, status)
        else:
            codes[:, q] = torch.where(active, teacher_codes[:, q], weights.audio_pad_token_id)
        outputs.append(output)
        audio_logits.append(logits)

    if teacher_codes is None:
        # Adding 0 leaves a row as it is, so rows of the batch may share a row of the state if they are inactive.
        state.frame.index_add_(0, row_map.long(), continues.to(state.frame.dtype))
    text_ids = torch.where(continues, weights.audio_assistant_slot_token_id, weights.pad_token_id)
    feedback = embed_codes_reference(
        text_ids, codes, weights.embed_tokens, weights.audio_embeddings, weights.audio_pad_token_id
    )
    return LocalFrame(
        codes=codes,
        continues=continues,
        feedback=feedback,
        status=status,
        stop_logits=stop_logits,
        audio_logits=torch.stack(audio_logits, 1),
        hidden=torch.stack(outputs, 1),
        k_cache=k_cache,
        v_cache=v_cache,
    )


def qkv_table_reference(weights: LocalFrameWeights) -> Tensor:
    """q and k (both rotated) and v of every code: with one block, position q+1 depends on (q, code) alone.

    Returns:
        [Q-1, V, 3*H] dtype of the weights. Entry [q, code] is what position q+1 computes when codebook q drew `code`.
    """
    cos, sin = _rope_tables(weights)
    tables = []
    for q, embeddings in enumerate(weights.audio_embeddings[:-1]):
        qkv = _qkv(embeddings, weights).unflatten(-1, (3, weights.n_head, -1))
        tables.append(torch.cat((rotate_pairs(qkv[:, :2], cos[q + 1], sin[q + 1]), qkv[:, 2:]), 1).flatten(1))
    return torch.stack(tables)


def _rope_tables(weights: LocalFrameWeights) -> tuple[Tensor, Tensor]:
    like, positions = weights.c_proj_weight, len(weights.audio_embeddings)
    head_dim = like.shape[0] // weights.n_head
    return local_rope_tables(positions, head_dim, weights.rope_base, dtype=like.dtype, device=like.device)


def _qkv(x: Tensor, weights: LocalFrameWeights) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weights.ln_1_weight, weights.ln_1_bias, weights.layer_norm_epsilon)
    return F.linear(normed, weights.c_attn_weight, weights.c_attn_bias)


def _position(
    x: Tensor, position: int, weights: LocalFrameWeights, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The block and ln_f at one position: x [B, H] -> [B, H]; writes its keys and values into the caches."""
    attention = local_rope_attention_reference(_qkv(x, weights), k_cache, v_cache, position, cos, sin)
    return _after_attention(x, attention, weights)


def _after_attention(x: Tensor, attention: Tensor, weights: LocalFrameWeights) -> Tensor:
    epsilon = weights.layer_norm_epsilon
    x = x + F.linear(attention, weights.c_proj_weight, weights.c_proj_bias)
    normed = F.layer_norm(x, x.shape[-1:], weights.ln_2_weight, weights.ln_2_bias, epsilon)
    inner = F.silu(F.linear(normed, weights.fc_in_weight, weights.fc_in_bias))
    x = x + F.linear(inner, weights.fc_out_weight, weights.fc_out_bias)
    return F.layer_norm(x, x.shape[-1:], weights.ln_f_weight, weights.ln_f_bias, epsilon)


def _draw(
    logits: Tensor, state: SamplingState, row_map: Tensor, active: Tensor, channel: int, pad_id: int, status: Tensor
) -> Tensor:
    """Draw [B] i64 in a channel (0: stop head, q+1: codebook q) and add its status bits to `status`."""
    if channel == 0:
        parameters = (state.text_temperature, state.text_top_k, state.text_top_p, None)
    else:
        parameters = (state.temperature, state.top_k, state.top_p, state.repetition_penalty)
    code = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    bits = torch.zeros_like(status)
    sample_codebook(
        logits.float(),
        row_map,
        active,
        *parameters,
        state.seed,
        state.frame,
        state.seen if channel else None,
        channel,
        max(channel - 1, 0),
        pad_id,
        code,
        bits,
    )
    status |= bits
    return code

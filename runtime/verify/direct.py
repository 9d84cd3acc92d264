"""Calls of the ops that no path of the runtime on this device takes, in the sizes of a checkpoint."""

import torch
from torch import Tensor

from moss_kernels import SamplingParams, SamplingState, sample_head_workspace
from moss_kernels.local_frame_decode import local_frame_decode_reference
from moss_kernels.local_frame_decode.reference import LocalFrameWeights, qkv_table_reference
from moss_kernels.local_rope_attention.reference import local_rope_tables
from moss_kernels.testing.ring import RingInputs
from moss_runtime.model.codec import Codec
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.model.tts import MossTTS

_ROWS = 3


def call_the_rest(model: MossTTS, codec: Codec, prompt: Tensor) -> None:
    """Call them once each, or once for each position or stage."""
    weights = model.frame_weights()
    _embed(weights, prompt.to(model.device))
    _attend(weights)
    _draw(model, weights)
    _draw_from_head(model, weights)
    _write_rings(codec)


def _embed(weights: LocalFrameWeights, prompt: Tensor) -> None:
    tables = torch.stack(tuple(weights.audio_embeddings))
    out = tables.new_empty(len(prompt), tables.shape[2])
    ids, codes = prompt[:, 0].contiguous(), prompt[:, 1:].contiguous()
    torch.ops.moss.embed_codes(ids, codes, weights.embed_tokens, tables, weights.audio_pad_token_id, out)


def _attend(weights: LocalFrameWeights) -> None:
    """Both ops of the local transformer's attention, at each position of a frame."""
    tables = torch.stack(tuple(weights.audio_embeddings))
    books, vocab, hidden = tables.shape
    like = {"dtype": tables.dtype, "device": tables.device}
    generator = torch.Generator().manual_seed(0)
    head_dim = hidden // weights.n_head
    cos, sin = local_rope_tables(books, head_dim, weights.rope_base, **like)
    table = qkv_table_reference(weights)
    keys, values, looked_up_keys, looked_up_values = torch.zeros(4, _ROWS, books, weights.n_head, head_dim, **like)
    out, residual = torch.empty(2, _ROWS, hidden, **like)
    for position in range(books):
        qkv = torch.randn(_ROWS, 3 * hidden, generator=generator).to(**like)
        torch.ops.moss.local_rope_attention(qkv, keys, values, position, cos, sin, out)
        if position:
            # The last row has no code, as one that has stopped.
            codes = torch.randint(vocab, (_ROWS,), generator=generator)
            codes[-1] = weights.audio_pad_token_id
            codes, caches = codes.to(tables.device), (looked_up_keys, looked_up_values)
            torch.ops.moss.local_rope_attention_lookup(codes, table, tables, *caches, position, out, residual)


def _draw(model: MossTTS, weights: LocalFrameWeights) -> None:
    """A frame of the eager local transformer, whose draws are ops; a kernel that decodes a frame makes its own."""
    like = weights.stop_head
    hidden = torch.randn(_ROWS, like.shape[1], generator=torch.Generator().manual_seed(1)).to(like)
    row_map = torch.arange(_ROWS, dtype=torch.int32, device=model.device)
    local_frame_decode_reference(hidden, weights, _sampling_state(model), row_map, row_map >= 0)


def _sampling_state(model: MossTTS) -> SamplingState:
    config = model.config
    state = SamplingState.allocate(
        rows=_ROWS, codebooks=config.n_vq, vocab=config.audio_vocab_size, device=model.device
    )
    for row in range(_ROWS):
        state.set_row(row, SamplingParams(temperature=row, repetition_penalty=1.2), seed=row)
    return state


def _draw_from_head(model: MossTTS, weights: LocalFrameWeights) -> None:
    """Of small multiples of 1/4: sums are exact in any order, so that all implementations have the same logits."""
    generator = torch.Generator().manual_seed(2)

    def quarters(rows: int) -> Tensor:
        values = torch.randint(-2, 3, (rows, weights.stop_head.shape[1]), generator=generator) / 4
        return values.to(model.device, torch.bfloat16)

    state = _sampling_state(model)
    row_map = torch.arange(_ROWS, dtype=torch.int32, device=model.device)
    parameters = state.temperature, state.top_k, state.top_p, state.repetition_penalty, state.seed, state.frame
    codes = torch.zeros(_ROWS, dtype=torch.int64, device=model.device)
    operands = quarters(_ROWS), quarters(model.config.audio_vocab_size), sample_head_workspace(model.device)
    scalars = 1, 0, weights.audio_pad_token_id
    outputs = codes, torch.zeros_like(row_map)
    torch.ops.moss.sample_head(*operands, row_map, row_map >= 0, *parameters, state.seen, *scalars, *outputs)


def _write_rings(codec: Codec) -> None:
    """A chunk that goes round the end of each stage's ring, a short one, and an empty one."""
    for stage in codec.config.decoder:
        if isinstance(stage, TransformerConfig):
            inputs = RingInputs.make(
                [(0, 3, stage.context - 2), (2, 1, 5), (1, 0, 0)],
                slots=3,
                tokens=3,
                heads=stage.heads,
                head_dim=stage.d_model // stage.heads,
                capacity=stage.context,
                window=stage.context,
                dtype=codec.dtype,
            ).to(codec.device)
            inputs.attend(torch.ops.moss.ring_attention)
            torch.ops.moss.ring_kv_write(*inputs.step)

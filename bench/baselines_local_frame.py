"""What the persistent frame kernel is compared with: the same frame as a graph of torch operators and small kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moss_kernels import embed_codes, local_rope_attention, local_rope_attention_lookup, sample_codebook
from moss_kernels.local_frame_decode import LocalFrameWeights, qkv_table_reference
from moss_kernels.local_rope_attention import local_rope_tables
from moss_kernels.sample_codebook import SamplingState


class TorchGraphFrame:
    """A frame of cuBLAS linears, torch LayerNorms and this project's small ops: made to be captured in a graph.

    q, k and v of positions 1.. are looked up, attention and sampling are one kernel each. All rows are active.

    Attributes:
        hidden: [B, H]. Last hidden state of the backbone, as given.
        codes: [B, Q] int64, written by `run`.
        continues: [B] bool, written.
        feedback: [B, H], written.
    """

    def __init__(self, weights: LocalFrameWeights, hidden: Tensor, state: SamplingState, row_map: Tensor) -> None:
        self._weights, self.hidden, self._state, self._row_map = weights, hidden, state, row_map
        codebooks, vocab, width = weights.audio_embeddings.shape
        batch, like = len(hidden), {"dtype": hidden.dtype, "device": hidden.device}
        head_dim = width // weights.n_head
        self._table = qkv_table_reference(weights)
        self._rope = local_rope_tables(codebooks, head_dim, weights.rope_base, **like)
        self._caches = torch.full((2, batch, codebooks, weights.n_head, head_dim), torch.nan, **like)
        self._attention, self._residual, self.feedback = torch.empty(3, batch, width, **like)
        self._active = torch.ones(batch, dtype=torch.bool, device=hidden.device)
        self._status = torch.zeros(1 + codebooks, batch, dtype=torch.int32, device=hidden.device)
        self._stop = torch.zeros(batch, dtype=torch.int64, device=hidden.device)
        self._pool_rows = row_map.long()
        self.codes = torch.full((batch, codebooks), vocab, dtype=torch.int64, device=hidden.device)
        self.continues = torch.zeros_like(self._active)

    def run_for_logits(self) -> Tensor:
        """One frame, and its logits [B, Q, V]."""
        return torch.stack(self._run(), 1)

    def run(self) -> None:
        """One frame."""
        self._run()

    def _run(self) -> list[Tensor]:
        weights, codes = self._weights, self.codes
        audio_logits = []
        output = self._first_position()
        self._draw(F.linear(output, weights.stop_head), 0, self._active, self._stop)
        torch.eq(self._stop, 0, out=self.continues)
        for q in range(codes.shape[1]):
            if q > 0:
                tables = (self._table, weights.audio_embeddings)
                outputs = (self._attention, self._residual)
                local_rope_attention_lookup(codes[:, q - 1], *tables, *self._caches, q, *outputs)
                output = self._after_attention(self._residual)
            audio_logits.append(F.linear(output, weights.audio_embeddings[q]))
            self._draw(audio_logits[q], q + 1, self.continues, codes[:, q])
        self._state.frame.index_add_(0, self._pool_rows, self.continues.int())
        text_ids = torch.where(self.continues, weights.audio_assistant_slot_token_id, weights.pad_token_id)
        tables = (weights.embed_tokens, weights.audio_embeddings)
        embed_codes(text_ids, codes, *tables, weights.audio_pad_token_id, self.feedback)
        return audio_logits

    def _first_position(self) -> Tensor:
        weights, x = self._weights, self.hidden
        qkv = F.linear(self._norm(x, "ln_1"), weights.c_attn_weight, weights.c_attn_bias)
        local_rope_attention(qkv, *self._caches, 0, *self._rope, self._attention)
        return self._after_attention(x)

    def _after_attention(self, x: Tensor) -> Tensor:
        weights = self._weights
        x = x + F.linear(self._attention, weights.c_proj_weight, weights.c_proj_bias)
        inner = F.silu(F.linear(self._norm(x, "ln_2"), weights.fc_in_weight, weights.fc_in_bias), inplace=True)
        return self._norm(x + F.linear(inner, weights.fc_out_weight, weights.fc_out_bias), "ln_f")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = getattr(self._weights, f"{name}_weight"), getattr(self._weights, f"{name}_bias")
        return F.layer_norm(x, x.shape[-1:], weight, bias, self._weights.layer_norm_epsilon)

    def _draw(self, logits: Tensor, channel: int, active: Tensor, code: Tensor) -> None:
        state = self._state
        if channel == 0:
            parameters, seen = (state.text_temperature, state.text_top_k, state.text_top_p, None), None
        else:
            parameters, seen = (state.temperature, state.top_k, state.top_p, state.repetition_penalty), state.seen
        scalars = (channel, max(channel - 1, 0), self._weights.audio_pad_token_id)
        history = (state.seed, state.frame, seen)
        sample_codebook(logits, self._row_map, active, *parameters, *history, *scalars, code, self._status[channel])

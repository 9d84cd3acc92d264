"""Inputs and outputs of a frame of the local transformer, shared by tests and benchmarks."""

import dataclasses

import torch

from moss_kernels.local_frame_decode import LocalFrameWeights
from moss_kernels.sample_codebook import SamplingParams, SamplingState


@dataclasses.dataclass
class LocalFrameOutputs:
    """Tensors that `LocalFrameDecoder.decode` writes, filled with what no frame holds.

    Attributes:
        codes: [B, Q] int64.
        continues: [B] bool.
        feedback: [B, H] dtype of the weights.
        status: [B] int32.
        stop_logits: [B, 2] float32.
        audio_logits: [B, Q, V] float32.
        hidden_out: [B, Q, H] dtype of the weights.
    """

    codes: torch.Tensor
    continues: torch.Tensor
    feedback: torch.Tensor
    status: torch.Tensor
    stop_logits: torch.Tensor
    audio_logits: torch.Tensor
    hidden_out: torch.Tensor

    @classmethod
    def allocate(cls, weights: LocalFrameWeights, batch: int) -> "LocalFrameOutputs":
        """Outputs of a batch; unwritten floats are NaN, codes -7, flags True, status words 64."""
        tables = weights.audio_embeddings
        codebooks, (vocab, hidden) = len(tables), tables[0].shape
        device, dtype = tables[0].device, tables[0].dtype

        def full(*shape: int, value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((batch, *shape), value, dtype=dtype, device=device)

        return cls(
            codes=full(codebooks, value=-7, dtype=torch.int64),
            continues=full(value=True, dtype=torch.bool),
            feedback=full(hidden, value=torch.nan, dtype=dtype),
            status=full(value=64, dtype=torch.int32),
            stop_logits=full(2, value=torch.nan, dtype=torch.float32),
            audio_logits=full(codebooks, vocab, value=torch.nan, dtype=torch.float32),
            hidden_out=full(codebooks, hidden, value=torch.nan, dtype=dtype),
        )

    def arguments(self) -> dict[str, torch.Tensor]:
        """The outputs as keyword arguments of `decode`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def frame_state(
    weights: LocalFrameWeights, rows: int, params: SamplingParams | None = None, *, seed: int = 1000
) -> SamplingState:
    """Sampling state of `rows` requests on the weights' device, with seeds `seed`, `seed` + 1, ...

    Args:
        weights: Their codebooks and vocabulary.
        rows: S, without the null row.
        params: Parameters of every row, or None for other parameters in each row: greedy and sampled, penalised and
            not, at various frames, half of them with codes generated before.
        seed: Seed of row 0.
    """
    tables = weights.audio_embeddings
    state = SamplingState.allocate(rows=rows, codebooks=len(tables), vocab=tables[0].shape[0])
    for row in range(rows):
        mixed = SamplingParams(
            temperature=(1.7, 0.0, 0.9)[row % 3],
            top_k=(25, 0, 50, 5)[row % 4],
            top_p=(0.8, 1.0)[row // 2 % 2],
            repetition_penalty=(1.0, 1.2, 0.8, 1.0, 1.5)[row % 5],
        )
        state.set_row(row, params or mixed, seed=seed + row)
        if params is None:
            state.frame[row] = 7 * row
            state.seen[row] = row % 2 * 0x5A5A5A5A
    return clone_state(state, tables[0].device)


def clone_state(state: SamplingState, device: torch.device | str | None = None) -> SamplingState:
    """A copy that shares nothing with the original, on its device or another."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return SamplingState(**{name: tensor.to(device or tensor.device, copy=True) for name, tensor in fields.items()})

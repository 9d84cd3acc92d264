"""Sampling state of a pool of requests, on the device."""

import dataclasses

import torch

from .params import SamplingParams

_INT32_MAX = 2**31 - 1
_TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass
class SamplingState:
    """Per-request sampling parameters and history of S pool rows; row S is the null row of padding.

    A row that was never set is greedy, unpenalised and has seen nothing.

    Attributes:
        temperature: [S+1] float32. Not >= 1e-5 is greedy.
        top_k: [S+1] int32. <= 0 or >= V is off.
        top_p: [S+1] float32. Outside (0, 1) is off.
        repetition_penalty: [S+1] float32. Not > 0 is 1.
        text_temperature: [S+1] float32. The same for the stop head.
        text_top_k: [S+1] int32.
        text_top_p: [S+1] float32.
        seed: [S+1] int64.
        frame: [S+1] int32. Number of the frame being generated, 0 first; whoever runs the frames advances it.
        seen: [S+1, Q, ceil(V/32)] int32. Bit v & 31 of word v >> 5: code v was generated in this codebook.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    repetition_penalty: torch.Tensor
    text_temperature: torch.Tensor
    text_top_k: torch.Tensor
    text_top_p: torch.Tensor
    seed: torch.Tensor
    frame: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def allocate(
        cls, *, rows: int, codebooks: int, vocab: int, device: torch.device | str | None = None
    ) -> "SamplingState":
        """State of `rows` requests, and the null row, with `codebooks` codebooks of `vocab` codes."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows + 1, *shape, dtype=dtype, device=device)

        return cls(
            temperature=zeros(dtype=torch.float32),
            top_k=zeros(dtype=torch.int32),
            top_p=zeros(dtype=torch.float32),
            repetition_penalty=zeros(dtype=torch.float32),
            text_temperature=zeros(dtype=torch.float32),
            text_top_k=zeros(dtype=torch.int32),
            text_top_p=zeros(dtype=torch.float32),
            seed=zeros(dtype=torch.int64),
            frame=zeros(dtype=torch.int32),
            seen=zeros(codebooks, (vocab + 31) // 32, dtype=torch.int32),
        )

    def set_row(self, row: int, params: SamplingParams, *, seed: int) -> None:
        """Starts a request in a row: writes its parameters and seed, frame 0, nothing seen.

        Args:
            row: 0 .. S-1.
            params: Parameters of the request; its own `seed` is not read.
            seed: The seed in force, 0 .. 2^63-1.

        Raises:
            ValueError: The row is out of range, or is the null row.

        Graph-safe: no (enqueued between replays).
        """
        self.clear_row(row)
        for name, value in row_values(params).items():
            getattr(self, name)[row] = value
        self.seed[row] = seed

    def clear_row(self, row: int) -> None:
        """Returns a row to the state of one that was never set. Raises ValueError as `set_row` does."""
        rows = self.seed.shape[0] - 1
        if not 0 <= row < rows:
            raise ValueError(f"SamplingState: `row` must be in 0 .. {rows - 1}, got {row}")
        for field in dataclasses.fields(self):
            getattr(self, field.name)[row] = 0


def row_values(params: SamplingParams) -> dict[str, int | float]:
    """Values by field of `SamplingState` of a row with these parameters."""
    return {
        "temperature": params.temperature,
        "top_k": _clamp_top_k(params.top_k),
        "top_p": _round_top_p(params.top_p),
        "repetition_penalty": params.repetition_penalty,
        "text_temperature": params.text_temperature,
        "text_top_k": _clamp_top_k(params.text_top_k),
        "text_top_p": _round_top_p(params.text_top_p),
    }


def _clamp_top_k(top_k: int) -> int:
    return min(max(top_k, 0), _INT32_MAX)


def _round_top_p(top_p: float) -> float:
    # Rounded to float32 a tiny positive top_p would become 0, which means off.
    return max(top_p, _TINY)

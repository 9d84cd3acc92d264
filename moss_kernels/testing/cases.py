"""Inputs of each op, shared by its tests and its benchmark."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch

from moss_kernels.sample_codebook import SamplingParams, SamplingState

PAD_ID = 1024


@dataclasses.dataclass
class SampleCodebookInputs:
    """The arguments of one `sample_codebook` call, in its order; `code` and `status` hold what must be overwritten.

    Attributes:
        logits: [B, V] float32, bfloat16 or float16.
        state: Sampling state of S pool rows with at least `codebook` + 1 codebooks.
        row_map: [B] int32. Pool row of each batch row.
        active: [B] bool.
        codebook: Codebook drawn from; the random channel is codebook + 1.
        penalised: Whether the repetition penalty is passed.
        random_words: [B] int64, or None for Philox.
    """

    logits: torch.Tensor
    state: SamplingState
    row_map: torch.Tensor
    active: torch.Tensor
    codebook: int = 0
    penalised: bool = True
    random_words: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "SampleCodebookInputs":
        """A copy on a device; nothing is shared with the original."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, copy=True)

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {name: move(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
        state = {field.name: move(getattr(self.state, field.name)) for field in dataclasses.fields(self.state)}
        return SampleCodebookInputs(**fields | {"state": SamplingState(**state)})

    def run(self, implementation: Callable[..., None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs an implementation on these inputs; `state.seen` is updated in place.

        Returns:
            code: [B] int64. Starts as -7 so that a row which is not written shows.
            status: [B] int32. Starts as 64.
        """
        batch, device = self.logits.shape[0], self.logits.device
        code = torch.full((batch,), -7, dtype=torch.int64, device=device)
        status = torch.full((batch,), 64, dtype=torch.int32, device=device)
        implementation(*self.arguments(code, status))
        return code, status

    def arguments(self, code: torch.Tensor, status: torch.Tensor) -> tuple[object, ...]:
        """The arguments of `sample_codebook`, in order, with the given outputs."""
        state = self.state
        return (
            self.logits,
            self.row_map,
            self.active,
            state.temperature,
            state.top_k,
            state.top_p,
            state.repetition_penalty if self.penalised else None,
            state.seed,
            state.frame,
            state.seen,
            self.codebook + 1,
            self.codebook,
            PAD_ID,
            code,
            status,
            self.random_words,
        )


def _pick(values: list[float], count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]


def adversarial_logits(batch: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """[batch, vocab] float32. Rows of every kind that breaks samplers, mixed at random."""
    ids = torch.arange(vocab)

    def normal(rows: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, vocab, generator=generator) * scale

    def scattered(rows: int, value: float, share: float) -> torch.Tensor:
        return torch.where(torch.rand(rows, vocab, generator=generator) < share, value, normal(rows, 3))

    def at_random_id(rows: int) -> torch.Tensor:
        return ids == torch.randint(vocab, (rows, 1), generator=generator)

    kinds: list[Callable[[int], torch.Tensor]] = [
        lambda rows: normal(rows, 3),
        lambda rows: normal(rows, 3),
        # ties, also at the thresholds
        lambda rows: (normal(rows, 3) * 2).round() / 2,
        lambda rows: normal(rows, 2).bfloat16().float(),
        lambda rows: torch.where(normal(rows, 1) > 0, 0.0, -0.0),
        # one and two codes that dominate; all equal
        lambda rows: torch.where(at_random_id(rows), 60.0, normal(rows, 1)),
        lambda rows: torch.where(at_random_id(rows) | at_random_id(rows), 5.0, -200.0),
        lambda rows: normal(rows, 1)[:, :1].expand(rows, vocab),
        # not finite
        lambda rows: torch.full((rows, vocab), -torch.inf),
        lambda rows: scattered(rows, torch.nan, 0.2),
        lambda rows: torch.full((rows, vocab), torch.nan),
        lambda rows: scattered(rows, torch.inf, 2 / vocab),
        lambda rows: scattered(rows, -torch.inf, 0.9),
        # magnitudes at which the temperature or the penalty overflows, and subnormal ones
        lambda rows: normal(rows, 1e30),
        lambda rows: normal(rows, 1e36),
        lambda rows: -normal(rows, 3e38).abs(),
        lambda rows: normal(rows, 1e-40),
        lambda rows: normal(rows, 1e-44),
        lambda rows: normal(rows, 100),
    ]
    kind = torch.randint(len(kinds), (batch,), generator=generator)
    logits = torch.empty(batch, vocab)
    for number, make in enumerate(kinds):
        rows = (kind == number).nonzero()[:, 0]
        logits[rows] = make(len(rows))
    return logits


def mixed_state(
    rows: int, vocab: int, generator: torch.Generator, *, codebooks: int = 2, device_values: bool = False
) -> SamplingState:
    """State of rows with random parameters, seeds, frames and histories.

    Args:
        rows: S, without the null row.
        vocab: V.
        generator: Source of all randomness.
        codebooks: Q.
        device_values: Also values that host validation rejects and that the device must still take as greedy or off.
    """
    nan, count = torch.nan, rows + 1
    state = SamplingState.allocate(rows=rows, codebooks=codebooks, vocab=vocab)
    temperature = [0.0, 1e-6, 1e-5, 0.05, 0.3, 0.7, 1.0, 1.3, 1.7, 1.7, 5.0, 1e3, 1e30] + [
        nan,
        torch.inf,
        -1.0,
    ] * device_values
    top_k = [-1, 0, 1, 2, 3, 5, 25, 25, 50, vocab - 1, vocab, vocab + 7, 2**31 - 1]
    top_p = [1e-9, 1e-6, 0.1, 0.5, 0.8, 0.8, 0.9, 0.95, 1 - 2**-24, 1.0, 1.0] + [
        nan,
        0.0,
        -0.5,
        2.0,
        1e-40,
    ] * device_values
    penalty = [1.0, 1.0, 1.1, 1.3, 2.0, 0.5, 1e3, 1e-3, 1e30] + [nan, 0.0, -1.0] * device_values
    state.temperature = _pick(temperature, count, generator)
    state.top_k = _pick(top_k, count, generator).to(torch.int32)
    state.top_p = _pick(top_p, count, generator)
    state.repetition_penalty = _pick(penalty, count, generator)
    state.seed = torch.randint(2**63 - 1, (count,), generator=generator)
    state.frame = torch.randint(4096, (count,), generator=generator, dtype=torch.int32)
    density = _pick([0.0, 0.05, 0.5, 1.0], count, generator)[:, None, None]
    history = torch.rand(count, codebooks, vocab, generator=generator) < density
    padded = torch.nn.functional.pad(history, (0, -vocab % 32)).view(count, codebooks, -1, 32)
    words = (padded.long() << torch.arange(32)).sum(-1)
    state.seen = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return state


def sample_codebook_inputs(
    batch: int, vocab: int, *, seed: int, dtype: torch.dtype = torch.float32, device_values: bool = False
) -> SampleCodebookInputs:
    """Adversarial logits and mixed parameters; rows permuted, about one in eight inactive, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    state = mixed_state(batch + 3, vocab, generator, device_values=device_values)
    active = torch.rand(batch, generator=generator) < 7 / 8
    row_map = torch.randperm(batch + 3, generator=generator)[:batch]
    return SampleCodebookInputs(
        logits=adversarial_logits(batch, vocab, generator).to(dtype),
        state=state,
        row_map=torch.where(active, row_map, batch + 3).to(torch.int32),
        active=active,
        codebook=1,
    )


def weight_arguments() -> torch.Tensor:
    """[N] float32 <= 0. Differences of z to weigh: random, around every power of two of the weight, tiny, infinite."""
    generator = torch.Generator().manual_seed(0)
    steps = -(torch.arange(35) * math.log(2)).float()[:, None] * (1 + torch.arange(-8, 9) * 2.0**-23)
    tiny = -torch.tensor([0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 3e-8, 6e-8, 1e-7])
    random = -torch.rand(3000, generator=generator) * 24
    return torch.cat([steps.flatten(), tiny, random, torch.tensor([-1e30, -torch.inf])])


def top_p_edge_inputs() -> SampleCodebookInputs:
    """Rows whose weight before a code equals the top_p limit exactly: weights 4 : 2 : 1 : 1, top_p 1/2 and 3/4."""
    orders = torch.tensor(list(itertools.permutations(range(4))))
    batch = 2 * len(orders)
    state = SamplingState.allocate(rows=batch, codebooks=1, vocab=4)
    state.temperature.fill_(1)
    state.top_p[: len(orders)] = 0.5
    state.top_p[len(orders) :] = 0.75
    # 0x3f317218 = ln 2: its product with log2 e rounds to 1, so that weights are halves of each other.
    half = -torch.tensor(0x3F317218, dtype=torch.int32).view(torch.float32)
    return SampleCodebookInputs(
        logits=torch.stack([0 * half, half, 2 * half, 2 * half])[orders].repeat(2, 1),
        state=state,
        row_map=torch.arange(batch, dtype=torch.int32),
        active=torch.ones(batch, dtype=torch.bool),
        random_words=torch.full((batch,), 2**32 - 1),
    )


@dataclasses.dataclass(frozen=True)
class SampleCodebookCase:
    """A shape and parameters that serving meets; the benchmark times exactly these.

    Attributes:
        name: Case id, `sample_codebook/B64`.
        batch: B.
        params: Parameters of every row, or None for other parameters in each row with the penalty on.
        vocab: V.
    """

    name: str
    batch: int
    params: SamplingParams | None
    vocab: int = 1024

    def inputs(self, device: torch.device | str, *, seed: int = 0) -> SampleCodebookInputs:
        """Random logits (bfloat16, standard deviation 3), all rows active, row order shuffled."""
        generator = torch.Generator().manual_seed(seed)
        state = SamplingState.allocate(rows=self.batch, codebooks=12, vocab=self.vocab)
        for row in range(self.batch):
            params = self.params or SamplingParams(
                temperature=0.7 + 0.1 * (row % 13),
                top_k=10 + row % 23,
                top_p=0.7 + 0.02 * (row % 14),
                repetition_penalty=1.05 + 0.05 * (row % 4),
            )
            state.set_row(row, params, seed=1000 + row)
        return SampleCodebookInputs(
            logits=(torch.randn(self.batch, self.vocab, generator=generator) * 3).bfloat16(),
            state=state,
            row_map=torch.randperm(self.batch, generator=generator).to(torch.int32),
            active=torch.ones(self.batch, dtype=torch.bool),
        ).to(device)


_OPEN = SamplingParams(top_k=0, top_p=1.0)
SAMPLE_CODEBOOK_CASES = tuple(
    SampleCodebookCase(f"sample_codebook/B{batch}{suffix}", batch, params)
    for suffix, params in (("", None), ("/defaults", SamplingParams()), ("/open", _OPEN))
    for batch in (1, 64, 128)
)

"""Inputs of `ring_attention` and `ring_kv_write` for tests and benchmarks, and the attention they must give."""

import dataclasses
from collections.abc import Callable

import torch

from moss_kernels.ring_attention import rope_tables, rotate_interleaved, whole_qkv


@dataclasses.dataclass
class RingInputs:
    """One chunk of one layer. Everything that must not matter is NaN: stale ring positions, tokens beyond `valid`.

    Attributes:
        qkv: [B, T, 3*H*D] float32 or bfloat16.
        cos_sin: [B, T, D/2, 2] float32; None: q and k are rotated already.
        ring_k: [S+1, H, C, D] the dtype of `qkv`. Holds the tokens before the chunk; the null slot S is zero.
        ring_v: [S+1, H, C, D] likewise.
        slots: [B] int32.
        valid: [B] int32.
        offset: [S+1] int64.
        window: Keys that a query sees.
    """

    qkv: torch.Tensor
    cos_sin: torch.Tensor | None
    ring_k: torch.Tensor
    ring_v: torch.Tensor
    slots: torch.Tensor
    valid: torch.Tensor
    offset: torch.Tensor
    window: int

    @classmethod
    def make(
        cls,
        rows: list[tuple[int, int, int]],
        *,
        slots: int,
        tokens: int,
        heads: int,
        head_dim: int,
        capacity: int,
        window: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> "RingInputs":
        """Random inputs on the CPU.

        Args:
            rows: (slot, valid tokens, offset) of each batch row; the null slot is number `slots`.
            slots: S.
            tokens: T.
            heads: H.
            head_dim: D.
            capacity: C.
            window: at most C.
            dtype: of queries, keys and values. Queries and keys have gain 2, so that the softmax is far from flat.
            seed: of everything random.
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        offset = torch.zeros(slots + 1, dtype=torch.int64)
        ring_k, ring_v = torch.full((2, slots + 1, heads, capacity, head_dim), torch.nan)
        ring_k[slots], ring_v[slots] = 0.0, 0.0
        for slot, _, start in rows:
            offset[slot] = start
            if slot < slots:
                held = min(start, capacity)
                ring_k[slot, :, :held] = 2 * normal(heads, held, head_dim)
                ring_v[slot, :, :held] = normal(heads, held, head_dim)
        index, valid = torch.tensor([row[:2] for row in rows], dtype=torch.int32).T.contiguous()
        gain = torch.tensor([2.0, 2.0, 1.0]).repeat_interleave(heads * head_dim)
        qkv = normal(len(rows), tokens, 3 * heads * head_dim) * gain
        cos_sin = rope_tables(offset[index][:, None] + torch.arange(tokens), head_dim, 10_000.0)
        surplus = torch.arange(tokens) >= valid[:, None]
        qkv[surplus], cos_sin[surplus] = torch.nan, torch.nan
        return cls(qkv.to(dtype), cos_sin, ring_k.to(dtype), ring_v.to(dtype), index, valid, offset, window)

    def to(self, device: torch.device | str) -> "RingInputs":
        """A copy on a device; nothing is shared with the original."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return RingInputs(**{name: x.to(device, copy=True) if torch.is_tensor(x) else x for name, x in fields.items()})

    @property
    def step(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments that both ops begin with; those of `ring_kv_write`."""
        return self.qkv, self.cos_sin, self.ring_k, self.ring_v, self.slots, self.valid, self.offset

    def rotated(self) -> "RingInputs":
        """The same step with its q and k rotated, and nothing left to rotate them by."""
        q, k, v = self.qkv.unflatten(-1, (3, self.ring_k.shape[1], -1)).unbind(2)
        turned = [rotate_interleaved(x, self.cos_sin) for x in (q, k)]
        return dataclasses.replace(self, qkv=torch.stack((*turned, v), 2).flatten(2), cos_sin=None)

    def sliced(self, slices: int) -> "RingInputs":
        """Nearly the same step with its q, k and v in sums over slices."""
        generator = torch.Generator().manual_seed(slices)
        others = torch.randn(slices - 1, *self.qkv.shape, generator=generator).to(self.qkv.device)
        first = self.qkv.float() - others.sum(0)
        return dataclasses.replace(self, qkv=torch.cat((first[None], others)))

    def whole(self) -> "RingInputs":
        """The same step with the slices of its q, k and v added up."""
        return dataclasses.replace(self, qkv=whole_qkv(self.qkv, self.ring_k.dtype))

    def attend(self, implementation: Callable[..., None], *, chunk_in_ring: bool = False) -> torch.Tensor:
        """Output [B, T, H*D] of an implementation of `ring_attention`; NaN where it wrote nothing."""
        batch, tokens, triple = self.qkv.shape[-3:]
        out = self.ring_k.new_full((batch, tokens, triple // 3), torch.nan)
        implementation(*self.step, self.window, chunk_in_ring, out)
        return out

    def exact_attention(self, *, chunk_in_ring: bool = False) -> torch.Tensor:
        """[B, T, H*D] float64 on the CPU: each stream's tokens put in order, then plain masked attention."""
        inputs = self.to("cpu")
        heads, capacity, head_dim = inputs.ring_k.shape[1:]
        q, k, v = inputs.qkv.double().unflatten(-1, (3, heads, head_dim)).unbind(2)
        turn = torch.view_as_complex(inputs.cos_sin.double())[:, :, None]
        q, k = (torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2) for x in (q, k))
        out = torch.zeros_like(q)
        for row, (slot, count) in enumerate(zip(inputs.slots.tolist(), inputs.valid.tolist(), strict=True)):
            start = int(inputs.offset[slot])
            stored_end = start + count if chunk_in_ring else start
            stored = torch.arange(max(0, stored_end - capacity), stored_end)
            keys = inputs.ring_k[slot][:, stored % capacity].double()
            values = inputs.ring_v[slot][:, stored % capacity].double()
            number = stored
            if not chunk_in_ring:
                keys = torch.cat((keys, k[row, :count].transpose(0, 1)), 1)
                values = torch.cat((values, v[row, :count].transpose(0, 1)), 1)
                number = torch.cat((stored, torch.arange(start, start + count)))
            position = torch.arange(start, start + count)[:, None]
            visible = (number <= position) & (number > position - inputs.window)
            scores = torch.einsum("thd,hnd->htn", q[row, :count], keys) / head_dim**0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()  # NaN: nothing is visible
            out[row, :count] = torch.einsum("htn,hnd->thd", weights, values)
        return out.flatten(2)


@dataclasses.dataclass(frozen=True)
class RingCase:
    """A layer of the codec as serving runs it; the benchmark times exactly these.

    Attributes:
        name: Case id without the op, `B64/T15/stage6`; with `/young` at the end the rings are empty.
        batch: B.
        tokens: T: frames times tokens per frame.
        heads: H.
        capacity: C, which is the window.
        offset: Tokens that every stream has consumed.
        head_dim: D.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    capacity: int
    offset: int
    head_dim: int = 64

    def inputs(self, device: torch.device | str, dtype: torch.dtype, *, seed: int = 0) -> RingInputs:
        """All rows live, no surplus tokens, slots in shuffled order."""
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(seed)).tolist()
        return RingInputs.make(
            [(slot, self.tokens, self.offset) for slot in order],
            slots=self.batch,
            tokens=self.tokens,
            heads=self.heads,
            head_dim=self.head_dim,
            capacity=self.capacity,
            window=self.capacity,
            dtype=dtype,
            seed=seed,
        ).to(device)


# Of the released codec's decoder: tokens per frame, heads, window of each stage.
CODEC_STAGES = ((1, 20, 125), (2, 12, 250), (4, 12, 400), (8, 12, 400), (16, 12, 400), (32, 12, 400))
RING_CASES = tuple(
    RingCase(f"B{batch}/T{frames}/stage{stage}{suffix}", batch, frames * rate, heads, capacity, offset)
    for batch, frames in ((1, 1), (64, 1), (64, 15))
    for suffix, offset in (("", 123_457), ("/young", 0))
    for stage, (rate, heads, capacity) in enumerate(CODEC_STAGES, 1)
)

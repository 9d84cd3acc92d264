"""The two ring ops against a model that keeps a plain list of all tokens of each stream."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moss_kernels.ring_attention import masked_attention, rope_tables, rotate_interleaved
from moss_kernels.ring_kv_write import ring_kv_write, ring_target
from moss_kernels.testing.compare import implementation
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.state.codec_slots import CodecSlots

HEADS, HEAD_DIM, SLOTS = 2, 16, 3
NAN = float("nan")


class TokenLists:
    """What each slot's stream has consumed: a list of (key, value), each [H, D]."""

    def __init__(self, capacity, window, exact):
        self.capacity, self.window, self.exact = capacity, window, exact
        self.tokens = {slot: [] for slot in range(SLOTS)}

    def attend(self, slot, queries, keys, values):
        """Appends the chunk, then attends token by token: [n, H, D] each -> [n, H, D]."""
        history = self.tokens[slot]
        start = len(history)
        history.extend(zip(keys, values, strict=True))
        evicted = 0 if self.exact else len(history) - self.capacity
        outputs = []
        for position, query in enumerate(queries, start):
            seen = history[max(0, position - self.window + 1, evicted) : position + 1]
            if not seen:
                outputs.append(torch.zeros_like(query))
                continue
            key, value = (torch.stack(part) for part in zip(*seen, strict=True))
            weights = (torch.einsum("hd,nhd->hn", query, key) / HEAD_DIM**0.5).softmax(-1)
            outputs.append(torch.einsum("hn,nhd->hd", weights, value))
        return torch.stack(outputs)

    def ring(self, slot, part, stale):
        """Expected ring [H, C, D]: the last C tokens at n mod C over what was there."""
        ring = stale.clone()
        for number, token in list(enumerate(self.tokens[slot]))[-self.capacity :]:
            ring[:, number % self.capacity] = token[part]
        return ring


class Streams:
    """Both sides of the comparison, driven together.

    Args:
        implementations: of `ring_attention` and `ring_kv_write`, by name.
    """

    def __init__(self, capacity, window, exact, implementations=("reference", "reference"), device="cpu"):
        self.attention, self.write = map(implementation, ("ring_attention", "ring_kv_write"), implementations)
        stage = TransformerConfig(1, 1, HEADS * HEAD_DIM, HEADS, 1, 1, capacity, 1e4)
        self.slots = CodecSlots([stage], SLOTS, dtype=torch.float32, device=device)
        rings = self.slots.stages[0]
        self.rings, self.offset = (rings.keys[0], rings.values[0]), rings.offset
        self.model = TokenLists(capacity, window, exact)
        self.leases = []

    def restart(self, slot):
        """The slot's stream is at token 0 again; whatever its ring holds must not matter."""
        self.model.tokens[slot] = []
        for ring in self.rings:
            ring[slot] = NAN

    def step(self, rows, tokens):
        """rows: (slot, valid tokens) of each row; surplus tokens hold NaN."""
        qkv = torch.randn(len(rows), tokens, 3 * HEADS * HEAD_DIM)
        slots, valid = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        qkv[torch.arange(tokens) >= valid[:, None]] = NAN
        offset = self.offset.cpu()
        cos_sin = rope_tables(offset[slots][:, None] + torch.arange(tokens), HEAD_DIM, 10.0)
        before = [ring.cpu().clone() for ring in self.rings]
        out = self.run(qkv, cos_sin, slots, valid)

        q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = turn(q, cos_sin), turn(k, cos_sin)
        expected_out, expected_rings = torch.zeros_like(q), [ring.clone() for ring in before]
        for row, (slot, count) in enumerate(rows):
            if count:
                expected_out[row, :count] = self.model.attend(slot, q[row, :count], k[row, :count], v[row, :count])
                for part in range(2):
                    expected_rings[part][slot] = self.model.ring(slot, part, before[part][slot])
        torch.testing.assert_close(out, expected_out.flatten(2), rtol=1e-5, atol=1e-5)
        for ring, expected in zip(self.rings, expected_rings, strict=True):
            ring = ring.cpu()
            assert torch.equal(ring.view(torch.int32), expected.view(torch.int32))  # bits, so that NaN equals NaN
            assert not ring[SLOTS].any()
        assert self.offset.tolist() == [len(self.model.tokens[slot]) for slot in range(SLOTS)] + [0]

    def run(self, qkv, cos_sin, slots, valid):
        """Attention and write in the order of the mode, then the advance: [B, T, H*D] on the CPU."""
        step = [x.to(self.offset.device) for x in (qkv, cos_sin)]
        step += [*self.rings, slots.to(self.offset.device), valid.to(self.offset.device), self.offset]
        out = torch.full_like(step[0][..., : HEADS * HEAD_DIM], NAN).contiguous()
        if self.model.exact:
            self.attention(*step, self.model.window, False, out)
        self.write(*step)
        if not self.model.exact:
            self.attention(*step, self.model.window, True, out)
        self.offset.index_add_(0, *(x.to(self.offset.device) for x in (slots, valid.long())))
        return out.cpu()


def turn(x, cos_sin):
    """Rotation of the pairs (0, 1), (2, 3), ...; [B, T, H, D]."""
    cos, sin = cos_sin[:, :, None, :, 0], cos_sin[:, :, None, :, 1]
    turned = torch.empty_like(x)
    turned[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    turned[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return turned


@st.composite
def step_rows(draw, leased, longest):
    """Rows of one step: some leased slots live, in any order, between idle rows that name any slot at all."""
    live = draw(st.permutations(leased))[: draw(st.integers(0, len(leased)))]
    idle = draw(st.lists(st.integers(0, SLOTS), max_size=3))
    rows = [(slot, draw(st.integers(1, longest))) for slot in live] + [(slot, 0) for slot in idle]
    return draw(st.permutations(rows))


def interleave(data, capacity, window, exact, *where):
    """Leases, chunks, resets and releases as `data` draws them."""
    streams = Streams(capacity, window, exact, *where)
    for _ in range(data.draw(st.integers(1, 12), label="actions")):
        action = data.draw(st.sampled_from(["lease", "step", "step", "step", "reset", "release"]), label="action")
        leased = [lease.slot for lease in streams.leases]
        if action == "lease" and streams.slots.free:
            streams.leases.append(streams.slots.lease())
            streams.restart(streams.leases[-1].slot)
        elif action == "step":
            tokens = data.draw(st.integers(1, 2 * capacity + 2), label="tokens")
            rows = data.draw(step_rows(leased, tokens), label="rows")
            if rows:
                streams.step(rows, tokens)
        elif action == "reset" and leased:
            slot = data.draw(st.sampled_from(leased), label="slot")
            streams.slots.reset(slot)
            streams.restart(slot)
        elif action == "release" and leased:
            lease = streams.leases.pop(data.draw(st.integers(0, len(leased) - 1), label="lease"))
            streams.slots.release(lease)


def every_phase(capacity, exact, *where):
    """Chunks of every length from 1 to twice the ring, one after the other, so that each wraps somewhere else."""
    streams = Streams(capacity, capacity, exact, *where)
    for tokens in [*range(1, 2 * capacity + 1), *range(2 * capacity, 0, -1)]:
        streams.step([(2, tokens), (0, max(1, tokens // 2)), (3, 0), (2, 0)], tokens)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(0, 2), st.booleans())
def test_random_interleavings(data, window, headroom, exact):
    interleave(data, window + headroom, window, exact)


@pytest.mark.interpreter
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 7), st.integers(0, 2), st.booleans())
def test_random_interleavings_in_the_interpreter(data, window, headroom, exact):
    interleave(data, window + headroom, window, exact, ("triton", "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("writer", ["triton", "cuda"])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), window=st.integers(1, 150), headroom=st.integers(0, 2), exact=st.booleans())
def test_random_interleavings_on_the_gpu(writer, data, window, headroom, exact):
    interleave(data, window + headroom, window, exact, ("triton", writer), "cuda")


@pytest.mark.parametrize("exact", [True, False])
def test_every_phase_of_the_ring(exact):
    every_phase(5, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("writer", ["triton", "cuda"])
@pytest.mark.parametrize("exact", [True, False])
def test_every_phase_of_the_ring_on_the_gpu(exact, writer):
    every_phase(40, exact, ("triton", writer), "cuda")


def test_no_two_tokens_are_written_to_one_place():
    """Which of two writes to one place wins is chance on a GPU, so an oversized chunk names only its last C tokens."""
    offset = torch.tensor([0, 4, 17, 0])
    target = ring_target(torch.tensor([2, 0, 1]), torch.tensor([13, 12, 3]), offset, tokens=13, capacity=5)
    assert target.written.sum(1).tolist() == [5, 5, 3]
    places = set(zip(target.slot[target.written].tolist(), target.position[target.written].tolist(), strict=True))
    assert len(places) == 13
    assert target.written[0].nonzero().flatten().tolist() == [8, 9, 10, 11, 12]


def test_bf16_rings_hold_the_tokens_they_are_given():
    keys, values = torch.zeros(2, 2, HEADS, 3, HEAD_DIM, dtype=torch.bfloat16)
    qkv = torch.randn(1, 2, 3 * HEADS * HEAD_DIM).bfloat16()
    cos_sin = rope_tables(torch.arange(2)[None], HEAD_DIM, 10.0)
    slots, valid = torch.tensor([[0], [2]], dtype=torch.int32)
    ring_kv_write(qkv, cos_sin, keys, values, slots, valid, torch.zeros(2, dtype=torch.int64))
    _, k, v = qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
    assert torch.equal(keys[0, :, :2].transpose(0, 1), turn(k.float(), cos_sin)[0].bfloat16())
    assert torch.equal(values[0, :, :2].transpose(0, 1), v[0])


def test_masked_attention_shows_nothing_of_what_it_hides():
    q, k, v = torch.randn(3, 2, 4, HEADS, HEAD_DIM)
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    visible[..., 1] = False  # nobody sees key 1
    visible[:, 0] = False  # query 0 sees nothing
    expected = masked_attention(q, k, v, visible)
    k[:, 1], v[:, 1], q[:, 0] = NAN, NAN, NAN
    assert torch.equal(masked_attention(q, k, v, visible), expected)
    assert not expected[:, 0].any()


def test_rotary_embedding_at_far_positions():
    """Angles are the fp32 product of position and frequency: at 131,072 tokens an ulp of a frequency matters."""
    positions = torch.tensor([0, 1, 131_071])
    cos_sin = rope_tables(positions, 64, 10_000.0)
    cos, sin = cos_sin.unbind(-1)
    pairs = torch.arange(32, dtype=torch.float64)
    exact = positions[:, None].double() * 10_000.0 ** (-pairs / 32)
    assert (cos - exact.cos()).abs().max() < 0.03
    assert (cos[:2] - exact[:2].cos()).abs().max() < 1e-6
    x = torch.randn(3, HEADS, 64)
    rotated = torch.view_as_complex(rotate_interleaved(x, cos_sin).unflatten(-1, (32, 2)))
    turned = torch.view_as_complex(x.unflatten(-1, (32, 2))) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(rotated, turned)

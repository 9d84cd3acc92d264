"""Streaming decode: any cut equals offline, and no stream can touch another."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moss_runtime.errors import UserError
from moss_runtime.model.codec import Codec

FRAMES, SAMPLES = 61, 8
TOLERANCE = 1e-5  # of the peak


@pytest.fixture(scope="module")
def codec(golden):
    return Codec.from_pretrained(golden("codec").directory)


@pytest.fixture(scope="module")
def codes(golden):
    return golden("codec").expected["codes"].permute(1, 2, 0)


@pytest.fixture(scope="module")
def offline(codec, codes):
    return codec.decode(codes)


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


def state(stream):
    return [part.clone() for rings in stream.slots.stages for part in (rings.keys, rings.values, rings.offset)]


def poison(stream, slot):
    for rings in stream.slots.stages:
        rings.keys[:, slot], rings.values[:, slot] = float("nan"), float("nan")


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 20), min_size=1, max_size=12))
def test_any_cut_equals_offline(codec, codes, offline, cuts):
    stream = codec.streaming(1)
    edges = [0]
    for frames in cuts:
        edges.append(min(edges[-1] + frames, FRAMES))
    edges.append(FRAMES)
    audio = [stream.step(codes[:1, start:end], [0], [end - start]) for start, end in pairwise(edges)]
    assert_close(torch.cat(audio, dim=2), offline[:1])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), frames=st.integers(1, 9))
def test_ragged_rows_in_any_slots(codec, codes, offline, data, frames):
    """Rows change their place and the padding rows; each stream still equals offline, and the surplus is zero."""
    stream = codec.streaming(5)
    slots, done, parts = [4, 1, 2], [0, 0, 0], [[], [], []]
    for _ in range(10):
        order = data.draw(st.permutations([0, 1, 2, None, None]), label="order")
        chunk = torch.full((5, frames, 12), 1024)  # the pad code, which is out of range
        counts = []
        for row, source in enumerate(order):
            limit = 0 if source is None else min(frames, FRAMES - done[source])
            counts.append(data.draw(st.integers(0, limit), label="valid"))
            if counts[-1]:
                chunk[row, : counts[-1]] = codes[source, done[source] : done[source] + counts[-1]]
        names = [stream.slots.null_slot if source is None else slots[source] for source in order]
        audio = stream.step(chunk, names, counts)
        for row, (source, count) in enumerate(zip(order, counts, strict=True)):
            assert not audio[row, :, count * SAMPLES :].any()
            if count:
                parts[source].append(audio[row, :, : count * SAMPLES])
                done[source] += count
    for source in range(3):
        if done[source]:
            assert_close(torch.cat(parts[source], dim=1), offline[source, :, : done[source] * SAMPLES])


def test_reused_slot_equals_a_fresh_one(codec, codes):
    stream = codec.streaming(2)
    fresh = stream.step(codes[:1, :40], [0], [40])
    again = [fresh]
    for _ in range(2):
        poison(stream, 0)
        stream.reset(0)
        again.append(stream.step(codes[:1, :40], [0], [40]))
    assert torch.equal(again[1], fresh) and torch.equal(again[2], fresh)


@pytest.mark.parametrize("ring", ["exact", "reference"])
def test_stale_ring_contents_reach_nothing(codec, codes, ring):
    clean, stale = codec.streaming(1, ring=ring), codec.streaming(1, ring=ring)
    poison(stale, 0)
    for start in range(0, FRAMES, 5):
        chunk = codes[:1, start : start + 5]
        expected = clean.step(chunk, [0], [chunk.shape[1]])
        assert torch.equal(stale.step(chunk, [0], [chunk.shape[1]]), expected)


@pytest.mark.parametrize("ring", ["exact", "reference"])
def test_what_a_step_does_not_name_keeps_every_bit(codec, codes, ring):
    stream = codec.streaming(4, ring=ring)
    stream.step(codes[:, :9], [0, 1, 2], [9, 9, 9])
    before = state(stream)
    null = stream.slots.null_slot
    stream.step(codes[:, 9:14].repeat(2, 1, 1), [2, 0, null, 0, 3, null], [5, 0, 0, 0, 0, 0])
    untouched = [0, 1, 3, null]
    for old, new in zip(before, state(stream), strict=True):
        slot_dimension = old.dim() - 4 if old.dim() > 1 else 0
        rest = torch.tensor(untouched)
        assert torch.equal(old.index_select(slot_dimension, rest), new.index_select(slot_dimension, rest))
        assert not torch.equal(old, new)
        assert not new.select(slot_dimension, null).any()


def test_padding_alone_changes_nothing(codec, codes):
    stream = codec.streaming(2)
    stream.step(codes[:1, :5], [1], [5])
    before = state(stream)
    audio = stream.step(torch.full((3, 4, 12), 1024), [2, 2, 1], [0, 0, 0])
    assert audio.shape == (3, 2, 4 * SAMPLES) and not audio.any()
    assert all(torch.equal(old, new) for old, new in zip(before, state(stream), strict=True))


def test_tensors_name_rows_as_lists_do(codec, codes):
    stream = codec.streaming(3)
    slots, valid = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([4, 6], dtype=torch.int32)
    audio = stream.step(codes[:2, :6].to(torch.int16), slots, valid)
    assert torch.equal(audio, codec.streaming(3).step(codes[:2, :6], [2, 0], [4, 6]))


def test_bf16_stream_is_as_good_as_bf16_offline(golden, codes, offline):
    codec = Codec.from_pretrained(golden("codec").directory, dtype=torch.bfloat16)

    def snr(audio):
        return 10 * torch.log10(offline.square().sum() / (audio - offline).square().sum())

    limit = snr(codec.decode(codes)) - 1
    assert limit > 20
    for frames in (1, 7):
        stream = codec.streaming(3)
        chunks = codes.split(frames, dim=1)
        audio = [stream.step(chunk, [0, 1, 2], [chunk.shape[1]] * 3) for chunk in chunks]
        assert snr(torch.cat(audio, dim=2)) >= limit


@pytest.mark.parametrize(
    ("slots", "valid", "message"),
    [
        ([0, 0], [1, 2], "names slot 0 twice"),
        ([0, 3], [1, 1], "must be in 0..2, got 3"),
        ([0, -1], [1, 1], "must be in 0..2, got -1"),
        ([0, 2], [1, 1], "slot 2 is the null slot"),
        ([0, 1], [1, 4], "`valid` must be in 0..3, got 4"),
        ([0, 1], [1, -1], "`valid` must be in 0..3, got -1"),
        ([0], [1], "must have 2 entries, got 1 and 1"),
        (torch.tensor([1, 1]), torch.tensor([1, 1]), "names slot 1 twice"),
    ],
)
def test_wrong_rows_are_refused_before_anything_changes(codec, codes, slots, valid, message):
    stream = codec.streaming(2)
    with pytest.raises(ValueError, match=message):
        stream.step(codes[:2, :3], slots, valid)
    assert not any(part.any() for part in state(stream))


@pytest.mark.parametrize(("slots", "valid"), [([0.5], [1]), ([0], [1.5]), (torch.tensor([0.5]), [1])])
def test_rows_are_whole_numbers(codec, codes, slots, valid):
    with pytest.raises(TypeError):
        codec.streaming(1).step(codes[:1, :3], slots, valid)


def test_code_of_a_valid_frame_out_of_range(codec, codes):
    stream = codec.streaming(2)
    chunk = codes[:2, :3].clone()
    chunk[1, 2, 5] = 64
    with pytest.raises(UserError, match="got 64 at row 1, frame 2, codebook 5"):
        stream.step(chunk, [0, 1], [3, 3])
    stream.step(chunk, [0, 1], [3, 2])


def test_unknown_ring_mode(codec):
    with pytest.raises(ValueError, match='`ring` must be "exact" or "reference", got \'official\''):
        codec.streaming(1, ring="official")

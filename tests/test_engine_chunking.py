"""Which chunks go to the codec, when, and together: over plain numbers and a made-up clock."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moss_runtime.engine.chunking import Chunking, Stream
from moss_runtime.engine.config import EngineConfig

RATE = 12.5


def make(mode="streaming-low-latency", **changes):
    return Chunking(EngineConfig.from_mode(mode, **changes), RATE)


def ask(chunking, streams, now, *, idle=True, pressed=False):
    """One selection; what is chosen counts as taken."""
    chunking.update(streams, now, pressed=pressed)
    chosen = chunking.select(streams, now, idle=idle, pressed=pressed)
    for stream, count in chosen:
        chunking.take(stream, count, now)
    return [(streams.index(stream), count) for stream, count in chosen]


def grown(known, chunks=0, taken=0, **fields):
    return Stream(known=known, chunks=chunks, taken=taken, horizon=0.0 if chunks else None, **fields)


def test_the_ramp_and_its_last_size():
    chunking, stream, sizes = make(), Stream(), []
    for frame in range(60):
        stream.known += 1
        sizes += [count for _, count in ask(chunking, [stream], frame * 0.08)]
    assert sizes == [1, 2, 4, 8, 15, 15, 15]
    stream.final = True
    assert ask(chunking, [stream], 60 * 0.08) == []
    assert stream.flushed and stream.taken == 60


@pytest.mark.parametrize("frames", [0, 1, 2, 3, 7, 8, 31, 47])
def test_the_rest_is_flushed_once_and_completely(frames):
    chunking, stream = make(), Stream(known=frames, final=True)
    counts = []
    while chosen := ask(chunking, [stream], 1.0):
        counts += [count for _, count in chosen]
    assert sum(counts) == frames and stream.flushed
    assert all(0 < count <= 15 for count in counts)


def test_first_chunks_go_alone_and_ahead_of_everybody():
    chunking = make()
    streams = [grown(40, chunks=5, taken=10), Stream(known=1), Stream(known=3)]
    assert ask(chunking, streams, 0.0) == [(1, 1), (2, 1)]
    assert ask(chunking, streams, 0.0) == [(0, 15), (2, 2)]


def test_a_busy_codec_takes_first_chunks_only():
    chunking = make()
    streams = [grown(15, chunks=5), Stream(known=1)]
    assert ask(chunking, streams, 0.0, idle=False) == [(1, 1)]
    assert ask(chunking, streams, 0.0, idle=False) == []
    assert ask(chunking, streams, 0.0) == [(0, 15)]


def test_a_chunk_waits_for_others_but_no_longer_than_the_bound():
    chunking = make("streaming-balanced", chunk_wait_ms=80)
    streams = [grown(8, chunks=4), grown(2, chunks=4), grown(1, chunks=4)]
    for stream in streams:
        stream.horizon = 10.0
    assert ask(chunking, streams, 1.0) == []
    streams[0].known, streams[1].known, streams[2].known = 12, 11, 5
    assert ask(chunking, streams, 1.079) == []
    # The others have waited less; one fills most of the call, one would only pad it.
    assert ask(chunking, streams, 1.081) == [(0, 12), (1, 11)]


def test_nobody_waits_longer_than_a_client_has_audio():
    chunking = make("streaming-balanced", chunk_wait_ms=80, chunk_lead_ms=50)
    streams = [grown(8, chunks=4), grown(1, chunks=4)]
    streams[0].horizon = 1.07
    assert ask(chunking, streams, 1.0) == []
    assert ask(chunking, streams, 1.021) == [(0, 8)]


def waiting(*known, chunks=4, **fields):
    """Streams whose clients have much left to play."""
    streams = [grown(count, chunks=chunks, **fields) for count in known]
    for stream in streams:
        stream.horizon = 100.0
    return streams


@pytest.mark.parametrize(("clients", "frames"), [(1, 11), (64, 10)])
def test_a_call_has_the_length_that_pays(clients, frames):
    """A graph of 12 frames takes 11: worth its padding where the call itself costs most, not where the frames do."""
    chunking = make("streaming-balanced", chunk_wait_ms=0)
    assert ask(chunking, waiting(*[11] * clients), 1.0) == [(index, frames) for index in range(clients)]


def test_the_last_frames_of_all_are_padded_rather_than_cut():
    chunking = make("streaming-balanced", final_wait_ms=0)
    assert ask(chunking, waiting(11, final=True), 1.0) == [(0, 11)]


def test_whoever_is_ready_goes_along_with_who_is_due():
    chunking = make("streaming-balanced", chunk_wait_ms=80)
    streams = waiting(8, 15, 0, 0)
    chunking.update(streams[:1], 0.0)
    assert ask(chunking, streams, 0.05) == []
    assert ask(chunking, streams, 0.081) == [(0, 8), (1, 15)]


def test_a_call_for_a_short_rest_is_long_enough_for_others():
    streams = waiting(10, 2, chunks=5)
    streams[1].final = True
    assert ask(make("streaming-low-latency"), streams, 1.0) == [(1, 2), (0, 10)]


def test_rows_that_would_be_padding_go_to_the_fullest_streams():
    chunking = make("streaming-balanced", chunk_wait_ms=0)
    streams = waiting(8, 8, 8, 4, 5, 3)
    assert ask(chunking, streams, 1.0) == [(0, 8), (1, 8), (2, 8), (4, 5)]
    assert ask(chunking, waiting(8, 8, 1, 7), 1.0) == [(0, 8), (1, 8), (3, 7)]


def test_rows_that_can_wait_do_not_make_a_call_one_size_larger():
    chunking = make("streaming-balanced", chunk_wait_ms=80)
    streams = waiting(*[8] * 36)
    chunking.update(streams[35:], 0.0)
    assert ask(chunking, streams, 0.05) == []
    assert sorted(ask(chunking, streams, 0.081)) == [*((index, 8) for index in range(31)), (35, 8)]


def test_last_chunks_wait_as_long_as_the_crowd_is_large():
    for others, wait in ((0, 0.02), (3, 0.08), (9, 0.08)):
        chunking = make("streaming-balanced", final_wait_ms=80, crowd=4)
        streams = waiting(3, *[0] * others)
        streams[0].final = True
        assert ask(chunking, streams, 1.0) == [] == ask(chunking, streams, 0.999 + wait)
        assert ask(chunking, streams, 1.001 + wait) == [(0, 3)]


def test_in_a_crowd_ramps_begin_with_their_second_size():
    chunking = make("streaming-balanced", crowd=3)
    streams = [Stream(known=1), Stream(known=1)]
    assert ask(chunking, streams, 1.0) == [(0, 1), (1, 1)]
    streams = [Stream(known=1), Stream(known=1), Stream(known=2)]
    assert ask(chunking, streams, 1.0) == [(2, 2)]


def test_streams_in_step_do_not_wait():
    chunking = make("streaming-balanced", chunk_wait_ms=80)
    streams = [grown(14, chunks=4) for _ in range(4)]
    for stream in streams:
        stream.horizon = 10.0
    assert ask(chunking, streams, 1.0) == []
    for stream in streams:
        stream.known += 1
    assert ask(chunking, streams, 1.001) == [(index, 15) for index in range(4)]


def test_a_full_batch_leaves_the_less_urgent_out():
    chunking = make(codec_slots=2)
    streams = [grown(15, chunks=5) for _ in range(3)]
    for stream in streams:
        stream.horizon = 10.0
    chunking.update(streams[1:2], 0.5)
    assert ask(chunking, streams, 1.0) == [(1, 15), (0, 15)]


def test_who_is_due_goes_even_if_others_fill_a_call_better():
    chunking = make("streaming-balanced", codec_slots=1, chunk_wait_ms=80)
    streams = waiting(11, 15)
    chunking.update(streams[:1], 0.0)
    assert ask(chunking, streams, 1.0) == [(0, 11)]


@pytest.mark.parametrize("mode", ["streaming-low-latency", "streaming-balanced"])
def test_first_chunks_without_an_end_stop_nobody(mode):
    """Each step brings a request of one frame, and a call takes longer than a step: the codec is never idle."""
    chunking, stream, calls, waits = make(mode), grown(40, chunks=4), [], [0.0]
    streams, now = [stream], 0.0
    while now < 10:
        now += 0.01
        calls = [end for end in calls if end > now]
        streams = [one for one in streams if not one.flushed] + [Stream(known=1, final=True)]
        stream.known = stream.taken + 40
        waits[-1] += 0.01
        while len(calls) < 2 and (chosen := ask(chunking, streams, now, idle=not calls)):
            calls.append(max(calls, default=now) + 0.025)
            if (0, 15) in chosen:
                waits.append(0.0)
    assert len(waits) > 8 and max(waits) < 1.2


def test_lag_makes_chunks_grow():
    chunking = make("streaming-balanced", chunk_wait_ms=0)
    stream = grown(40, chunks=4)
    assert ask(chunking, [stream], 1.0) == [(0, 15)]


def test_pressure_makes_everything_due():
    chunking = make("streaming-balanced")
    streams = [grown(1, chunks=4), grown(3, chunks=4), grown(0, chunks=4)]
    assert ask(chunking, streams, 1.0) == []
    assert ask(chunking, streams, 1.0, pressed=True) == [(0, 1), (1, 3)]


def test_a_client_without_room_stops_its_own_stream():
    chunking = make()
    streams = [grown(30, chunks=5, room=3), grown(30, chunks=5, room=15), Stream(known=1, room=0)]
    assert [chunking.is_stalled(stream) for stream in streams] == [True, False, True]
    assert ask(chunking, streams, 1.0, pressed=True) == [(1, 15)]


def test_a_stalled_stream_neither_joins_nor_rides_nor_keeps_others_waiting():
    chunking = make("streaming-balanced", chunk_wait_ms=0, largest_chunk=8)
    for room, chosen in ((7, [(0, 8), (1, 8), (2, 8)]), (100, [(0, 8), (1, 8), (2, 8), (3, 8)])):
        assert ask(chunking, [*waiting(8, 8, 8), *waiting(30, room=room)], 1.0) == chosen
    chunking = make("streaming-balanced", chunk_wait_ms=80)
    assert ask(chunking, [*waiting(15), *waiting(30, 30, room=0)], 1.0) == [(0, 15)]


def test_what_is_taken_takes_room():
    chunking, stream = make(), grown(40, chunks=5, room=20)
    assert ask(chunking, [stream], 1.0) == [(0, 15)]
    # The client has read nothing since.
    assert ask(chunking, [stream], 1.0, pressed=True) == [] and chunking.is_stalled(stream)


def test_without_a_slot_a_request_goes_in_one_piece_when_the_codec_has_nothing_else():
    chunking, whole, other = make(), Stream(known=40, whole=True), grown(15, chunks=5)
    assert ask(chunking, [whole], 1.0, pressed=True) == []
    whole.final = True
    assert ask(chunking, [whole, other], 1.0) == [(1, 15)]
    assert ask(chunking, [whole, other], 1.0, idle=False) == []
    assert ask(chunking, [whole, other], 1.0) == [(0, 40)]


def test_a_request_without_a_slot_does_not_wait_for_ever():
    chunking, whole = make(), Stream(known=40, whole=True, final=True)
    served = []
    for step in range(110):
        other = grown(15, chunks=5)
        served += [count for index, count in ask(chunking, [whole, other], 0.01 * step) if index == 0]
    assert served == [40]


@pytest.mark.parametrize("mode", ["offline-fast", "streaming-low-latency", "streaming-balanced"])
@pytest.mark.parametrize("seed", range(5))
def test_every_frame_is_taken_once_whatever_happens(mode, seed):
    """Streams of random lengths at random speeds: each ends, no chunk is empty or too large, no wait is too long."""
    rng, chunking = random.Random(seed), make(mode)
    lengths = [rng.randrange(50) for _ in range(12)]
    streams, now = [Stream() for _ in lengths], 0.0
    while not all(stream.flushed for stream in streams):
        now += 0.01
        for stream, length in zip(streams, lengths, strict=True):
            stream.known = min(length, stream.known + rng.randrange(3))
            stream.final = stream.known == length
            stream.room = rng.choice((0, 3, 15, 100))
        for index, count in ask(chunking, streams, now, idle=rng.random() < 0.7, pressed=rng.random() < 0.05):
            assert 1 <= count <= 15 and streams[index].room >= 0
        assert now < 30
    assert [stream.taken for stream in streams] == lengths


@st.composite
def configs(draw):
    ramp = sorted(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    stream = draw(st.booleans())
    most = draw(st.integers(1, 40))
    if stream:
        most = 1 if most <= ramp[0] else most
    return EngineConfig(
        stream=stream,
        rows=8,
        max_frames=most,
        chunk_ramp=ramp if stream else ramp[-1:],
        largest_chunk=draw(st.integers(ramp[-1], 20)),
        crowd=draw(st.integers(1, 9)),
        codec_batch=draw(st.integers(1, 8)),
        chunk_wait_ms=draw(st.sampled_from((0, 50, 400))),
        final_wait_ms=draw(st.sampled_from((0, 30))),
        max_output_frames=20,
    )


@settings(max_examples=200, deadline=None)
@given(configs(), st.randoms(use_true_random=False))
def test_whatever_the_settings(config, rng):
    """No call breaks a rule, and every stream ends, soon after its last frame and its client's last delay."""
    chunking, sizes = Chunking(config, RATE), [rng.randint(0, config.max_frames) for _ in range(8)]
    streams, unread = [Stream(whole=rng.random() < 0.1) for _ in sizes], [0] * 8
    now, settled, calm = 0.0, 0.0, rng.uniform(0, 0.5)
    while not all(stream.flushed for stream in streams):
        now += 0.01
        hostile = now < calm
        settled = settled if all(stream.final for stream in streams) and not hostile else now
        for index, (stream, size) in enumerate(zip(streams, sizes, strict=True)):
            stream.known = min(size, stream.known + rng.randrange(3))
            stream.final = stream.known == size
            unread[index] -= rng.randint(0, unread[index]) if hostile else unread[index]
            stream.room = config.max_output_frames - unread[index] if config.stream else math.inf
        live = [stream for stream in streams if not stream.flushed]
        pressed, idle = hostile and rng.random() < 0.02, not hostile or rng.random() < 0.5
        chunking.update(live, now, pressed=pressed)
        chosen = chunking.select(live, now, idle=idle, pressed=pressed)
        assert len({stream for stream, _ in chosen}) == len(chosen) <= config.batch
        ready = [stream for stream, _ in chosen if stream.ripe_since is not None]
        assert ready or not chosen
        if any(stream.whole for stream in ready):
            ((stream, count),) = chosen
            assert idle and stream.final and count == stream.pending
            chunking.take(stream, count, now)
            continue
        for stream, count in chosen:
            assert isinstance(count, int) and 1 <= count <= min(stream.pending, config.largest_chunk, stream.room)
            assert not (stream.whole or chunking.is_stalled(stream))
            assert idle or (config.stream and not stream.chunks)
            unread[streams.index(stream)] += count
            chunking.take(stream, count, now)
        calls, turns = 2 + config.max_frames // config.largest_chunk, 1 + math.ceil(8 / config.batch)
        assert now < settled + calls * (config.final_wait_ms / 1e3 + 0.01 * turns) + 0.02

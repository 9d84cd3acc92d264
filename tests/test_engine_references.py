"""The cache of reference audio: encoded once, kept within a bound, and one bad clip fails alone."""

import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from moss_runtime.engine.references import ReferenceCache, codec_identity
from moss_runtime.engine.stats import Stats
from moss_runtime.errors import AudioError
from moss_runtime.model.codec import Codec

GOLDEN = Path(__file__).parent / "golden"


class Encoder:
    """Codes of a clip are its first samples; it notes what was encoded together, and waits when told to."""

    def __init__(self):
        self.batches, self.gate = [], threading.Event()
        self.gate.set()

    def __call__(self, clips):
        self.batches.append(len(clips))
        assert self.gate.wait(10)
        for clip in clips:
            if clip.isnan().any():
                raise AudioError("not finite")
        return [clip[:1, :4].T.long() for clip in clips]


@pytest.fixture
def encode():
    return Encoder()


@pytest.fixture
def make(encode):
    caches = []

    def make(identity=b"codec", **options):
        caches.append(
            ReferenceCache(encode, identity, Stats(), **{"capacity": 10**6, "batch": 4, "wait_s": 0.02} | options)
        )
        return caches[-1]

    yield make
    encode.gate.set()
    for cache in caches:
        cache.close()


def clip(value, length=6):
    return torch.full((2, length), float(value))


def counts(cache):
    names = ("hits", "joins", "misses", "failures", "evictions")
    return {name: cache._stats.value(f"reference_{name}") for name in names if cache._stats.value(f"reference_{name}")}


def test_the_second_time_nothing_is_encoded(make, encode):
    cache = make()
    first, second = (cache.get(clip(3)).result(5) for _ in range(2))
    assert first.dtype == torch.int16 and first.tolist() == [[3]] * 4
    assert torch.equal(first, second) and encode.batches == [1]
    assert counts(cache) == {"hits": 1, "misses": 1}


def test_who_changes_an_answer_changes_his_own(make):
    cache = make()
    cache.get(clip(3)).result(5).fill_(9)
    cache.get(clip(3)).result(5).fill_(9)
    assert cache.get(clip(3)).result(5).tolist() == [[3]] * 4


def test_a_clip_may_change_after_it_was_given(make, encode):
    cache = make()
    encode.gate.clear()
    held = clip(1)
    future = cache.get(held)
    held.fill_(5)
    encode.gate.set()
    assert future.result(5).tolist() == [[1]] * 4
    assert cache.get(held).result(5).tolist() == [[5]] * 4


def test_all_who_ask_meanwhile_wait_for_one_encoding(make, encode):
    cache = make()
    encode.gate.clear()
    futures = [cache.get(clip(7)) for _ in range(50)]
    assert cache.waiting == 1 and not futures[0].done()
    encode.gate.set()
    answers = [future.result(5) for future in futures]
    assert encode.batches == [1] and counts(cache) == {"joins": 49, "misses": 1}
    answers[0].fill_(0)
    assert answers[1].tolist() == [[7]] * 4


def test_who_cancels_harms_nobody(make, encode):
    cache = make()
    encode.gate.clear()
    gone, kept = cache.get(clip(7)), cache.get(clip(7))
    assert gone.cancel()
    encode.gate.set()
    assert kept.result(5).tolist() == [[7]] * 4
    assert cache.get(clip(8)).result(5).tolist() == [[8]] * 4


def test_clips_that_come_together_are_encoded_together(make, encode):
    cache = make(wait_s=5)
    wait([cache.get(clip(value)) for value in range(4)], 4)
    assert encode.batches == [4]
    cache = make(wait_s=0.001)
    cache.get(clip(1)).result(5)
    assert encode.batches == [4, 1]


def test_a_bad_clip_fails_alone_and_is_not_remembered(make, encode):
    cache = make(wait_s=5)
    futures = [cache.get(clip(value)) for value in (1, float("nan"), 2, 3)]
    assert [future.result(5).tolist() for future in (futures[0], *futures[2:])] == [
        [[value]] * 4 for value in (1, 2, 3)
    ]
    with pytest.raises(AudioError, match="not finite"):
        futures[1].result(5)
    assert encode.batches == [4, 1, 1, 1, 1]
    with pytest.raises(AudioError):
        futures = [cache.get(clip(value)) for value in (float("nan"), 4, 5, 6)]
        futures[0].result(5)
    assert counts(cache)["failures"] == 2 and counts(cache)["misses"] == 8


def test_the_least_recently_used_goes_when_there_is_no_room(make, encode):
    cache = make(capacity=2 * 4 * 2, batch=1)
    for value in (1, 2, 1, 3):
        cache.get(clip(value)).result(5)
    assert cache.bytes == 16 and counts(cache) == {"hits": 1, "misses": 3, "evictions": 1}
    cache.get(clip(1)).result(5)
    assert len(encode.batches) == 3
    cache.get(clip(2)).result(5)
    assert len(encode.batches) == 4
    tiny = make(capacity=7, batch=1)
    for _ in range(2):
        tiny.get(clip(1)).result(5)
    assert tiny.bytes == 0 and counts(tiny) == {"misses": 2}


def test_a_clip_is_known_by_its_samples_its_shape_and_the_codec(make):
    cache = make()
    keys = {cache._key(one) for one in (clip(1), clip(1, 5), clip(1).view(1, 12), clip(1).double(), clip(2))}
    keys.add(make(b"other codec")._key(clip(1)))
    assert len(keys) == 6
    assert cache._key(clip(1)) == cache._key(clip(1, 9)[:, :6].contiguous())


def test_closing_fails_what_waits(make, encode):
    cache = make(batch=1)
    encode.gate.clear()
    first, second = cache.get(clip(1)), cache.get(clip(2))
    while not encode.batches:
        time.sleep(0.001)
    threading.Timer(0.05, encode.gate.set).start()
    cache.close()
    assert first.result(5).tolist() == [[1]] * 4
    with pytest.raises(RuntimeError, match="closed"):
        second.result(5)
    with pytest.raises(RuntimeError, match="closed"):
        cache.get(clip(3))


def test_codes_of_a_clip_are_those_it_has_alone():
    codec = Codec.from_pretrained(GOLDEN / "codec")
    clips = [torch.rand(2, length) - 0.5 for length in (100, 33, 57)]
    cache = ReferenceCache(codec.encode, codec_identity(codec), Stats(), capacity=10**6, batch=3, wait_s=1)
    try:
        answers = [future.result(10) for future in [cache.get(one) for one in clips]]
    finally:
        cache.close()
    for one, answer in zip(clips, answers, strict=True):
        assert torch.equal(answer.long(), codec.encode([one])[0])


def test_identity_changes_with_the_weights():
    codec = Codec.from_pretrained(GOLDEN / "codec")
    before = codec_identity(codec)
    assert codec_identity(Codec.from_pretrained(GOLDEN / "codec")) == before
    assert codec_identity(Codec.from_pretrained(GOLDEN / "codec_mono")) != before
    next(iter(codec.quantizer.parameters())).data.flatten()[0] += 1
    assert codec_identity(codec) != before

"""Encoding clips of many requests: codes are those of each clip alone, whoever else is there."""

import pytest
import torch

from moss_runtime.errors import AudioError
from moss_runtime.graphs.clip_encoder import ClipEncoder
from moss_runtime.graphs.codec_weights import encoder_weights
from moss_runtime.model.codec import Codec
from moss_runtime.random_weights import codec_config, random_codec

# Samples of a frame: 8. Nothing whole, an end in a frame, whole frames, the largest bucket, beyond all of them.
CLIPS = (5, 33, 32, 96, 7, 17, 200)


@pytest.fixture
def codec(golden):
    return Codec.from_pretrained(golden("codec").directory)


def clips(lengths=CLIPS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, length, generator=generator) for length in lengths]


@pytest.mark.parametrize("name", ["codec", "codec_mono"])
def test_codes_are_the_recorded_ones(golden, name):
    recorded = golden(name)
    audio, lengths = recorded.expected["encode.audio"], recorded.expected["encode.lengths"].tolist()
    codec = Codec.from_pretrained(recorded.directory)
    encoder = ClipEncoder(codec, 2, lengths=(max(lengths) + 3,))
    expected = recorded.expected["encode.codes"].permute(1, 2, 0)
    for codes, row, length in zip(encoder(list(audio)), expected, lengths, strict=True):
        assert length and torch.equal(codes, row[:length])


def test_columns_of_input_projections_make_the_patch_step_a_view(codec):
    for stage, index in zip(encoder_weights(codec), (1, 3, 5), strict=True):
        patch, module = codec.encoder[index - 1], codec.encoder[index]
        x = torch.randn(2, 3 * patch.patch_size, stage.config.input_size // patch.patch_size)
        actual = x.reshape(2, 3, -1) @ stage.input_proj.T
        torch.testing.assert_close(actual, module.input_proj(patch(x)))
    assert [stage.tokens_per_frame for stage in encoder_weights(codec)] == [4, 2, 1]


def test_an_encoder_must_end_with_a_transformer(codec):
    codec.encoder.append(codec.encoder[0])
    with pytest.raises(ValueError, match="ends with a transformer, got Patch"):
        ClipEncoder(codec, 1)


def test_codes_are_those_of_each_clip_alone(codec):
    encoder, given = ClipEncoder(codec, 2, lengths=(12, 4)), clips()
    encoded = encoder(given)
    assert [len(codes) for codes in encoded] == [length // 8 for length in CLIPS]
    for clip, codes in zip(given, encoded, strict=True):
        assert torch.equal(codes, codec.encode([clip])[0])
    # Nothing of an earlier pass is left.
    for clip, codes in zip(reversed(given), reversed(encoded), strict=True):
        assert torch.equal(encoder([clip])[0], codes)
    assert encoder([]) == []


def test_the_shape_of_a_pass_follows_from_the_length_alone(codec, monkeypatch):
    encoder, shapes = ClipEncoder(codec, 2, lengths=(4, 12)), []
    encode = codec.quantizer.encode

    def noted(hidden, frames):
        shapes.append((*hidden.shape[:2], frames.tolist()))
        return encode(hidden, frames)

    monkeypatch.setattr(codec.quantizer, "encode", noted)
    encoder(clips())
    # Four clips of at most 4 frames are two passes, the two longer ones of at most 12 one, and the longest is alone.
    assert shapes == [(2, 4, [0, 4]), (2, 4, [0, 2]), (2, 12, [4, 12]), (1, 25, [25])]
    assert encoder.graphs.fallbacks.total() == 4


@pytest.mark.parametrize(
    ("clip", "message"),
    [(torch.zeros(1, 32), r"must be \[2, samples\], got \[1, 32\]"), (torch.zeros(2, 0), "has no samples")],
)
def test_what_the_codec_would_not_take(codec, clip, message):
    with pytest.raises(AudioError, match=f"clip 1 {message}"):
        ClipEncoder(codec, 2, lengths=(4,))([*clips((32,)), clip])


def test_features_that_are_not_finite_are_no_codes(codec):
    encoder = ClipEncoder(codec, 2, lengths=(4,))
    good = clips((32,))[0]
    with pytest.raises(AudioError, match=r"overflow in torch\.float32"):
        encoder([good, torch.full((2, 16), 1e38)])
    assert torch.equal(encoder([good])[0], codec.encode([good])[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "rows", "passes"), [("tiny", 4, 3), ("full", 4, 3), ("full", 1, 7)])
def test_graphs_give_the_codes_of_a_clip_alone(size, rows, passes):
    config = codec_config(size)
    codec = random_codec(config, device="cuda", dtype=torch.bfloat16, encoder=True)
    encoder = ClipEncoder(codec, rows, lengths=(25, 50))
    encoder.warm_up()
    given = [torch.rand(2, int(seconds * config.sampling_rate)) - 0.5 for seconds in (3, 1, 2.5, 3.3, 4, 0.5, 3)]
    together = encoder(given)
    for clip, codes in zip(given, together, strict=True):
        assert torch.equal(encoder([clip])[0], codes)
    graphs, eager = encoder.graphs, ClipEncoder(codec, rows, lengths=(25, 50), graphs=False)
    assert graphs.replays == passes + 7 and not graphs.fallbacks
    for codes, other in zip(together, eager(given), strict=True):
        assert torch.equal(codes, other)


@pytest.mark.gpu
def test_bfloat16_codes_are_as_close_to_float32_as_those_of_the_eager_encoder():
    """In the mean of some clips: from one code that differs on, those of its frame differ, so single clips vary."""
    config = codec_config("full")
    generator = torch.Generator().manual_seed(5)
    given = [torch.rand(2, 40 * config.samples_per_frame, generator=generator) - 0.5 for _ in range(10)]
    exact = random_codec(config, device="cuda", encoder=True).encode(given)
    codec = random_codec(config, device="cuda", dtype=torch.bfloat16, encoder=True)
    encoded = {"eager": codec.encode(given), "new": ClipEncoder(codec, 1)(given)}
    share = {
        name: torch.stack([(a.cpu() == b.cpu()).float().mean() for a, b in zip(codes, exact, strict=True)]).mean()
        for name, codes in encoded.items()
    }
    assert share["new"] > max(share["eager"] - 0.05, 0.2), share

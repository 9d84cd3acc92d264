"""Encoding clips, and input that the codec refuses."""

import dataclasses

import pytest
import torch
from torch import nn

from moss_runtime.errors import AudioError, CheckpointError, UserError
from moss_runtime.model.codec import Codec
from moss_runtime.model.codec.config import QuantizerConfig
from moss_runtime.model.codec.quantizer import Codebook, Quantizer

LENGTHS = [331, 8, 7, 96, 200]


@pytest.fixture(scope="module")
def codec(golden):
    return Codec.from_pretrained(golden("codec").directory)


def test_codes_do_not_depend_on_the_batch(codec):
    clips = [torch.randn(2, length) for length in LENGTHS]
    together = codec.encode(clips)
    assert [tuple(codes.shape) for codes in together] == [(length // 8, 12) for length in LENGTHS]
    for clip, codes in zip(clips, together, strict=True):
        assert torch.equal(codec.encode([clip])[0], codes)


def test_codes_of_a_padded_batch_equal_those_alone(codec):
    clips = [torch.randn(2, length) for length in LENGTHS]
    padded = torch.stack([nn.functional.pad(clip, (0, max(LENGTHS) - clip.shape[1])) for clip in clips])
    batch = codec.encode_padded(padded, torch.tensor(LENGTHS))
    for clip, row in zip(clips, batch, strict=True):
        alone = codec.encode([clip])[0]
        assert torch.equal(row[: len(alone)], alone)


def test_codes_of_padding_depend_on_the_biases_alone(codec):
    hidden = torch.randn(2, 6, codec.config.quantizer.input_size)
    codes = codec.quantizer.encode(hidden, torch.tensor([2, 0]))
    assert torch.equal(codes[0, 2:], codes[1, 2:])
    assert (codes[1] == codes[1, 0]).all()
    assert not torch.equal(codes[0, :2], codes[1, :2])


def test_the_first_of_equal_neighbours_wins():
    codebook = Codebook(QuantizerConfig(4, 4, 4, 1, 8, 4))  # equal sizes: no projections
    codebook.codebook.weight.data = torch.eye(4)[[3, 2, 1, 1, 0, 1, 0, 2]] * torch.arange(1, 9)[:, None]
    found = codebook.nearest(torch.eye(4)[None] * 0.3)
    assert found.tolist() == [[4, 2, 1, 0]]


def test_projection_of_equal_sizes_is_absent():
    quantizer = Quantizer(QuantizerConfig(16, 16, 24, 2, 8, 4))
    assert isinstance(quantizer.input_proj, nn.Identity)
    assert quantizer.output_proj.weight.shape == (24, 16, 1)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (torch.zeros(1, 80), r"clip 1 must be \[2, samples\], got \[1, 80\]"),
        (torch.zeros(80), r"clip 1 must be \[2, samples\], got \[80\]"),
        (torch.zeros(2, 0), "clip 1 has no samples"),
        (torch.zeros(2, 80, dtype=torch.int16), "clip 1 must be floating point, got torch.int16"),
        (torch.full((2, 80), float("nan")), "clip 1 holds NaN or infinite samples"),
        (torch.full((2, 80), float("inf")), "clip 1 holds NaN or infinite samples"),
    ],
)
def test_unusable_clips_are_named(codec, clip, message):
    with pytest.raises(AudioError, match=message):
        codec.encode([torch.zeros(2, 80), clip])


def test_features_that_are_not_finite_are_no_codes(golden):
    codec = Codec.from_pretrained(golden("codec").directory)
    codec.encoder[1].input_proj.weight[0, 0] = torch.nan
    with pytest.raises(AudioError, match=r"features overflow in torch\.float32, or the codec's weights are corrupt"):
        codec.encode([torch.zeros(2, 80)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_codes_of_any_integer_type(golden, dtype):
    # 256 codes: a size that a byte cannot hold must not wrap around when codes are compared with it.
    codec = Codec.from_pretrained(golden("codec").directory)
    codec.config = dataclasses.replace(
        codec.config, quantizer=dataclasses.replace(codec.config.quantizer, codebook_size=256)
    )
    codes = torch.randint(0, 64, (1, 3, 12))
    expected = codec.decode(codes)
    assert torch.equal(codec.decode(codes.to(dtype)), expected)
    assert torch.equal(codec.streaming(1).step(codes.to(dtype), [0], [3]), codec.streaming(1).step(codes, [0], [3]))


@pytest.mark.parametrize("code", [-1, 64, 1024])
def test_code_out_of_range_is_placed(codec, code):
    codes = torch.zeros(2, 5, 12, dtype=torch.int64)
    codes[1, 3, 7] = code
    with pytest.raises(UserError, match=f"in 0..63, got {code} at row 1, frame 3, codebook 7"):
        codec.decode(codes)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(2, 5, 11, dtype=torch.int64), r"must be \[B, T, 12\], got \[2, 5, 11\]"),
        (torch.zeros(5, 12, dtype=torch.int64), r"must be \[B, T, 12\], got \[5, 12\]"),
        (torch.zeros(2, 5, 12), "must be integers, got torch.float32"),
    ],
)
def test_codes_of_the_wrong_kind(codec, codes, message):
    with pytest.raises(UserError, match=message):
        codec.decode(codes)


def test_what_is_no_tensor(codec):
    with pytest.raises(TypeError, match="clip 0 must be a tensor, got list"):
        codec.encode([[0.0] * 80])
    with pytest.raises(TypeError, match="`codes` must be a tensor, got list"):
        codec.decode([[0] * 12])


def test_no_frames_give_no_audio(codec):
    nothing = torch.zeros(2, 0, 12, dtype=torch.int64)
    assert codec.decode(nothing).shape == (2, 2, 0)
    assert codec.streaming(2).step(nothing, [0, 1], [0, 0]).shape == (2, 2, 0)


def test_missing_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        Codec.from_pretrained(tmp_path / "nowhere")


def test_dtypes(golden):
    codec = Codec.from_pretrained(golden("codec").directory, dtype=torch.bfloat16)
    assert codec.dtype == codec.encoder[1].input_proj.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in codec.quantizer.parameters()} == {torch.float32}
    assert codec.streaming(1).slots.stages[0].keys.dtype == torch.bfloat16
    assert codec.decode(torch.zeros(1, 2, 12, dtype=torch.int16)).dtype == torch.float32

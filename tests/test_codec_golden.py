"""Codec parity in fp32 with what the official implementation computed, stereo and mono."""

import pytest
import torch

from moss_runtime.model.codec import Codec

TOLERANCE = 5e-6  # of the largest value: fp32 rounding through a dozen layers in another order of operations
RINGS = {0: 2, 2: 2, 4: 1}  # decoder module -> layers


@pytest.fixture(scope="module", params=["codec", "codec_mono"])
def recorded(request, golden):
    return golden(request.param)


@pytest.fixture(scope="module")
def codec(recorded):
    return Codec.from_pretrained(recorded.directory)


@pytest.fixture(scope="module")
def codes(recorded):
    return recorded.expected["codes"].permute(1, 2, 0)


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def decode_in_chunks(stream, codes, frames):
    rows, total = codes.shape[:2]
    chunks = [codes[:, start : start + frames] for start in range(0, total, frames)]
    return torch.cat([stream.step(chunk, range(rows), [chunk.shape[1]] * rows) for chunk in chunks], dim=2)


def test_quantizer_decode(codec, codes, recorded):
    assert_close(codec.quantizer.decode(codes).mT, recorded.expected["quantizer.decode"])


def test_offline_stages_and_audio(codec, codes, recorded):
    outputs = []
    hooks = [module.register_forward_hook(lambda *call: outputs.append(call[-1])) for module in codec.decoder]
    audio = codec.decode(codes)
    for hook in hooks:
        hook.remove()
    for index, output in enumerate(outputs):
        assert_close(output.mT, recorded.expected[f"offline.stage.{index}"])
    assert_close(audio, recorded.expected["offline.audio"])


@pytest.mark.parametrize("frames", [1, 3, 7, 15])
def test_reference_rings(codec, codes, recorded, frames):
    stream = codec.streaming(3, ring="reference")
    assert_close(decode_in_chunks(stream, codes, frames), recorded.expected[f"stream.{frames}.audio"])
    if frames != 7:
        return
    for rings, (module, layers) in zip(stream.slots.stages, RINGS.items(), strict=True):
        for layer in range(layers):
            held = torch.stack((rings.keys[layer, :3], rings.values[layer, :3]))
            assert_close(held, recorded.expected[f"stream.7.ring.{module}.{layer}"])
            assert rings.offset[:3].tolist() == recorded.expected[f"stream.7.offset.{module}.{layer}"].tolist()


@pytest.mark.parametrize("frames", [1, 3, 7, 15])
def test_exact_rings_equal_offline(codec, codes, recorded, frames):
    audio = decode_in_chunks(codec.streaming(3), codes, frames)
    assert_close(audio, recorded.expected["offline.audio"])


@pytest.mark.parametrize("ring", ["reference", "exact"])
def test_masked_schedule(codec, codes, recorded, ring):
    stream = codec.streaming(3, ring=ring)
    done, parts = [0, 0, 0], [[], [], []]
    for executes in recorded.expected["masked.schedule"].tolist():
        chunk = torch.stack([codes[row, done[row] : done[row] + 3] for row in range(3)])
        audio = stream.step(chunk, [0, 1, 2], [3 * run for run in executes])
        for row, run in enumerate(executes):
            if run:
                parts[row].append(audio[row])
                done[row] += 3
            else:
                assert not audio[row].any()
    for row in range(3):
        audio = torch.cat(parts[row], dim=1)
        offline = recorded.expected["offline.audio"][row, :, : audio.shape[1]]
        assert_close(audio, recorded.expected[f"masked.audio.{row}"] if ring == "reference" else offline)


def test_encode_and_roundtrip(codec, recorded):
    expected = recorded.expected
    audio, lengths = expected["encode.audio"], expected["encode.lengths"]
    hidden = []
    hook = codec.encoder[-1].register_forward_hook(lambda *call: hidden.append(call[-1]))
    codes = codec.encode_padded(audio, torch.tensor([audio.shape[2]] * 2))
    hook.remove()
    assert_close(hidden[0].mT, expected["encode.hidden"])
    assert torch.equal(codes, expected["encode.codes"].permute(1, 2, 0))
    assert [len(clip) for clip in codec.encode(list(audio))] == lengths.tolist()
    assert_close(codec.decode(codes), expected["roundtrip.audio"])

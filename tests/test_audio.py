"""Audio files: every format and rate in, clear refusals, WAV out that appears complete or not at all."""

import os
import struct

import numpy as np
import pytest
import soundfile
import torch

from moss_runtime.audio import load_audio, save_wav, wav_writer
from moss_runtime.errors import AudioError, UserError


def tone(frames, channels=2, rate=48_000, frequency=440.0):
    phase = 2 * np.pi * frequency * np.arange(frames) / rate
    return np.stack([0.5 * np.sin(phase + channel) for channel in range(channels)], axis=1).astype(np.float32)


def write(path, samples, rate=48_000, subtype=None):
    soundfile.write(path, samples, rate, subtype=subtype)
    return path


@pytest.mark.parametrize(
    ("name", "subtype", "error"),
    [
        ("a.wav", "PCM_16", 1e-4),
        ("a.wav", "FLOAT", 0),
        ("a.flac", "PCM_24", 1e-6),
        ("a.ogg", "VORBIS", 0.05),
        ("a.ogg", "OPUS", 0.1),
        ("a.mp3", None, 0.05),
    ],
)
def test_formats(tmp_path, name, subtype, error):
    samples = tone(24_000)
    audio = load_audio(write(tmp_path / name, samples, subtype=subtype))
    assert audio.dtype == torch.float32 and audio.shape == (2, 24_000)
    middle = slice(2_000, 22_000)
    assert (audio[:, middle] - torch.from_numpy(samples.T)[:, middle]).abs().max() <= error


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 96_000, 192_000])
def test_resampling_keeps_pitch_and_length(tmp_path, rate):
    audio = load_audio(write(tmp_path / "a.wav", tone(rate, rate=rate, frequency=1000.0), rate, "FLOAT"))
    assert audio.shape == (2, 48_000)
    expected = torch.from_numpy(tone(48_000, frequency=1000.0).T)
    assert (audio - expected)[:, 4_800:-4_800].abs().max() < 2e-3


def test_mono_becomes_equal_channels(tmp_path):
    path = write(tmp_path / "a.wav", tone(480, channels=1), subtype="FLOAT")
    audio = load_audio(path)
    assert audio.shape == (2, 480) and torch.equal(audio[0], audio[1])
    audio[0].zero_()
    assert audio[1].abs().max() > 0.1, "the channels share their memory"
    assert load_audio(path, channels=1).shape == (1, 480)


def test_stereo_for_a_mono_codec_is_the_mean(tmp_path):
    samples = tone(480)
    audio = load_audio(write(tmp_path / "a.wav", samples, subtype="FLOAT"), channels=1)
    torch.testing.assert_close(audio[0], torch.from_numpy(samples.mean(axis=1)))


def test_more_than_two_channels_only_when_asked(tmp_path):
    samples = tone(480, channels=6)
    path = write(tmp_path / "a.wav", samples, subtype="FLOAT")
    with pytest.raises(AudioError, match="6 channels"):
        load_audio(path)
    audio = load_audio(path, downmix=True)
    torch.testing.assert_close(audio, torch.from_numpy(samples.mean(axis=1)).expand(2, -1))


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.02])
def test_truncated(tmp_path, name, kept):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (48_000, 2))
    path = write(tmp_path / name, noise)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(AudioError, match=r"truncated|damaged"):
        load_audio(path)


def test_ogg_without_its_last_page(tmp_path):
    path = write(tmp_path / "a.ogg", tone(48_000), subtype="VORBIS")
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"OggS")])
    with pytest.raises(AudioError, match="truncated"):
        load_audio(path)


def test_a_header_that_claims_more_than_any_memory(tmp_path):
    path = write(tmp_path / "a.flac", tone(4_800))
    data = bytearray(path.read_bytes())
    data[21] |= 0x0F  # the 36 bits of the number of samples in STREAMINFO
    data[22:26] = b"\xff" * 4
    path.write_bytes(data)
    # Where memory that is never touched may be promised, the file turns out to be shorter.
    with pytest.raises(AudioError, match=r"claims 68719476735 samples|truncated|damaged"):
        load_audio(path)


@pytest.mark.parametrize("missing", [1, 2, 4_000])
def test_wav_that_lacks_its_last_bytes(tmp_path, missing):
    path = write(tmp_path / "a.wav", tone(4_800), subtype="PCM_16")
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(AudioError, match="truncated"):
        load_audio(path)


def test_wav_from_a_pipe_has_no_length(tmp_path):
    path = write(tmp_path / "a.wav", tone(4_800), subtype="PCM_16")
    data = path.read_bytes()
    at = data.index(b"data") + 4
    path.write_bytes(data[:at] + struct.pack("<I", 0xFFFFFFFF) + data[at + 4 :])
    assert load_audio(path).shape == (2, 4_800)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(tmp_path, value):
    samples = tone(480)
    samples[100, 1] = value
    with pytest.raises(AudioError, match="not finite"):
        load_audio(write(tmp_path / "a.wav", samples, subtype="FLOAT"))


def test_empty_and_too_short(tmp_path):
    with pytest.raises(AudioError, match="no audio"):
        load_audio(write(tmp_path / "a.wav", tone(0)))
    with pytest.raises(AudioError, match="less than one"):
        load_audio(write(tmp_path / "b.wav", tone(1), rate=192_000), sampling_rate=8_000)


@pytest.mark.parametrize("rate", [7_999, 192_001])
def test_rate_out_of_range(tmp_path, rate):
    with pytest.raises(AudioError, match=f"8000 .. 192000 Hz, got {rate}"):
        load_audio(write(tmp_path / "a.wav", tone(480), rate))


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.raw", "a.txt"])
@pytest.mark.parametrize("content", [b"", b"This is not audio at all. " * 50])
def test_not_audio(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(AudioError) as error:
        load_audio(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_missing_and_directory(tmp_path):
    with pytest.raises(AudioError, match="no such file"):
        load_audio(tmp_path / "none.wav")
    with pytest.raises(AudioError, match="not a regular file"):
        load_audio(tmp_path)


def test_pcm_16_clips_and_rounds(tmp_path):
    values = torch.tensor([[0.0, 1.0, -1.0, 7.0, -7.0, 0.5, 1.4 / 32768, -1.6 / 32768]])
    save_wav(tmp_path / "a.wav", values, 24_000)
    written, rate = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert rate == 24_000
    assert written.tolist() == [0, 32767, -32768, 32767, -32768, 16384, 1, -2]


def test_float_is_exact(tmp_path):
    audio = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)) * 2
    save_wav(tmp_path / "a.wav", audio, 48_000, subtype="FLOAT")
    assert torch.equal(load_audio(tmp_path / "a.wav"), audio)


def test_pieces_equal_the_whole(tmp_path):
    audio = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) - 0.5
    save_wav(tmp_path / "whole.wav", audio, 48_000)
    with wav_writer(tmp_path / "pieces.wav", 48_000, 2) as write_piece:
        for piece in audio.split([0, 1, 399, 600], dim=1):
            write_piece(piece)
        assert not (tmp_path / "pieces.wav").exists()
    assert (tmp_path / "pieces.wav").read_bytes() == (tmp_path / "whole.wav").read_bytes()


def test_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(b"older")
    with pytest.raises(AudioError, match="finite"), wav_writer(path, 48_000, 2) as write_piece:
        write_piece(torch.zeros(2, 100))
        write_piece(torch.full((2, 1), torch.nan))
    assert path.read_bytes() == b"older" and os.listdir(tmp_path) == ["a.wav"]


@pytest.mark.parametrize("name", ["a.mp3", "a.FLAC", "a.safetensors"])
def test_a_name_of_another_format(tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}: would be a \.wav file; name it so"):
        save_wav(tmp_path / name, torch.zeros(2, 10), 48_000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "a.WAV", "a.b.wav"])
def test_names_of_a_wav_file(tmp_path, name):
    save_wav(tmp_path / name, torch.zeros(2, 10), 48_000)
    assert os.listdir(tmp_path) == [name]


def test_unwritable(tmp_path):
    audio = torch.zeros(2, 10)
    with pytest.raises(UserError, match="No such file or directory"):
        save_wav(tmp_path / "none" / "a.wav", audio, 48_000)
    with pytest.raises(UserError, match="not a regular file"):
        save_wav(tmp_path, audio, 48_000)
    with pytest.raises(UserError, match="not a regular file"):
        save_wav("/dev/null", audio, 48_000)
    with pytest.raises(AudioError, match="got 'PCM_8'"):
        save_wav(tmp_path / "a.wav", audio, 48_000, subtype="PCM_8")
    with pytest.raises(AudioError, match=r"\[C, n\], got \(10,\)"):
        save_wav(tmp_path / "a.wav", audio[0], 48_000)
    with pytest.raises(AudioError, match=r"floating point with full scale 1, got torch\.int16"):
        save_wav(tmp_path / "a.wav", audio.short(), 48_000)
    with pytest.raises(UserError, match="names a directory"):
        save_wav(f"{tmp_path}/a.wav/", audio, 48_000)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"channels": 3}, {"channels": 0}, {"sampling_rate": 0}, {"sampling_rate": 2**31}])
def test_impossible_wishes(tmp_path, options):
    save_wav(tmp_path / "a.wav", torch.zeros(2, 10), 48_000)
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        load_audio(tmp_path / "a.wav", **options)


def test_names_of_the_longest_length(tmp_path):
    save_wav(tmp_path / ("x" * 255), torch.zeros(2, 10), 48_000)
    assert os.listdir(tmp_path) == ["x" * 255]
    with pytest.raises(UserError, match="File name too long"):
        save_wav(tmp_path / ("x" * 256), torch.zeros(2, 10), 48_000)
    with pytest.raises(AudioError, match="no such file"):
        load_audio(tmp_path / ("x" * 256))


def test_symbolic_link_stays(tmp_path):
    (tmp_path / "target.wav").write_bytes(b"older")
    (tmp_path / "link.wav").symlink_to(tmp_path / "target.wav")
    save_wav(tmp_path / "link.wav", torch.zeros(2, 10), 48_000)
    assert (tmp_path / "link.wav").is_symlink() and load_audio(tmp_path / "target.wav").shape == (2, 10)

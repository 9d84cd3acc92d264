"""The demo checkpoint: the official layout, the same bytes every time, speech of a sensible length; the reference."""

import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.audio import load_audio
from moss_runtime.demo_checkpoint import is_demo, write_demo_checkpoint
from moss_runtime.errors import UserError
from moss_runtime.model.codec import Codec
from moss_runtime.model.prompt import PromptBuilder
from moss_runtime.model.tts import MossTTS

ASSETS = Path(__file__).parents[1] / "runtime" / "assets"
FILES = ["audio_tokenizer/config.json", "audio_tokenizer/model.safetensors"]
FILES += ["config.json", "model.safetensors", "tokenizer.json"]


def digests(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    write_demo_checkpoint(directory)
    return directory


def test_layout_and_size(demo):
    assert sorted(digests(demo)) == FILES
    assert sum((demo / name).stat().st_size for name in FILES) < 8e6
    assert is_demo(demo) and is_demo(demo / "audio_tokenizer") and not is_demo(demo.parent)
    umask = os.umask(0)
    os.umask(umask)
    assert {(demo / name).stat().st_mode & 0o777 for name in FILES} == {0o666 & ~umask}


def test_same_bytes_in_another_process(demo, tmp_path):
    code = f"from moss_runtime.demo_checkpoint import *; write_demo_checkpoint({str(tmp_path / 'again')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert digests(tmp_path / "again") == digests(demo)
    assert os.listdir(tmp_path) == ["again"]


def test_a_directory_with_other_files_is_left_alone(demo, tmp_path):
    before = digests(demo)
    write_demo_checkpoint(demo)
    assert digests(demo) == before
    (tmp_path / "config.json").write_text('{"_name_or_path": "someone/else"}')
    with pytest.raises(UserError, match="holds other files"):
        write_demo_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
    with pytest.raises(UserError, match="cannot be written"):
        write_demo_checkpoint(tmp_path / "none" / "demo")
    with pytest.raises(UserError, match="cannot be written"):
        write_demo_checkpoint(tmp_path / "config.json")


def test_speech_grows_with_the_text_and_stops(demo):
    model = MossTTS.from_pretrained(demo)
    prompts = PromptBuilder(demo / "tokenizer.json", model.config)
    sentence = "The harbour lights go out one by one. "

    def lengths(text):
        results = model.generate([prompts.build(text)] * 4, [SamplingParams(seed=i) for i in range(4)], max_frames=400)
        assert {result.finish_reason for result in results} == {"stop"}
        return torch.tensor([float(len(result.codes)) for result in results])

    short, long = lengths(sentence), lengths(sentence * 6)
    assert short.min() > 12 and short.max() < 130
    assert long.mean() > 1.5 * short.mean()


def test_codec_has_the_rates_of_the_real_one_and_a_safe_level(demo):
    codec = Codec.from_pretrained(demo / "audio_tokenizer")
    config = codec.config
    assert (config.sampling_rate, config.channels, config.samples_per_frame) == (48_000, 2, 3840)
    assert (config.codebooks, config.codebook_size, config.frame_rate) == (12, 1024, 12.5)
    codes = torch.randint(1024, (1, 50, 12), generator=torch.Generator().manual_seed(0))
    audio = codec.decode(codes)
    assert audio.shape == (1, 2, 50 * 3840) and audio.std() > 0.02 and audio.abs().max() < 1


def test_the_codec_tells_recordings_apart(demo):
    codec = Codec.from_pretrained(demo / "audio_tokenizer")
    codes = codec.encode([load_audio(ASSETS / "reference.wav")])[0]
    assert codes.shape == (37, 12)
    assert len(codes.unique(dim=0)) > 25


def test_the_reference_recording_is_what_its_script_makes():
    phrase = runpy.run_path(str(ASSETS / "make_reference.py"))["phrase"]()
    shipped = load_audio(ASSETS / "reference.wav", sampling_rate=24_000, channels=1)[0]
    assert (ASSETS / "reference.wav").stat().st_size < 300_000
    assert (shipped - torch.from_numpy(phrase)).abs().max() <= 1 / 32768

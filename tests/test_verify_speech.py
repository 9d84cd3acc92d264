"""`moss-tts verify --asr --speaker`: error rates, and what is made of the models of others, here stand-ins."""

import itertools
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moss_runtime.cli import main
from moss_runtime.demo_checkpoint import write_demo_checkpoint
from moss_runtime.verify.speech import edit_distance, error_rate, error_rates, plain, similarity

WORDS = st.lists(st.sampled_from("abc"), max_size=6)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("abcd", "bcd", 1), ("ab", "ba", 2)],
)
def test_edit_distance(one, other, distance):
    assert edit_distance(one, other) == distance


@given(WORDS, WORDS, WORDS)
def test_edit_distance_is_a_distance(one, other, third):
    assert (edit_distance(one, other) == 0) == (one == other)
    assert edit_distance(one, other) == edit_distance(other, one) >= abs(len(one) - len(other))
    assert edit_distance(one, third) <= edit_distance(one, other) + edit_distance(other, third)


def test_neither_case_nor_punctuation_is_heard():
    assert plain("  Don\u2019t   STOP--now, \u00dcn\u00efted \uff21\uff22! ") == "dont stop now \u00fcn\u00efted ab"
    assert plain("\u4f60\u597d\uff0c1 2.") == "\u4f60\u597d 1 2"


def test_rates_are_of_all_texts_together():
    texts, heard = ["one two three four", "five"], ["One, two tree", "five six"]
    # A substitution, a deletion, an insertion.
    assert error_rate(texts, heard, str.split) == 3 / 5
    words, characters = error_rates(texts, heard, texts, "graph")
    assert (words.error, words.bound, words.passed) == (3 / 5, 0.1, False)
    assert characters.error == (1 + 4 + 3) / 19 and "60.0%, from the eager model 0.0%" in words.note
    assert all(result.passed for result in error_rates(texts, heard, heard, "graph"))
    assert all(result.passed for result in error_rates(texts, ["", ""], ["", "five"], "graph"))
    with pytest.raises(ValueError):
        error_rate(texts, heard[:1], str.split)


def test_similarity():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    result = similarity([(one, one), (one, other)], "graph")
    assert result.passed and "0.854 to the eager model, the least 0.707" in result.note
    assert not similarity([], "graph").passed


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("speech") / "demo"
    write_demo_checkpoint(directory)
    return str(directory)


class Transformers:
    """Stands in for the package: says `texts` in turn, and embeds audio as its mean square and 1."""

    def __init__(self, texts=()):
        self.texts, self.heard, self.rates = itertools.cycle(texts), [], set()
        self.AutoFeatureExtractor = SimpleNamespace(from_pretrained=lambda directory: Extractor())
        self.AutoModelForAudioXVector = SimpleNamespace(from_pretrained=lambda directory: XVector())

    def pipeline(self, task, *, model, device):
        assert task == "automatic-speech-recognition"

        def recognise(audio):
            self.heard.append(audio["raw"])
            self.rates.add(audio["sampling_rate"])
            return {"text": next(self.texts)}

        recognise.feature_extractor = SimpleNamespace(sampling_rate=16000)
        return recognise


class Extractor:
    sampling_rate = 16000

    def __call__(self, samples, *, sampling_rate, return_tensors):
        assert (sampling_rate, return_tensors) == (16000, "pt")
        return {"input_values": torch.from_numpy(numpy.asarray(samples))[None]}


class XVector(torch.nn.Module):
    def forward(self, input_values):
        return SimpleNamespace(embeddings=torch.stack((input_values.square().mean(1), torch.ones(1)), 1))


def test_both_judges(demo, tmp_path, capsys, monkeypatch):
    from moss_runtime.commands import verify

    monkeypatch.setattr(verify, "SPEECH_FRAMES", 4)
    judge = Transformers(verify.TEXTS)
    monkeypatch.setitem(sys.modules, "transformers", judge)
    options = ["--device", "cpu", "--frames", "2", "--asr", str(tmp_path), "--speaker", str(tmp_path)]
    assert main(["verify", "--model", demo, *options]) == 0
    output = capsys.readouterr().out
    (words,) = (line for line in output.splitlines() if "words misheard" in line)
    assert "0.0%, from the eager model 0.0%" in words and "characters misheard" in output
    # In float32 the runtime says what the model says.
    assert "1.000 to the eager model, the least 1.000" in output
    assert judge.rates == {16000} and len(judge.heard) == 6
    for fast, reference in zip(judge.heard[:3], judge.heard[3:], strict=True):
        assert len(fast) == len(reference) > 0 and len(fast) * 3 % 3840 == 0
        assert numpy.abs(fast - reference).max() <= 1e-4 * numpy.abs(reference).max()


def test_speech_that_is_not_understood_fails(demo, tmp_path, capsys, monkeypatch):
    from moss_runtime.commands import verify

    monkeypatch.setattr(verify, "SPEECH_FRAMES", 1)
    monkeypatch.setitem(sys.modules, "transformers", Transformers(["what?"] * 3 + [*verify.TEXTS]))
    options = ["--device", "cpu", "--frames", "2", "--asr", str(tmp_path)]
    assert main(["verify", "--model", demo, *options]) == 1
    assert "FAILED: words misheard (eager), characters misheard (eager)" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--asr", "--speaker"])
def test_refusals(demo, tmp_path, capsys, monkeypatch, option):
    def refused(directory) -> str:
        assert main(["verify", "--model", demo, "--device", "cpu", option, str(directory)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert f"{option} needs the package transformers: pip install transformers" in refused(tmp_path)
    assert f"{option}: there is no directory {tmp_path / 'none'}" in refused(tmp_path / "none")

    def broken(*_, **__):
        raise OSError("no config.json\nand more")

    part = SimpleNamespace(from_pretrained=broken)
    package = SimpleNamespace(pipeline=broken, AutoFeatureExtractor=part, AutoModelForAudioXVector=part)
    monkeypatch.setitem(sys.modules, "transformers", package)
    assert f"{option} {tmp_path}: transformers cannot load it (no config.json)" in refused(tmp_path)

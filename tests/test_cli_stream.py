"""`moss-tts synth` while it works: what `--stream` writes when, and the bar on a terminal."""

import contextlib
import io
import sys

import pytest

from moss_runtime.cli import main
from moss_runtime.commands import synth
from moss_runtime.demo_checkpoint import write_demo_checkpoint

SAMPLES_PER_FRAME = 3840


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "demo"
    write_demo_checkpoint(directory)
    return str(directory)


def run(demo, output, *options):
    """20 frames on the CPU: with the rounding of another device the request may stop earlier."""
    arguments = ["synth", "--model", demo, "-o", str(output), "--device", "cpu", "--seed", "3", "--max-frames", "20"]
    arguments += options
    assert main([*arguments, "The harbour lights go out."]) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--stream"], [1, -1, 2, -2, 4, -4, 8, -8, 5, -5]),  # frames made, frames written (negative)
        ([], [20, -20]),
    ],
)
def test_audio_is_written_while_the_codes_are_generated(demo, tmp_path, monkeypatch, options, expected):
    events = []
    generate, wav_writer = synth.generate, synth.wav_writer

    def counting(*args, on_frames, **options):
        def count(index, codes):
            if events and events[-1] > 0:
                events[-1] += len(codes)
            else:
                events.append(len(codes))
            on_frames(index, codes)

        return generate(*args, on_frames=count, **options)

    @contextlib.contextmanager
    def watching(*args):
        with wav_writer(*args) as write:

            def watch(audio):
                events.append(-audio.shape[1] // SAMPLES_PER_FRAME)
                write(audio)

            yield watch

    monkeypatch.setattr(synth, "generate", counting)
    monkeypatch.setattr(synth, "wav_writer", watching)
    run(demo, tmp_path / "out.wav", *options)
    assert events == expected


def test_the_bar_is_for_terminals_alone(demo, tmp_path, monkeypatch):
    for terminal in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        run(demo, tmp_path / "out.wav")
        assert ("generating frames" in screen.getvalue() and "20/20" in screen.getvalue()) == terminal
        assert terminal or screen.getvalue() == ""


@pytest.mark.parametrize("options", [["--stream"], []])
def test_memory_is_printed_as_planned_and_measured(demo, tmp_path, capsys, options):
    run(demo, tmp_path / "out.wav", *options)
    assert "planned" not in capsys.readouterr().out
    run(demo, tmp_path / "out.wav", "--memory", *options)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    sizes = {part.strip(): (planned.strip(), measured.strip()) for _, part, planned, measured, *_ in lines}
    for part in ("backbone weights", "KV cache", "codec state"):
        assert sizes[part][0] == sizes[part][1], part
        assert (sizes[part][0] == "0.00 MiB") == (part == "codec state" and not options), part

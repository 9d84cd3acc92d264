"""The command as a process: signals, closed and full pipes, a full disk. Nothing half-written is left behind.

All on the CPU: a process soon has its device ready there, and has the same frames everywhere.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import soundfile

from moss_runtime.demo_checkpoint import write_demo_checkpoint

# Says when the first frame is there, then waits to be stopped.
INTERRUPTED = """
import sys, time
from moss_runtime.cli import main
from moss_runtime.commands import synth
generate = synth.generate
def waiting(*args, on_frames, **options):
    def wait(*frames):
        on_frames(*frames)
        print("generating", flush=True)
        time.sleep(60)
    return generate(*args, on_frames=wait, **options)
synth.generate = waiting
sys.exit(main())
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "demo"
    write_demo_checkpoint(directory)
    return str(directory)


def command(name, demo, *options):
    return [sys.executable, "-m", "moss_runtime.cli", name, "--model", demo, *options]


def as_from_a_terminal() -> None:
    """Signals that whoever runs the tests may have set to be ignored, as `nohup` does, do their work."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "moss-tts: interrupted\n"),
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGHUP, 128 + signal.SIGHUP, ""),
    ],
)
def test_signals_leave_nothing_behind(demo, tmp_path, number, code, message):
    arguments = ["synth", "--model", demo, "--device", "cpu", "--seed", "1", "-o", "out.wav", "--stream", "hello"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_from_a_terminal,
    )
    assert process.stdout.readline() == "generating\n"
    assert len(os.listdir(tmp_path)) == 1  # the part file
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (code, message)
    assert os.listdir(tmp_path) == []


def test_a_closed_or_full_standard_output_is_one_line(demo):
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command("inspect", demo), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (2, "moss-tts: error: standard output: closed by its reader\n")
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command("inspect", demo), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "No space left" in result.stderr


def test_a_damaged_mp3_is_one_line(demo, tmp_path):
    """The decoder has much to say about it."""
    path = tmp_path / "in.mp3"
    soundfile.write(path, numpy.random.uniform(-0.5, 0.5, (48_000, 2)), 48_000)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + b"noise" * 100 + data[len(data) // 2 : -2000])
    encode = command("encode", demo, "--device", "cpu", "in.mp3", "-o", "codes")
    result = subprocess.run(encode, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "in.mp3: " in result.stderr and os.listdir(tmp_path) == ["in.mp3"]


def test_a_full_disk_leaves_nothing_behind(demo, tmp_path):
    """The limit of a file's size stands for the end of the disk."""
    result = subprocess.run(
        command("synth", demo, "--device", "cpu", "-o", "out.wav", "--seed", "1", "--max-frames", "8", "hello"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "out.wav: cannot be written" in result.stderr
    assert os.listdir(tmp_path) == []

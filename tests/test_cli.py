"""The command line: the whole path on the demo checkpoint, and one clear line for every kind of bad input."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load, load_file, save_file

from moss_runtime.audio import load_audio
from moss_runtime.cli import main
from moss_runtime.commands import inspect as inspect_command
from moss_runtime.commands import synth as synth_command
from moss_runtime.demo_checkpoint import write_demo_checkpoint
from moss_runtime.model.tts import Generation

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "runtime" / "assets" / "reference.wav"
TEXT = "The harbour lights go out."


@pytest.fixture(scope="module")
def shared_demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared") / "demo"
    write_demo_checkpoint(directory)
    return directory


@pytest.fixture
def demo(shared_demo, tmp_path, monkeypatch):
    """A working directory that holds `demo`, the checkpoint, and nothing else."""
    (tmp_path / "demo").symlink_to(shared_demo)
    monkeypatch.chdir(tmp_path)
    return shared_demo


@pytest.fixture
def own_demo(shared_demo, tmp_path, monkeypatch):
    """As `demo`, with a checkpoint that the test may damage."""
    shutil.copytree(shared_demo, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "demo"


def run(*arguments):
    """Exit code of one command; argparse's own exits included."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code


def synth(*arguments):
    return run("synth", "--model", "demo", "--output", "out.wav", *arguments)


def refused(capsys, *arguments, kept=("demo",)):
    """Runs a command that must refuse its input; returns the one line that says why."""
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("moss-tts") and "Traceback" not in error, error
    assert sorted(os.listdir()) == sorted(kept), "something was left behind"
    return error


def refused_synth(capsys, *arguments, kept=("demo",)):
    return refused(capsys, "synth", "--model", "demo", "--output", "out.wav", *arguments, kept=kept)


def summary(capsys):
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)


def test_synth_reports_what_it_wrote(demo, capsys):
    assert synth("--reference", REFERENCE, "--seed", 1, TEXT) == 0
    said = summary(capsys)
    frames = int(said["frames"].split()[0])
    audio = load_audio("out.wav")
    assert audio.shape == (2, frames * 3840) and audio.abs().max() > 0.05
    assert soundfile.info("out.wav").subtype == "PCM_16"
    assert said["seed"] == "1" and said["audio"].startswith(f"{frames * 0.08:.2f} s, 48000 Hz, 2 channels")
    assert {"load", "encode", "generate", "decode", "RTF"} <= said.keys()
    assert "demo checkpoint" in " ".join([f"{name} {value}" for name, value in said.items()])
    assert sorted(os.listdir()) == ["demo", "out.wav"]


def test_the_printed_seed_repeats_the_file(demo, capsys):
    assert synth("--max-frames", 6, TEXT) == 0
    first, seed = Path("out.wav").read_bytes(), summary(capsys)["seed"]
    assert synth("--max-frames", 6, TEXT) == 0
    assert summary(capsys)["seed"] != seed and Path("out.wav").read_bytes() != first
    assert synth("--max-frames", 6, "--seed", seed, TEXT) == 0
    assert Path("out.wav").read_bytes() == first


def test_streaming_writes_the_offline_audio(demo):
    options = ("--device", "cpu", "--seed", 3, "--max-frames", 20, "--float", TEXT)
    assert synth(*options) == 0
    offline = load_audio("out.wav")
    assert offline.shape == (2, 20 * 3840)
    assert synth("--stream", *options) == 0
    assert (load_audio("out.wav") - offline).abs().max() <= 1e-5 * offline.abs().max()


def test_text_from_argument_file_and_standard_input(demo, monkeypatch):
    options = ("--seed", 3, "--max-frames", 2)
    assert synth(*options, TEXT) == 0
    expected = Path("out.wav").read_bytes()
    Path("text.txt").write_text(TEXT + "\n", encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    assert synth(*options, "--text-file", "text.txt") == 0
    assert Path("out.wav").read_bytes() == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode() + b"\n")))
    assert synth(*options) == 0
    assert Path("out.wav").read_bytes() == expected


def test_every_option_reaches_the_prompt_and_the_sampler(demo, monkeypatch):
    seen = {}

    def generate(runtime, prompts, params, **_):
        seen.update(rows=len(prompts[0]), params=params[0], max_frames=runtime.pool.max_frames)
        raise KeyboardInterrupt

    monkeypatch.setattr(synth_command, "generate", generate)

    def rows(*options):
        assert synth(TEXT, *options) == 130
        return seen["rows"]

    plain = rows()
    for option in ("--language", "--instruction", "--quality", "--sound-event", "--ambient-sound"):
        assert rows(option, "many words of this") > plain, option
    assert rows("--tokens", 123456) > plain
    assert rows("--prompt-audio", REFERENCE) == plain + 37
    none = plain + 37 + 2 - rows("--reference", REFERENCE)  # tokens of the "None" that references replace
    assert none > 0 and rows("--reference", REFERENCE, "--reference", REFERENCE) == plain - none + 2 * (37 + 2)
    rows("--temperature", 1.1, "--top-k", 3, "--top-p", 0.5, "--repetition-penalty", 1.2, "--text-temperature", 0)
    assert seen["params"].temperature == 1.1 and seen["params"].top_k == 3 and seen["params"].top_p == 0.5
    assert seen["params"].repetition_penalty == 1.2 and seen["params"].text_temperature == 0
    rows("--text-top-k", 1, "--text-top-p", 0.9, "--max-frames", 7)
    assert seen["params"].text_top_k == 1 and seen["params"].text_top_p == 0.9 and seen["max_frames"] == 7
    assert os.listdir() == ["demo"], "an interrupted run leaves nothing behind"


def test_no_frames_give_an_empty_file(demo, capsys, monkeypatch):
    nothing = Generation(torch.empty(0, 12, dtype=torch.int64), 5, "stop")
    monkeypatch.setattr(synth_command, "generate", lambda *_, **__: [nothing])
    for options in ((), ("--stream",)):
        assert synth(TEXT, *options) == 0
        assert soundfile.info("out.wav").frames == 0 and summary(capsys)["RTF"] == "none"


def test_encode_and_decode(demo, capsys):
    assert run("encode", REFERENCE, "--model", "demo", "-o", "codes.safetensors") == 0
    codes = load_file("codes.safetensors")["codes"]
    assert codes.shape == (37, 12) and codes.min() >= 0 and codes.max() < 1024
    assert run("decode", "codes.safetensors", "--codec", "demo/audio_tokenizer", "-o", "back.wav", "--float") == 0
    assert load_audio("back.wav").shape == (2, 37 * 3840)
    assert "2.96 s" in capsys.readouterr().out


def test_init_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("init-demo", "demo") == 0
    assert "noise" in capsys.readouterr().out and (tmp_path / "demo" / "audio_tokenizer" / "config.json").exists()
    shutil.rmtree("demo")
    Path("taken").mkdir()
    Path("taken/file").write_text("mine")
    assert "holds other files" in refused(capsys, "init-demo", "taken", kept=["taken"])


def test_the_installed_program_refuses_with_exit_code_2(demo):
    program = [sys.executable, "-m", "moss_runtime.cli", "synth", "--model", "demo", "-o", "out.wav", " "]
    result = subprocess.run(program, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "moss-tts: error: the text is empty\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1", "x"], "temperature"),
        (["--temperature", "nan", "x"], "temperature"),
        (["--top-p", "1.5", "x"], "top_p"),
        (["--top-p", "0", "x"], "top_p"),
        (["--repetition-penalty", "0", "x"], "repetition_penalty"),
        (["--text-top-p", "inf", "x"], "text_top_p"),
        (["--seed", "-1", "x"], "seed"),
        (["--seed", str(2**63), "x"], "seed"),
        (["--top-k", "many", "x"], "--top-k: invalid int value: 'many'"),
        (["--max-frames", "0", "x"], "--max-frames: must be a positive integer below 2^31, got '0'"),
        (["--tokens", "-3", "x"], "--tokens: must be a positive integer below 2^31, got '-3'"),
        (["--dtype", "int8", "x"], "--dtype: invalid choice: 'int8'"),
        (["--dtype", "float16", "x"], "must be in float32 or bfloat16, got torch.float16"),
        (["--device", "abacus", "x"], "--device must be cpu, cuda or cuda:N, got 'abacus'"),
        (["--device", "cuda:99", "x"], "no device cuda:99 here"),
        (["--no-such-option", "x"], "unrecognized arguments: --no-such-option"),
        (["--device", "cpu:1", "x"], "--device must be cpu, cuda or cuda:N, got 'cpu:1'"),
        (["--device", "", "x"], "--device must be cpu, cuda or cuda:N, got ''"),
        (["--max-frames", "9" * 5000, "x"], "--max-frames: must be a positive integer below 2^31, got '999"),
        (["--max-frames", "\u0663", "x"], "--max-frames: must be a positive integer below 2^31"),
        (["--prompt-audio", "", "x"], "not a regular file"),
        (["--model", "x" * 5000, "x"], "no such checkpoint directory"),
        (["--output", "out/", "x"], "out/: cannot be written (names a directory)"),
        (["  \n"], "the text is empty"),
        (["\ufeff\u200b\u2060 \x00"], "the text is empty"),
        (["--text-file", "none.txt"], "none.txt: cannot be read (No such file or directory)"),
        (["--text-file", "none.txt", "x"], "not both"),
        (["--language", "\udcff", "x"], "language is not valid Unicode"),
        (["word " * 9000], "text and recordings are too long"),
        (["--reference", "none.wav", "x"], "none.wav: no such file"),
        (["--model", "none", "x"], "none: no such checkpoint directory"),
        (["--codec", "none", "x"], "none: no such checkpoint directory"),
        (["--output", "none/out.wav", "x"], "none/out.wav: cannot be written (No such file or directory)"),
        (["--output", ".", "x"], ".: cannot be written (not a regular file)"),
    ],
)
def test_bad_options(demo, capsys, options, message):
    assert message in refused_synth(capsys, *options)


MODEL_AS_CODEC = "demo: holds a MOSS-TTS model, but `codec` must be a codec\n"
CODEC_AS_MODEL = "demo/audio_tokenizer: holds a codec, but `model` must be a MOSS-TTS model\n"


@pytest.mark.parametrize(
    ("command", "as_codec", "as_model"),
    [
        (["synth", "-o", "out.wav", "x"], ["--model", "demo"], []),
        (["encode", REFERENCE, "-o", "codes"], [], []),
        (["decode", "codes", "-o", "out.wav"], [], []),
        (["inspect"], [], []),
        (["verify"], ["--model", "demo"], []),
        (["profile", "codec"], [], []),
        (["profile", "frame"], None, []),
        (["bench-engine"], ["--model", "demo"], ["--codec", "demo/audio_tokenizer"]),
    ],
)
def test_a_model_is_no_codec(demo, capsys, command, as_codec, as_model):
    if as_codec is not None:
        assert refused(capsys, *command, "--codec", "demo", *as_codec).endswith(MODEL_AS_CODEC)
    assert refused(capsys, *command, "--model", "demo/audio_tokenizer", *as_model).endswith(CODEC_AS_MODEL)


def test_memory_that_is_not_there(demo, capsys, monkeypatch):
    monkeypatch.setattr(inspect_command, "run", lambda args: torch.empty(2**60, dtype=torch.uint8))
    assert f"error: out of memory: you tried to allocate {2**60} bytes" in refused(capsys, "inspect")

    def on_a_gpu(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(inspect_command, "run", on_a_gpu)
    assert "error: out of memory: CUDA out of memory. Tried to allocate 1 GiB" in refused(capsys, "inspect")

    def faulty(args):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(inspect_command, "run", faulty)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run("inspect")


def test_commands_and_texts_that_do_not_exist(demo, capsys, monkeypatch):
    assert "invalid choice: 'sing'" in refused(capsys, "sing")
    assert "required: command" in refused(capsys)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert "standard input: not UTF-8 text (byte 0)" in refused_synth(capsys)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("hé\0".encode())))
    assert "standard input: not UTF-8 text (NUL at byte 3)" in refused_synth(capsys)
    for nothing in (b"", b"\xef\xbb\xbf\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(nothing)))
        assert "the text is empty" in refused_synth(capsys)
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refused_synth(capsys)
    assert "name the codec with --codec" in refused(capsys, "encode", REFERENCE, "-o", "codes")


def test_symbolic_links_in_a_loop(demo, capsys):
    Path("loop").symlink_to("loop")
    kept = ("demo", "loop")
    assert "symbolic links in a loop" in refused_synth(capsys, "--output", "loop", "x", kept=kept)
    assert "loop: cannot be written" in refused(capsys, "init-demo", "loop", kept=kept)
    assert "loop: no such file" in refused_synth(capsys, "--reference", "loop", "x", kept=kept)


def test_an_output_that_is_an_input_is_refused(demo, capsys):
    shutil.copy(REFERENCE, "voice.wav")
    Path("text.txt").write_text(TEXT)
    Path("link").symlink_to("voice.wav")
    kept, before = ("demo", "voice.wav", "text.txt", "link"), Path("voice.wav").read_bytes()
    for arguments in (("--reference", "voice.wav"), ("--prompt-audio", "link")):
        message = refused_synth(capsys, *arguments, "--output", "voice.wav", TEXT, kept=kept)
        assert "voice.wav: is an input as well" in message
    assert "text.txt: is an input" in refused_synth(capsys, "--text-file", "text.txt", "-o", "text.txt", kept=kept)
    for command in ("encode", "decode"):
        message = refused(capsys, command, "voice.wav", "--model", "demo", "-o", "link", kept=kept)
        assert "link: is an input as well" in message
    assert Path("voice.wav").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "name", "suffix"),
    [
        (["synth", "x", "--model", "demo", "-o"], "speech.safetensors", ".wav"),
        (["encode", REFERENCE, "--model", "demo", "-o"], "codes.wav", ".safetensors"),
        (["decode", "codes", "--model", "demo", "-o"], "speech.flac", ".wav"),
        (["profile", "frame", "--size", "tiny", "-o"], "trace.txt", ".json"),
        (["bench-engine", "--size", "tiny", "--json"], "figures.toml", ".json"),
    ],
)
def test_an_output_has_the_suffix_of_what_is_written(demo, capsys, command, name, suffix):
    save_file({"codes": torch.zeros(1, 12, dtype=torch.int64)}, "codes")
    message = refused(capsys, *command, name, kept=["demo", "codes"])
    assert message.endswith(f": {name}: would be a {suffix} file; name it so, or without a suffix\n")


def test_bad_recordings(demo, capsys):
    tone = np.sin(np.arange(9600) / 20)
    soundfile.write("many.wav", np.stack([tone] * 3, axis=1), 48_000)
    soundfile.write("empty.wav", tone[:0], 48_000)
    soundfile.write("short.wav", tone[:3000], 48_000)
    soundfile.write("nan.wav", np.where(np.arange(9600) == 5000, np.nan, tone), 48_000, subtype="FLOAT")
    Path("cut.wav").write_bytes(REFERENCE.read_bytes()[:10_000])
    Path("text.wav").write_text("not audio")
    messages = {
        "many.wav": "3 channels",
        "empty.wav": "no audio",
        "short.wav": "shorter than one frame of 80 ms",
        "nan.wav": "not finite",
        "cut.wav": "truncated",
        "text.wav": "not readable as audio",
    }
    for name, message in messages.items():
        kept = ["demo", *messages]
        assert message in refused_synth(capsys, "--reference", name, TEXT, kept=kept)
        assert message in refused_synth(capsys, "--prompt-audio", name, TEXT, kept=kept)
        assert message in refused(capsys, "encode", name, "--model", "demo", "-o", "codes", kept=kept)
    assert synth("--reference", "many.wav", "--downmix", "--max-frames", 1, TEXT) == 0


def test_bad_codes(demo, capsys):
    save_file({"codes": torch.full((4, 12), 1024)}, "large.safetensors")
    save_file({"codes": torch.zeros(4, 11, dtype=torch.int64)}, "narrow.safetensors")
    save_file({"codes": torch.zeros(4, 12)}, "float.safetensors")
    save_file({"codes": torch.zeros(0, 12, dtype=torch.int64)}, "empty.safetensors")
    save_file({"other": torch.zeros(1)}, "other.safetensors")
    Path("text.safetensors").write_text("no tensors")
    messages = {
        "large.safetensors": "must be in 0..1023, got 1024",
        "narrow.safetensors": "[1, 4, 11]",
        "float.safetensors": "must be integers",
        "empty.safetensors": "[frames >= 1, codebooks]",
        "other.safetensors": "must hold a tensor `codes` [frames >= 1, codebooks], got 1 others",
        "text.safetensors": "not a safetensors file",
    }
    for name, message in messages.items():
        assert message in refused(capsys, "decode", name, "--model", "demo", "-o", "o.wav", kept=["demo", *messages])
    assert "cannot be read" in refused(capsys, "decode", "none", "--model", "demo", "-o", "o", kept=["demo", *messages])


@pytest.mark.parametrize("part", ["", "audio_tokenizer"])
def test_damaged_checkpoints(own_demo, capsys, part):
    weights, config = own_demo / part / "model.safetensors", own_demo / part / "config.json"
    data, settings = weights.read_bytes(), json.loads(config.read_text())

    def both_refuse(message):
        assert message in refused_synth(capsys, TEXT)
        assert message in refused(capsys, "inspect", "--model", "demo")

    weights.write_bytes(data[:-100])
    both_refuse("truncated or corrupt")
    weights.unlink()
    both_refuse("model.safetensors")
    tensors = load(data)
    name = next(name for name in tensors if name.endswith("norm2.weight") or name.endswith("ln_2.weight"))
    save_file({**tensors, name: tensors[name][:-1].clone(), "stray": tensors[name]}, weights)
    both_refuse(name)
    both_refuse("stray")
    save_file({**tensors, name: tensors[name].long()}, weights)
    both_refuse(f"not floating point: {name} (I64)")
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, weights)
    assert "finite" in refused_synth(capsys, TEXT)
    assert "finite" in refused_synth(capsys, "--stream", TEXT)
    weights.write_bytes(data)
    config.write_text("{")
    both_refuse("config.json: not valid JSON")
    del settings["quantizer_kwargs" if part else "gpt2_config"]
    config.write_text(json.dumps(settings))
    both_refuse("quantizer_kwargs" if part else "gpt2_config")


def test_checkpoints_with_a_part_missing(own_demo, capsys):
    tokenizer = (own_demo / "tokenizer.json").read_bytes()
    (own_demo / "tokenizer.json").unlink()
    assert "tokenizer.json: no such tokenizer file" in refused_synth(capsys, TEXT)
    (own_demo / "tokenizer.json").write_bytes(tokenizer)
    (own_demo / "audio_tokenizer").rename("codec")
    kept = ("demo", "codec")
    assert "name one with --codec" in refused_synth(capsys, TEXT, kept=kept)
    assert synth("--codec", "codec", "--max-frames", 1, TEXT) == 0
    Path("out.wav").unlink()
    mono = ROOT / "tests" / "golden" / "codec_mono"
    assert "do not belong together" in refused_synth(capsys, "--codec", mono, TEXT, kept=kept)


def test_what_does_not_fit_is_refused_before_the_weights_are_loaded(demo, capsys, monkeypatch):
    monkeypatch.setattr(synth_command, "device_and_dtype", lambda args: (torch.device("cuda"), torch.bfloat16))
    monkeypatch.setattr(synth_command, "free_memory", lambda device: 2**30 + 2**20)
    monkeypatch.setattr(synth_command.MossTTS, "from_pretrained", None)
    for options in ((), ("--stream",)):
        message = refused_synth(capsys, TEXT, *options)
        assert "needs at least 1." in message and "max_tokens" in message and "frees" in message


def test_hugging_face_ids(demo, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "needs the package huggingface_hub: pip install" in refused_synth(capsys, "--model", "some/model", TEXT)

    class Hub:
        @staticmethod
        def snapshot_download(name, allow_patterns):
            if name != "some/model":
                raise OSError("no route\nto host")
            return "demo"

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert "not fetched from Hugging Face (no route)" in refused_synth(capsys, "--model", "other/model", TEXT)
    assert run("inspect", "--model", "some/model") == 0

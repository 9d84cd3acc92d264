"""What README.md and ARCHITECTURE.md say, tried out."""

import re
import subprocess
from pathlib import Path

import soundfile

from moss_runtime.cli import COMMANDS
from moss_runtime.demo_checkpoint import write_demo_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_block(language: str, part: str) -> str:
    """The one code block of a language that contains `part`."""
    (block,) = (text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if part in text)
    return block


def run(*command: str | Path) -> None:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def test_library_examples_run(tmp_path, monkeypatch, capsys):
    write_demo_checkpoint(tmp_path / "demo-checkpoint")
    (tmp_path / "runtime").symlink_to(ROOT / "runtime")
    monkeypatch.chdir(tmp_path)
    model_example, runtime_example, engine_example = (
        code_block("python", part) for part in ("MossTTS", "Runtime(", "load_engine(")
    )
    assert max(len(text.splitlines()) for text in (model_example, runtime_example, engine_example)) <= 10
    names: dict = {}
    exec(model_example, names)
    info = soundfile.info("speech.wav")
    assert (info.samplerate, info.channels, info.frames > 0) == (48000, 2, True)
    capsys.readouterr()
    exec(runtime_example, names)
    results = eval(capsys.readouterr().out)
    # The runtime draws what the model draws.
    assert results[0][0] == len(names["speech"].codes) == info.frames // 3840
    for index, (frames, _) in enumerate(results):
        assert sum(audio.shape[1] for number, audio in names["heard"] if number == index) == 3840 * frames
    exec(engine_example, names)
    *chunks, reason = capsys.readouterr().out.splitlines()
    assert chunks[0] == "0 1 (2, 3840)" and len(chunks) > 1 and reason in ("stop", "length")


def test_linked_example_builds(moss_library, tmp_path):
    run("cmake", "--install", ROOT / "build" / "cmake", "--prefix", tmp_path / "install")
    (tmp_path / "CMakeLists.txt").write_text(code_block("cmake", "find_package"))
    (tmp_path / "server.cpp").write_text(code_block("cpp", "moss_device_query"))
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'install'}")
    run("cmake", "--build", tmp_path / "build")


def test_commands_and_options_exist():
    sources = "".join(path.read_text() for path in (ROOT / "runtime" / "commands").glob("*.py"))
    # Some options are written out, others made from the names of fields.
    defined = {"--" + name.replace("_", "-") for name in re.findall(r'"(?:--)?([a-z_-]+)"', sources)}
    commands = re.findall(r"^\| `moss-tts ([a-z-]+)", README, re.MULTILINE)
    assert commands == list(COMMANDS)
    section = README[README.index("## Use the real checkpoint") : README.index("## Library")]
    options = set(re.findall(r"(?<!\w)--[a-z-]+", section))
    assert len(options) > 15
    assert options <= defined, options - defined


def test_environment_variables_are_those_of_the_table():
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", README, re.MULTILINE))
    reads = re.compile(r'environ(?:\.get\(|\[)"(\w+)"|getenv\("(\w+)"|ENV\{(\w+)\}|\$\$(\w+)/|\$\((CI)\)')
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    suffixes = {".py", ".cu", ".cpp", ".h", ".txt"}
    paths = [ROOT / name for name in listing.split("\0") if Path(name).suffix in suffixes or name == "Makefile"]
    found = [name for path in paths if path.exists() for match in reads.findall(path.read_text()) for name in match]
    # PATH is the system's, CUDACXX is CMake's.
    assert set(found) - {"", "PATH", "CUDACXX"} == table
    assert len(table) <= 5


def test_places_of_the_architecture_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    ops = {path.parent.name for path in (ROOT / "moss_kernels").glob("*/reference.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == ops
    rows = re.findall(r"^\| (`[^|]*\.?[^|]*`[^|]*) \|", text, re.MULTILINE)
    places = [place for row in rows for place in re.findall(r"`([^`]+)`", row) if "/" in place]
    assert len(places) > 15
    for place in places:
        assert list(ROOT.glob(re.sub(r"<\w+>", "*", place).rstrip("/"))), place

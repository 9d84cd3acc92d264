"""Rules about the tree itself."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
SOURCES = {".py", ".cu", ".cuh", ".h", ".c", ".cpp", ".md", ".txt", ".toml", ".cmake"}
TOP_LEVEL = {
    ".ci", ".gitignore", "ARCHITECTURE.md", "CMakeLists.txt", "Makefile", "README.md", "bench", "csrc", "moss_kernels",
    "pyproject.toml", "requirements.txt", "runtime", "setup.py", "tests",
}  # fmt: skip


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    assert len(paths) > 50
    return [path for path in paths if (ROOT / path).exists()]


def test_source_files_stay_small(tracked):
    sizes = {str(path): (ROOT / path).stat().st_size for path in tracked if path.suffix in SOURCES}
    assert {name: size for name, size in sizes.items() if size > 30_000} == {}


def test_layout_is_the_documented_one(tracked):
    found = {path.parts[0] for path in tracked}
    assert found <= TOP_LEVEL | {"LICENSE"}
    assert found >= TOP_LEVEL


def test_no_build_output_is_tracked(tracked):
    outputs = {".so", ".o", ".a", ".cubin", ".pyc", ".whl"}
    assert [str(path) for path in tracked if path.suffix in outputs or path.parts[0] == "build"] == []


def test_layers_do_not_point_upward(tracked):
    """csrc knows no Torch; moss_kernels knows no moss_runtime."""
    for path in tracked:
        text = (ROOT / path).read_text() if path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"} else ""
        if path.parts[0] == "csrc":
            assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", text), path
        if path.parts[0] == "moss_kernels":
            assert not re.search(r"^\s*(import|from) moss_runtime", text, re.MULTILINE), path


def test_every_python_test_has_its_name(tracked):
    """A test file that pytest would not collect tests nothing."""
    helpers = {"conftest.py"}
    for path in tracked:
        if path.parent == Path("tests") and path.suffix == ".py" and path.name not in helpers:
            has_tests = re.search(r"^def test_", (ROOT / path).read_text(), re.MULTILINE)
            assert path.name.startswith("test_") == bool(has_tests), path


def test_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test", "lint", "lib"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in ("make demo", "make test"):
        assert command in readme, command


def test_packages_are_pinned_within_the_declared_bounds():
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    assert {"torch", "triton", "numpy", "pytest", "ruff"} <= pins.keys()
    for name in bounds.keys() & pins.keys():
        assert [int(part) for part in pins[name].split(".")] >= [int(part) for part in bounds[name].split(".")], name


def test_setup_goes_without_the_library_where_it_cannot_be_built_and_says_so(monkeypatch, capsys):
    installed = {}
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: None)
    monkeypatch.setattr(setuptools, "setup", installed.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert "nvcc and cmake not found: installing without libmoss_kernels.so" in capsys.readouterr().err
    assert installed["ext_modules"] == []
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: f"/usr/bin/{tool}")
    runpy.run_path(str(ROOT / "setup.py"))
    assert capsys.readouterr().err == ""
    assert [extension.name for extension in installed["ext_modules"]] == ["moss_kernels.lib.libmoss_kernels"]

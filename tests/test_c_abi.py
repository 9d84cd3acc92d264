"""libmoss_kernels.so from outside Python: what it exports, and that C and C++ programs can use it."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INCLUDE = ROOT / "csrc" / "include"
TESTS = ROOT / "csrc" / "tests"


def run(*command: str | Path) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("compiler, language, standard", [("cc", "c", "c99"), ("c++", "c++", "c++17")])
def test_header_stands_alone(compiler, language, standard):
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    run(compiler, f"-std={standard}", *strict, "-I", INCLUDE, "-x", language, TESTS / "header.c")


def test_programs_find_the_installed_library_link_and_run(moss_library, tmp_path):
    """What a server does: find_package(moss_kernels) in its own CMake project, then call the functions."""
    install, build = tmp_path / "install", tmp_path / "build"
    run("cmake", "--install", ROOT / "build" / "cmake", "--prefix", install)
    run("cmake", "-S", TESTS, "-B", build, f"-DCMAKE_PREFIX_PATH={install}")
    run("cmake", "--build", build)
    run("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error")


def test_exports_are_the_functions_of_the_header(moss_library):
    declared = set(re.findall(r"^MOSS_API .*?(\w+)\(", (INCLUDE / "moss_kernels.h").read_text(), re.MULTILINE))
    exported = {line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", moss_library).splitlines()}
    assert "moss_device_query" in declared
    assert exported == declared

"""libmoss_kernels.so from outside Python: what it exports, and that C and C++ programs can use it."""

import os
import re
import shutil
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


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize(("variables", "chosen"), [({}, "home"), ({"CUDACXX": "{}/own/bin/nvcc"}, "own")])
def test_cmake_takes_nvcc_from_cuda_home(tmp_path, variables, chosen):
    """As the Makefile does, before PATH. These compile nothing, which ends the configuration early."""
    for name in ("home", "path", "own"):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\nexit 1\n")
        nvcc.chmod(0o755)
    own = {name: value.format(tmp_path) for name, value in variables.items()}
    own |= {"CUDA_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}/path/bin:{os.environ['PATH']}"}
    kept = {name: value for name, value in os.environ.items() if name != "CUDACXX"}
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path / "build"], env=kept | own, capture_output=True)
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert re.findall(r"^CMAKE_CUDA_COMPILER:\w+=(.*)", cache, re.MULTILINE) == [f"{tmp_path}/{chosen}/bin/nvcc"]


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

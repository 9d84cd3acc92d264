"""libmoss_kernels.so from outside Python: what it exports, and that C and C++ programs can use it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INCLUDE = ROOT / "csrc" / "include"
TESTS = ROOT / "csrc" / "tests"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def run(*command: str | Path) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("compiler, standard", [("cc", "c99"), ("c++", "c++17")])
def test_header_stands_alone(compiler, standard):
    language = "c" if compiler == "cc" else "c++"
    run(compiler, f"-std={standard}", *STRICT, "-fsyntax-only", "-x", language, TESTS / "header.c", "-I", INCLUDE)


def test_server_links_and_runs(moss_library, tmp_path):
    objects, program = tmp_path / "header.o", tmp_path / "link_test"
    run("cc", "-std=c99", *STRICT, "-c", TESTS / "header.c", "-I", INCLUDE, "-o", objects)
    folder = moss_library.parent
    libraries = ["-L", folder, "-lmoss_kernels", f"-Wl,-rpath,{folder}", "-pthread"]
    run("c++", "-std=c++17", *STRICT, TESTS / "link_test.cpp", objects, "-I", INCLUDE, *libraries, "-o", program)
    assert run(program).endswith(": ok\n")


def test_exports_are_the_functions_of_the_header(moss_library):
    declared = set(re.findall(r"^MOSS_API .*?(\w+)\(", (INCLUDE / "moss_kernels.h").read_text(), re.MULTILINE))
    exported = {line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", moss_library).splitlines()}
    assert "moss_device_query" in declared
    assert exported == declared


def test_install_is_complete(moss_library, tmp_path):
    """`cmake --install` gives the header, the library and the files that find_package reads."""
    build = ROOT / "build" / "cmake"
    assert shutil.which("cmake") and build.is_dir(), "the library was built without CMake"
    run("cmake", "--install", build, "--prefix", tmp_path)
    installed = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"moss_kernels.h", "libmoss_kernels.so", "moss_kernels-config.cmake"} <= installed

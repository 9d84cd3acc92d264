"""Packages moss_kernels and moss_runtime, and builds libmoss_kernels.so through CMake where nvcc is installed.

Everything else about the project is in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def find_nvcc() -> str | None:
    places = [os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(places))


class BuildLibrary(build_ext):
    """Build the one "extension", a plain shared library that ctypes opens."""

    def run(self) -> None:
        package_root = ROOT if self.inplace or self.editable_mode else Path(self.build_lib).resolve()
        build = ROOT / "build" / "cmake"
        configure = ["-S", ROOT, "-B", build, f"-DCMAKE_CUDA_COMPILER={find_nvcc()}"]
        subprocess.run(["cmake", *configure, f"-DMOSS_LIBRARY_DIR={package_root}/moss_kernels/lib"], check=True)
        subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count())], check=True)

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "moss_kernels" / "lib" / "libmoss_kernels.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


missing = [tool for tool, found in (("nvcc", find_nvcc()), ("cmake", shutil.which("cmake"))) if not found]
if missing:
    print(f"moss-kernels: {' and '.join(missing)} not found: installing without libmoss_kernels.so", file=sys.stderr)

setup(
    package_dir={"moss_kernels": "moss_kernels", "moss_runtime": "runtime"},
    packages=find_packages(include=["moss_kernels*"])
    + ["moss_runtime"]
    + ["moss_runtime." + name for name in find_packages("runtime")],
    package_data={"moss_runtime": ["assets/*"]},
    # Its presence alone makes setuptools build a platform wheel and run BuildLibrary.
    ext_modules=[] if missing else [Extension("moss_kernels.lib.libmoss_kernels", sources=[])],
    cmdclass={"build_ext": BuildLibrary},
)

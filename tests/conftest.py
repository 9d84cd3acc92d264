"""Fixtures of all tests, and the rules for which tests run where."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]

# Triton decides at import whether its kernels are compiled or interpreted, so one process can do only one of the two.
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

# The tensors are small: more threads only wait for each other, for minutes where other programs use the cores too.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Golden:
    """One folder of tests/golden: a small checkpoint and what the official implementation computed with it."""

    directory: Path
    config: dict
    weights: Path
    expected: dict[str, torch.Tensor]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each test to the process it is made for, and skip GPU tests where there is no GPU."""
    elsewhere = [item for item in items if ("interpreter" in item.keywords) != INTERPRETER]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if ("interpreter" in item.keywords) == INTERPRETER]
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
    numpy.random.seed(0)


@pytest.fixture
def poison_empty() -> Iterator[None]:
    """Uninitialised memory of new tensors holds NaN (floats) or the largest value (integers), so reading it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Loader of a golden checkpoint by folder name, as in golden("local_hd16"). Do not write to its tensors."""
    loaded: dict[str, Golden] = {}

    def load(name: str) -> Golden:
        if name not in loaded:
            directory = ROOT / "tests" / "golden" / name
            loaded[name] = Golden(
                directory,
                json.loads((directory / "config.json").read_text()),
                directory / "model.safetensors",
                load_file(directory / "expected.safetensors"),
            )
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def moss_library() -> Path:
    """Path of the built libmoss_kernels.so. Without it: a failure in CI, elsewhere a skip."""
    from moss_kernels import _library

    if not _library.is_available():
        missing = f"{_library.library_path()} is not built; run `make lib`"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return _library.library_path()

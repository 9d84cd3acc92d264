"""Loading of libmoss_kernels.so, the choice of a backend, and the wording of argument checks."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moss_kernels import _checks, _library

ROOT = Path(__file__).parents[1]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
IMPLEMENTATIONS = ("cuda", "triton", "reference")


@pytest.fixture
def fresh(monkeypatch):
    """The environment is read once in a process; forget what was read, before and after."""
    caches = (_library.load, _library.requested_backend, _library.backend_for)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


def test_import_opens_neither_the_library_nor_cuda():
    code = (
        "import torch, moss_kernels; from moss_kernels import _library;"
        "assert not torch.cuda.is_initialized();"
        "assert _library.load.cache_info().currsize == 0;"
        "assert 'libmoss_kernels' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_library_says_how_to_build_it(fresh, tmp_path):
    fresh.setattr(_library, "library_path", lambda: tmp_path / "libmoss_kernels.so")
    assert not _library.is_available()
    with pytest.raises(RuntimeError, match=r"libmoss_kernels.so does not exist.*`make lib`"):
        _library.load()


def test_damaged_library_is_named(fresh, tmp_path):
    path = tmp_path / "libmoss_kernels.so"
    path.write_bytes(b"not a library")
    fresh.setattr(_library, "library_path", lambda: path)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        _library.load()


def test_library_of_another_abi_is_refused(fresh, moss_library):
    fresh.setattr(_library, "ABI_VERSION", 99)
    with pytest.raises(RuntimeError, match="must have ABI version 99, got 1"):
        _library.load()


def test_version_is_that_of_the_package(moss_library):
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert _library.load().moss_version().decode() == version


def test_constants_are_those_of_the_header():
    header = (ROOT / "csrc" / "include" / "moss_kernels.h").read_text()
    values = dict(re.findall(r"(MOSS_[A-Z0-9_]+)(?: =)? (\d+)", header))
    assert int(values["MOSS_ABI_VERSION"]) == _library.ABI_VERSION
    names = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
    assert {dtype: int(values["MOSS_" + names[dtype]]) for dtype in names} == _library.DTYPE_CODES
    assert (int(values["MOSS_OK"]), int(values["MOSS_ERROR_INVALID_ARGUMENT"])) == (0, _library._INVALID_ARGUMENT)
    assert int(values["MOSS_ERROR_UNSUPPORTED"]) == _library._UNSUPPORTED


def test_status_becomes_an_exception_with_the_message(moss_library):
    library = _library.load()
    status = library.moss_device_query(0, None)
    with pytest.raises(ValueError, match="`moss_device_query`: the parameter struct must not be null"):
        _library.check_status(status)
    with pytest.raises(NotImplementedError):
        _library.check_status(2)
    with pytest.raises(RuntimeError):
        _library.check_status(4)
    _library.check_status(0)


def test_device_info_layout_is_accepted(moss_library):
    """The library checks the struct's size, so any answer but INVALID_ARGUMENT means that both sides agree on it."""
    info = _library.DeviceInfo(ctypes.sizeof(_library.DeviceInfo), _library.ABI_VERSION)
    assert _library.load().moss_device_query(0, ctypes.byref(info)) != _library._INVALID_ARGUMENT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_info_without_a_gpu_is_a_clear_error(moss_library):
    with pytest.raises(RuntimeError, match="cudaGetDeviceCount failed"):
        _library.device_info(0)


@pytest.mark.gpu
def test_device_info_agrees_with_torch(moss_library):
    info, properties = _library.device_info(0), torch.cuda.get_device_properties(0)
    assert info.device_count == torch.cuda.device_count()
    assert (info.compute_capability_major, info.compute_capability_minor) == (properties.major, properties.minor)
    assert info.multiprocessors == properties.multi_processor_count
    assert info.memory_bytes == properties.total_memory
    assert info.l2_bytes == properties.L2_cache_size
    assert info.has_device_code == ((properties.major, properties.minor) == (9, 0))


def device_without_code(device: int) -> _library.DeviceInfo:
    return _library.DeviceInfo(compute_capability_major=8, compute_capability_minor=0, has_device_code=0)


def device_with_code(device: int) -> _library.DeviceInfo:
    return _library.DeviceInfo(compute_capability_major=9, compute_capability_minor=0, has_device_code=1)


@pytest.mark.parametrize(
    "requested, device, built, query, expected",
    [
        (None, CPU, True, device_with_code, "reference"),
        (None, GPU, True, device_with_code, "cuda"),
        (None, GPU, True, device_without_code, "triton"),
        (None, GPU, False, device_with_code, "triton"),
        ("auto", GPU, True, device_with_code, "cuda"),
        ("cuda", GPU, True, device_with_code, "cuda"),
        ("triton", GPU, True, device_with_code, "triton"),
        ("reference", GPU, True, device_with_code, "reference"),
        ("reference", CPU, True, device_with_code, "reference"),
    ],
)
def test_backend(fresh, requested, device, built, query, expected):
    if requested is None:
        fresh.delenv("MOSS_BACKEND", raising=False)
    else:
        fresh.setenv("MOSS_BACKEND", requested)
    fresh.setattr(_library, "is_available", lambda: built)
    fresh.setattr(_library, "device_info", query)
    assert _library.backend_for("op", IMPLEMENTATIONS, device) == expected


@pytest.mark.parametrize(
    "requested, implementations, device, built, message",
    [
        ("cuda", IMPLEMENTATIONS, CPU, True, r"on cpu \(it needs a CUDA device\); supported: reference"),
        ("triton", ("cuda", "reference"), GPU, True, r"\(there is no such implementation\); supported: reference"),
        ("cuda", IMPLEMENTATIONS, GPU, False, r"\(.*is not built\); supported: triton, reference"),
        ("cuda", IMPLEMENTATIONS, GPU, True, r"\(.*compute capability 8.0.*\); supported: triton, reference"),
        ("auto", ("cuda",), CPU, True, r"supported: none"),
    ],
)
def test_backend_that_does_not_work_names_what_does(fresh, requested, implementations, device, built, message):
    fresh.setenv("MOSS_BACKEND", requested)
    fresh.setattr(_library, "is_available", lambda: built)
    fresh.setattr(_library, "device_info", device_without_code)
    with pytest.raises(NotImplementedError, match=f"`op`: MOSS_BACKEND={requested} .*{message}"):
        _library.backend_for("op", implementations, device)


def test_unknown_backend_is_refused(fresh):
    fresh.setenv("MOSS_BACKEND", "fast")
    with pytest.raises(ValueError, match="MOSS_BACKEND must be one of auto, cuda, triton, reference, got 'fast'"):
        _library.backend_for("op", IMPLEMENTATIONS, CPU)


def test_shapes_bind_names_and_compare_them():
    sizes: dict[str, int] = {"ceil(V/32)": 2}
    _checks.require_shape("op", "logits", torch.empty(4, 33), "[B, V]", sizes)
    _checks.require_shape("op", "seen", torch.empty(9, 12, 2), "[S+1, 12, ceil(V/32)]", sizes)
    _checks.require_shape("op", "scalar", torch.empty(()), "[]", sizes)
    assert sizes == {"B": 4, "V": 33, "S+1": 9, "ceil(V/32)": 2}
    with pytest.raises(ValueError, match=r"^`op`: `code` must be \[B, Q\] with B = 4, got \(3, 7\)$"):
        _checks.require_shape("op", "code", torch.empty(3, 7), "[B, Q]", sizes)
    with pytest.raises(ValueError, match=r"^`op`: `x` must be \[N, 12\], got \(2, 13\)$"):
        _checks.require_shape("op", "x", torch.empty(2, 13), "[N, 12]", sizes)
    with pytest.raises(ValueError, match=r"^`op`: `x` must be \[B\] with B = 4, got \(4, 1\)$"):
        _checks.require_shape("op", "x", torch.empty(4, 1), "[B]", sizes)


def test_dtype_device_and_layout_messages():
    x = torch.empty(4, 6)
    _checks.require_dtype("op", "x", x, torch.float32, torch.bfloat16)
    _checks.require_device("op", "x", x, CPU)
    _checks.require_contiguous("op", "x", x)
    _checks.require_contiguous_rows("op", "x", x[:, 1:4])
    with pytest.raises(TypeError, match=r"^`op`: `x` must be int32, bfloat16 or float16, got float32$"):
        _checks.require_dtype("op", "x", x, torch.int32, torch.bfloat16, torch.float16)
    with pytest.raises(ValueError, match=r"^`op`: `x` must be on meta, got cpu$"):
        _checks.require_device("op", "x", x, torch.device("meta"))
    with pytest.raises(ValueError, match=r"^`op`: `x` must be contiguous, got strides \(6, 1\)$"):
        _checks.require_contiguous("op", "x", x[:, :3])
    with pytest.raises(ValueError, match=r"^`op`: `x` must have stride 1 in its last dimension, got strides \(1, 6\)$"):
        _checks.require_contiguous_rows("op", "x", x.T)

"""The op namespace "moss", the choice of a backend, and the loading of libmoss_kernels.so.

Nothing here creates a CUDA context at import, and the shared library is opened on first use.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

ABI_VERSION = 1
BACKENDS = ("auto", "cuda", "triton", "reference")

# Every op of the project is defined in this namespace: torch.ops.moss.<op>.
OPS = torch.library.Library("moss", "DEF")

# Values of MossDtype in csrc/include/moss_kernels.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_OK, _INVALID_ARGUMENT, _UNSUPPORTED = 0, 1, 2


class DeviceInfo(ctypes.Structure):
    """MossDeviceInfo of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("device_count", ctypes.c_int32),
        ("compute_capability_major", ctypes.c_int32),
        ("compute_capability_minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("l2_bytes", ctypes.c_int64),
        ("memory_bytes", ctypes.c_int64),
        ("has_device_code", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def library_path() -> Path:
    """Where libmoss_kernels.so lies when it has been built."""
    return Path(__file__).parent / "lib" / "libmoss_kernels.so"


def is_available() -> bool:
    """Whether libmoss_kernels.so has been built. Says nothing about the GPU."""
    return library_path().is_file()


@cache
def load() -> ctypes.CDLL:
    """Open libmoss_kernels.so, once, with the prototypes of its general functions set.

    Raises:
        RuntimeError: The library was not built, cannot be opened, or has another ABI version.
    """
    path = library_path()
    if not is_available():
        raise RuntimeError(
            f"{path} does not exist: this installation has no CUDA C++ kernels. "
            "Install nvcc and cmake, then run `make lib`, or `pip install .` again.",
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"{path} cannot be opened: {error}. Build it again with `make lib`.") from error
    library.moss_abi_version.restype = ctypes.c_uint32
    library.moss_version.restype = ctypes.c_char_p
    library.moss_status_string.argtypes = [ctypes.c_int]
    library.moss_status_string.restype = ctypes.c_char_p
    library.moss_last_error_message.restype = ctypes.c_char_p
    library.moss_device_query.argtypes = [ctypes.c_int32, ctypes.POINTER(DeviceInfo)]
    library.moss_device_query.restype = ctypes.c_int
    version = library.moss_abi_version()
    if version != ABI_VERSION:
        raise RuntimeError(
            f"{path} must have ABI version {ABI_VERSION}, got {version}. Build it again with `make lib`."
        )
    return library


def check_status(status: int) -> None:
    """Turn the status of a C function, called on this thread just before, into an exception with the library's message.

    Args:
        status: What the function returned (MossStatus).

    Raises:
        ValueError: MOSS_ERROR_INVALID_ARGUMENT.
        NotImplementedError: MOSS_ERROR_UNSUPPORTED.
        RuntimeError: Any other error.
    """
    if status == _OK:
        return
    kinds = {_INVALID_ARGUMENT: ValueError, _UNSUPPORTED: NotImplementedError}
    raise kinds.get(status, RuntimeError)(load().moss_last_error_message().decode())


def device_info(device: int) -> DeviceInfo:
    """Ask the library about a GPU.

    Args:
        device: CUDA ordinal, as in torch.device("cuda", device).

    Raises:
        RuntimeError: No library, no driver or no GPU.
        ValueError: No GPU of that ordinal.
    """
    info = DeviceInfo(struct_size=ctypes.sizeof(DeviceInfo), abi_version=ABI_VERSION)
    check_status(load().moss_device_query(device, ctypes.byref(info)))
    return info


@cache
def requested_backend() -> str:
    """The environment variable MOSS_BACKEND (default "auto"), read once in a process.

    Raises:
        ValueError: Not one of BACKENDS.
    """
    backend = os.environ.get("MOSS_BACKEND", "auto")
    if backend not in BACKENDS:
        raise ValueError(f"MOSS_BACKEND must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


@contextmanager
def forced_backend(backend: str) -> Iterator[None]:
    """Ops run this backend inside, whatever MOSS_BACKEND says: for checks that run all of them in one process."""
    global requested_backend
    kept = requested_backend
    requested_backend = lambda: backend  # noqa: E731
    backend_for.cache_clear()
    try:
        yield
    finally:
        requested_backend = kept
        backend_for.cache_clear()


@cache
def backend_for(op: str, implementations: tuple[str, ...], device: torch.device) -> str:
    """Choose the implementation of an op on a device. The answer is kept, so asking again is a dictionary look-up.

    Args:
        op: Name of the op, for the message.
        implementations: What the op has, fastest first, out of "cuda", "triton" and "reference".
        device: Where the op's tensors are.

    Returns:
        The one that MOSS_BACKEND names; for "auto" the first one that works on the device.

    Raises:
        NotImplementedError: What MOSS_BACKEND names does not exist for this op or this device.
    """
    usable = {name: _obstacle(name, device) for name in implementations}
    requested = requested_backend()
    for name, obstacle in usable.items():
        if obstacle is None and requested in ("auto", name):
            return name
    supported = ", ".join(name for name, obstacle in usable.items() if obstacle is None) or "none"
    reason = usable.get(requested) or "there is no such implementation"
    raise NotImplementedError(
        f"`{op}`: MOSS_BACKEND={requested} does not work on {device} ({reason}); supported: {supported}",
    )


def _obstacle(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device, or None if it can."""
    if backend == "reference":
        return None
    if device.type != "cuda":
        return "it needs a CUDA device"
    if backend == "triton":
        return None
    if not is_available():
        return "libmoss_kernels.so is not built"
    info = device_info(torch.cuda.current_device() if device.index is None else device.index)
    if not info.has_device_code:
        capability = f"{info.compute_capability_major}.{info.compute_capability_minor}"
        return f"libmoss_kernels.so has no code for compute capability {capability}; see CMAKE_CUDA_ARCHITECTURES"
    return None

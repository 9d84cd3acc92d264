"""The CUDA C++ kernel without a GPU: csrc/device/paged_attention.cuh, compiled for the CPU over an emulator of a block.

Each call runs in several orders of threads and blocks, so that a missing barrier shows as another result.
"""

import ctypes
import subprocess
from functools import partial
from pathlib import Path

import pytest
import test_paged_attention as suite
import torch

from moss_kernels.paged_attention.cuda_kernel import PagedAttentionParams, make_params
from moss_kernels.testing.compare import require_equal

CSRC = Path(__file__).parents[1] / "csrc"
# Around tiles and splits of 64, and splits that have doubled once and twice.
ROWS = [(tokens, True) for tokens in (0, 1, 15, 16, 17, 63, 64, 65, 300, 1023, 1024, 1025, 2100)]
ROWS += [(None, False), (33, False)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The op in the emulator, with the keyword arguments `parts`, `order` and `dependent_launch`."""
    library = tmp_path_factory.mktemp("emulated") / "paged_attention.so"
    source = CSRC / "tests" / "paged_attention_emulated.cpp"
    # The fortified longjmp takes a switch of stacks for an error.
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    warnings = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    command = ["c++", *options, *warnings, f"-I{CSRC}", f"-I{CSRC / 'include'}", source, "-o", library]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    function = ctypes.CDLL(str(library)).emulate_paged_attention
    function.argtypes = [ctypes.POINTER(PagedAttentionParams), ctypes.c_uint32]
    function.restype = ctypes.c_char_p

    def run(*arguments: object, parts: int = 1, order: int = 0, dependent_launch: int = 0) -> None:
        params = make_params(*arguments, parts=parts)
        params.dependent_launch = dependent_launch
        error = function(ctypes.byref(params), order)
        assert error is None, error.decode()

    return run


@pytest.mark.parametrize(("kv_heads", "group", "page_size"), [*suite.CUDA_SIZES, (1, 4, 64)])
def test_bf16_errs_at_most_twice_as_much_as_the_reference(emulated, kv_heads, group, page_size):
    sizes = {"kv_heads": kv_heads, "group": group, "page_size": page_size, "head_dim": 128}
    token, pages = suite.make_inputs(ROWS, **sizes, dtype=torch.bfloat16)
    out, written = suite.require_accurate(emulated, token, pages)
    assert (out[~pages.active] == 0).all()
    suite.require_stored(written, token, pages)


@pytest.mark.parametrize("stored", [0, 17, 64, 300])
def test_each_length_alone(emulated, stored):
    inputs = suite.make_inputs([(stored, True)], **suite.FULL | {"kv_heads": 1}, dtype=torch.bfloat16)
    suite.require_accurate(emulated, *inputs)


def test_parts_and_orders_do_not_show(emulated):
    token, pages = suite.make_inputs(ROWS, **suite.FULL | {"kv_heads": 2}, dtype=torch.bfloat16)
    expected, written = suite.attend(emulated, token, pages)
    for parts, order in ((1, 1), (1, 2), (2, 0), (4, 1), (8, 2), (16, 3), (16, 4)):
        run = partial(emulated, parts=parts, order=order, dependent_launch=order % 3)
        out, again = suite.attend(run, token, pages)
        require_equal(f"out of {parts} parts in order {order}", out, expected)
        for name in ("key_pages", "value_pages"):
            require_equal(name, getattr(again, name).nan_to_num(), getattr(written, name).nan_to_num())


def test_rows_do_not_depend_on_the_batch(emulated):
    token, pages = suite.make_inputs(ROWS, **suite.FULL | {"kv_heads": 1}, dtype=torch.bfloat16)
    together, _ = suite.attend(emulated, token, pages)
    for index in ([3], [8, 11], [12, 0, 10, 14, 5]):
        out, _ = suite.attend(partial(emulated, parts=4), (token[0][index], *token[1:]), pages.take(index))
        require_equal(f"out of rows {index}", out, together[index])

"""Every Triton kernel compiles to machine code for sm_90, on any machine, and does not spill registers.

The kernels of an op lie in moss_kernels/<op>/triton_kernel.py. Its function `compile_specs()` lists what the launcher
launches, as tuples (kernel, signature, constexprs, options): the arguments' types as Triton writes them ("*fp32",
"i32"; "constexpr" for those in constexprs), the values of the constexprs, and the launch options (num_warps).
"""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

ROOT = Path(__file__).parents[1]
OPS = sorted(path.parent.name for path in (ROOT / "moss_kernels").glob("*/triton_kernel.py"))


def compile_for_hopper(kernel, signature: dict, constexprs: dict, options: dict) -> CompiledKernel:
    # Torch allocates aligned memory, and the launcher specialises on that.
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(kernel, signature, constexprs, {(index,): [["tt.divisibility", 16]] for index in pointers})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(compiled: CompiledKernel, folder: Path) -> int:
    """Bytes of spill stores and loads that ptxas reports for a kernel's PTX."""
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    ptxas = triton.knobs.nvidia.ptxas.path
    command = [ptxas, "-v", "--gpu-name=sm_90a", f"--output-file={folder / 'kernel.cubin'}", str(ptx)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    counts = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert counts, f"ptxas printed no spill counts: {report}"
    return sum(map(int, counts))


@triton.jit
def _add_one(x_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0)
    tl.store(x_ptr + offsets, x + 1, mask=offsets < size)


@triton.jit
def _normalize(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, x / tl.sum(x))


def test_a_small_kernel_compiles_without_spills(tmp_path):
    signature = {"x_ptr": "*fp32", "size": "i32", "BLOCK": "constexpr"}
    compiled = compile_for_hopper(_add_one, signature, {"BLOCK": 128}, {"num_warps": 4})
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert spilled_bytes(compiled, tmp_path) == 0


def test_spills_are_seen(tmp_path):
    """4096 values live across a sum need 128 registers in each thread of one warp, and get 32."""
    signature = {"x_ptr": "*fp32", "BLOCK": "constexpr"}
    compiled = compile_for_hopper(_normalize, signature, {"BLOCK": 4096}, {"num_warps": 1, "maxnreg": 32})
    assert spilled_bytes(compiled, tmp_path) > 0


@pytest.mark.parametrize("op", OPS)
def test_kernels_of_op_compile(op, tmp_path):
    specs = importlib.import_module(f"moss_kernels.{op}.triton_kernel").compile_specs()
    assert specs, f"{op}: compile_specs() lists no kernel"
    for kernel, signature, constexprs, options in specs:
        compiled = compile_for_hopper(kernel, signature, constexprs, options)
        label = f"{op}: {kernel.__name__} with {constexprs}"
        assert compiled.asm["cubin"].startswith(b"\x7fELF"), label
        assert spilled_bytes(compiled, tmp_path) == 0, label

"""What the assembler makes of the main loops of linears, which GPU time and CPU tests alike would show too late."""

import re
import subprocess

import pytest
import triton

LINEARS = (
    "backbone_linear",
    "codec_linear_cluster",
    "codec_linear_norm",
    "codec_linear_partial",
    "codec_linear_pingpong",
    "codec_linear_tiles",
    "prefill_linear",
    "prefill_linear_pingpong",
)


@pytest.fixture(scope="module")
def kernels(moss_library):
    """Instructions of each kernel of the library, by its mangled name: pairs of an address and the text."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(moss_library)]
    functions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Function : ")[1:]
    codes = dict(function.split("\n", 1) for function in functions)
    instruction = re.compile(r"^\s*/\*(\w{4,})\*/\s+(.*?);", re.MULTILINE)
    return {name: [(int(a, 16), text) for a, text in instruction.findall(code)] for name, code in codes.items()}


def loops_of_products(instructions):
    """Instructions of the loop around each product of a warpgroup, the innermost; a wait that goes on elsewhere jumps
    back from there, too, but over more of them."""
    jumps = [(int(jump[1], 16), a) for a, text in instructions if (jump := re.search(r"BRA (0x\w+)", text))]
    products = [a for a, text in instructions if "HGMMA" in text]
    around = [[(end - begin, begin, end) for begin, end in jumps if begin <= a <= end] for a in products]
    loops = {min(choices) for choices in around if choices}
    return [[text for a, text in instructions if begin <= a <= end] for _, begin, end in loops]


@pytest.mark.parametrize("linear", LINEARS)
def test_main_loops_of_linears_work_in_uniform_registers(kernels, linear):
    """Products take descriptors from uniform registers. Moving them there, or asking for the block's place in its
    cluster again, in each step, took more time than the products of a small tile do."""
    chosen = {name: code for name, code in kernels.items() if re.search(rf"{linear}_kernelI", name)}
    assert chosen
    for name, code in chosen.items():
        loops = loops_of_products(code)
        assert loops, name
        for body in loops:
            assert not [text for text in body if re.search(r"R2UR|SR_CgaCtaId", text)], name

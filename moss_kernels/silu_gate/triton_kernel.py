"""`silu_gate` in Triton: a program per block of consecutive outputs."""

import torch
import triton
import triton.language as tl

BLOCK = 2048
WARPS = 8


@triton.jit
def silu_gate_kernel(gate_up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # One contiguous load of both; their pairs lie in neighbouring registers.
    pair = 2 * first + tl.arange(0, 2 * BLOCK)
    gate, up = tl.split(tl.load(gate_up_ptr + pair, mask=pair < 2 * count, other=0.0).to(tl.float32).reshape(BLOCK, 2))
    value = gate / (1 + tl.exp(-gate)) * up
    place = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=place < count)


def silu_gate_triton(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Triton implementation of `moss_kernels.silu_gate`, which documents and checks the arguments."""
    count = out.numel()
    if count:
        silu_gate_kernel[(triton.cdiv(count, BLOCK),)](gate_up, out, count, BLOCK=BLOCK, num_warps=WARPS)


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype in ("bf16", "fp32"):
        for count in ("i32", "i64"):
            signature = {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "count": count, "BLOCK": "constexpr"}
            specs.append((silu_gate_kernel, signature, {"BLOCK": BLOCK}, {"num_warps": WARPS}))
    return specs

"""`dequantize_codes` in Triton: one program per frame and block of features."""

import torch
import triton
import triton.language as tl

BLOCK = 256
NUM_WARPS = 2


@triton.jit
def dequantize_codes_kernel(codes_ptr, table_ptr, out_ptr, vocab, width, CODEBOOKS: tl.constexpr, BLOCK: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for q in tl.static_range(CODEBOOKS):
        code = tl.load(codes_ptr + frame * CODEBOOKS + q).to(tl.int64)
        known = (code >= 0) & (code < vocab)
        row = (tl.full((), q, tl.int64) * vocab + code) * width
        total += tl.load(table_ptr + row + columns, mask=inside & known, other=0.0)
    tl.store(out_ptr + frame * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_codes_triton(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Triton implementation of `moss_kernels.dequantize_codes`, which documents and checks the arguments."""
    batch, frames, codebooks = codes.shape
    _, vocab, width = table.shape
    if batch * frames == 0:
        return
    dequantize_codes_kernel[(batch * frames, triton.cdiv(width, BLOCK))](
        codes, table, out, vocab, width, CODEBOOKS=codebooks, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    constexprs: dict[str, object] = {"CODEBOOKS": 12, "BLOCK": BLOCK}
    specs = []
    for codes, dtype in (("i64", "fp32"), ("i64", "bf16"), ("i16", "bf16")):
        signature = {"codes_ptr": f"*{codes}", "table_ptr": "*fp32", "out_ptr": f"*{dtype}"}
        signature |= {"vocab": "i32", "width": "i32"} | dict.fromkeys(constexprs, "constexpr")
        specs.append((dequantize_codes_kernel, signature, constexprs, {"num_warps": NUM_WARPS}))
    return specs

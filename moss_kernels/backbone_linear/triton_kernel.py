"""`backbone_linear` in Triton: the weights' rows are the M side of the tensor core product, the batch is its N side.

So any batch streams the weights once, through tiles that do not depend on it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from moss_kernels._launch import dependent_launch

from .tiles import ROW_BLOCKS, Tile, row_block, tile_for

_LINE: tl.constexpr = tl.constexpr(64)  # bfloat16 numbers in a cache line
# Bytes of a weight that a launch asks into L2 while the kernel ahead ends, the front of each row and slice: what the
# gap between two kernels can bring. 0 turns it off.
PREFETCH_BYTES = 4_000_000


@triton.jit
def _prefetch_rows(weight_ptr, rows, k, BLOCK: tl.constexpr, LINES: tl.constexpr):
    # A hint that needs no result.
    index = tl.arange(0, BLOCK * LINES)
    row = tl.minimum(index // LINES, rows - 1)
    address = (weight_ptr + row.to(tl.int64) * k + index % LINES * _LINE).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _launch_dependents_if(condition):
    # Predicated, so that the loop around it stays one block for the pipeliner.
    asm: tl.constexpr = """{
        .reg .pred p;
        setp.ne.s32 p, $1, 0;
        @p griddepcontrol.launch_dependents;
        mov.u32 $0, $1;
    }"""
    tl.inline_asm_elementwise(asm, "=r,r", [condition.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["batch"])
def backbone_linear_kernel(
    x,
    weight,
    weight_ptr,
    out_ptr,
    batch,
    n,
    k,
    slice_k,
    GATE_UP: tl.constexpr,
    PARTIAL: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_output = tl.program_id(0) * BLOCK_N
    first_k = tl.program_id(1) * slice_k
    first_row = tl.program_id(2) * BLOCK_B
    output = first_output + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_B)
    if DEPENDENT:
        if PREFETCH_LINES > 0:
            own_ptr = weight_ptr + first_output.to(tl.int64) * k + first_k
            _prefetch_rows(own_ptr, n - first_output, k, BLOCK_N, PREFETCH_LINES)
        gdc_wait()

    product = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    inner = tl.arange(0, BLOCK_K)
    last_load = first_k + slice_k - (STAGES - 1) * BLOCK_K
    for start in range(first_k, first_k + slice_k, BLOCK_K):
        if COPY_ENGINE:
            weight_tile = weight.load([first_output, start])
            x_tile = x.load([first_row, start])
        else:
            inside = inner < first_k + slice_k - start
            weight_ptrs = weight + output.to(tl.int64)[:, None] * k + (start + inner)[None, :]
            weight_tile = tl.load(weight_ptrs, mask=(output < n)[:, None] & inside[None, :], other=0.0)
            x_ptrs = x + row.to(tl.int64)[:, None] * k + (start + inner)[None, :]
            x_tile = tl.load(x_ptrs, mask=(row < batch)[:, None] & inside[None, :], other=0.0)
        if DEPENDENT and COPY_ENGINE:  # the rest need all registers, and trigger at their end
            # Only when all loads are on their way: earlier, programs of the next kernel would wait where those of this
            # one and of the one after it have to be.
            _launch_dependents_if(start >= last_load)
        product = tl.dot(weight_tile, x_tile.T, product, input_precision="ieee")

    width = n
    if GATE_UP:
        pairs = tl.permute(tl.reshape(product, (BLOCK_N // 2, 2, BLOCK_B)), (0, 2, 1))
        gate, up = tl.split(pairs)
        product = gate / (1.0 + tl.exp(-gate)) * up
        output = first_output // 2 + tl.arange(0, BLOCK_N // 2)
        width = n // 2
    if PARTIAL:
        out_ptr += tl.program_id(1).to(tl.int64) * batch * n
    out_ptrs = out_ptr + row.to(tl.int64)[None, :] * width + output[:, None]
    inside = (output < width)[:, None] & (row < batch)[None, :]
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=inside)


def _prefetch_lines(tile: Tile, n: int, k: int, splits: int) -> int:
    """Lines of each row and slice, a power of two or 0; only where rows are aligned as the copy engine asks for."""
    lines = min(k // splits // _LINE.value, PREFETCH_BYTES // (n * splits * 2 * _LINE.value))
    return 1 << lines.bit_length() - 1 if tile.copy_engine and lines else 0


def backbone_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, gate_up: bool, out: torch.Tensor, *, tile: Tile | None = None
) -> None:
    """Triton implementation of `moss_kernels.backbone_linear`, which documents and checks the arguments.

    `tile` overrides the table, for measurements.
    """
    (batch, k), n = x.shape, weight.shape[0]
    if batch == 0:
        return
    splits = out.shape[0] if out.dim() == 3 else 1
    tile = tile or tile_for(batch, n, k // splits, x.dtype)
    block_b = row_block(batch)
    dependent = dependent_launch(x.device, default=True)
    operands = x, weight
    if tile.copy_engine:
        blocks = [block_b, tile.block_k], [tile.outputs, tile.block_k]
        operands = (TensorDescriptor.from_tensor(*pair) for pair in zip(operands, blocks, strict=True))
    backbone_linear_kernel[(triton.cdiv(n, tile.outputs), splits, triton.cdiv(batch, block_b))](
        *operands,
        weight,
        out,
        batch,
        n,
        k,
        k // splits,
        GATE_UP=gate_up,
        PARTIAL=out.dim() == 3,
        COPY_ENGINE=tile.copy_engine,
        DEPENDENT=dependent,
        PREFETCH_LINES=_prefetch_lines(tile, n, k, splits),
        BLOCK_B=block_b,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=dependent,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for rows in ROW_BLOCKS:
            for n, k, splits, kind in (
                (6144, 2560, 1, "whole"),
                (19456, 2560, 1, "gate_up"),
                (2560, 9728, 4, "partial"),
            ):
                tile = tile_for(rows, n, k // splits, dtype)
                constexprs = {
                    "GATE_UP": kind == "gate_up",
                    "PARTIAL": kind == "partial",
                    "COPY_ENGINE": tile.copy_engine,
                    "DEPENDENT": True,
                    "PREFETCH_LINES": _prefetch_lines(tile, n, k, splits),
                    "BLOCK_B": rows,
                    "BLOCK_N": tile.outputs,
                    "BLOCK_K": tile.block_k,
                    "STAGES": tile.stages,
                }
                signature = dict.fromkeys(("x", "weight", "weight_ptr", "out_ptr"), f"*{name}")
                if tile.copy_engine:
                    signature["x"] = f"tensordesc<{name}[{rows}, {tile.block_k}]>"
                    signature["weight"] = f"tensordesc<{name}[{tile.outputs}, {tile.block_k}]>"
                if kind == "partial":
                    signature["out_ptr"] = "*fp32"
                signature |= dict.fromkeys(("batch", "n", "k", "slice_k"), "i32")
                signature |= dict.fromkeys(constexprs, "constexpr")
                options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
                specs.append((backbone_linear_kernel, signature, constexprs, options))
    return specs

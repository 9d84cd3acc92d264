"""`ring_kv_write` in Triton: one program per (tile of tokens, head, batch row)."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moss_kernels._launch import dependent_launch
from moss_kernels.ring_attention.triton_kernel import require_head_dim, rotate_pairs

MAX_BLOCK_TOKENS = 32
# One compiled kernel serves all chunk lengths of a tile size, and all rings.
_NOT_SPECIALIZED = ("tokens", "capacity")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def ring_kv_write_kernel(
    qkv_ptr,
    cos_sin_ptr,
    ring_k_ptr,
    ring_v_ptr,
    slots_ptr,
    valid_ptr,
    offset_ptr,
    tokens,
    capacity,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    valid = tl.load(valid_ptr + row)
    start = tl.load(offset_ptr + slot)

    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    # Of an oversized chunk the last tokens stay; the others would be written to the same places.
    written = ((token < valid) & (token >= valid - capacity))[:, None]
    source = (row * tokens + token)[:, None]
    k_ptrs = qkv_ptr + source * (3 * WIDTH) + (WIDTH + head * HEAD_DIM) + dims[None, :]
    k = tl.load(k_ptrs, mask=written, other=0.0)
    v = tl.load(k_ptrs + WIDTH, mask=written, other=0.0)
    angles = tl.load(cos_sin_ptr + source * HEAD_DIM + dims[None, :], mask=written, other=0.0)
    position = (start % capacity + token) % capacity
    target = ((slot * HEADS + head) * capacity + position)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(ring_k_ptr + target, rotate_pairs(k, angles, BLOCK_TOKENS, HEAD_DIM), mask=written)
    tl.store(ring_v_ptr + target, v, mask=written)


def _launch_options(block_tokens: int, dependent: bool) -> dict[str, object]:
    # No contraction, so that a key has the bits of `rotate_interleaved`.
    warps = min(4, max(1, block_tokens // 4))
    return {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": dependent}


def ring_kv_write_triton(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.ring_kv_write`, which documents and checks the arguments.

    With dependent launch it waits for the kernel before it at its start.
    """
    batch, tokens = qkv.shape[:2]
    heads, capacity, head_dim = ring_k.shape[1:]
    require_head_dim("ring_kv_write", head_dim)
    if batch == 0 or tokens == 0:
        return
    block_tokens = min(MAX_BLOCK_TOKENS, triton.next_power_of_2(tokens))
    dependent = dependent_launch(qkv.device, default=True)
    ring_kv_write_kernel[(triton.cdiv(tokens, block_tokens), heads, batch)](
        qkv,
        cos_sin,
        ring_k,
        ring_v,
        slots,
        valid,
        offset,
        tokens,
        capacity,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        DEPENDENT=dependent,
        **_launch_options(block_tokens, dependent),
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype in ("bf16", "fp32"):
        for block_tokens in (1, 8, MAX_BLOCK_TOKENS):
            signature = {"qkv_ptr": f"*{dtype}", "cos_sin_ptr": "*fp32", "ring_k_ptr": f"*{dtype}"}
            signature |= {"ring_v_ptr": f"*{dtype}", "slots_ptr": "*i32", "valid_ptr": "*i32", "offset_ptr": "*i64"}
            signature |= dict.fromkeys(_NOT_SPECIALIZED, "i32")
            constexprs = {"HEADS": 12, "HEAD_DIM": 64, "BLOCK_TOKENS": block_tokens, "DEPENDENT": True}
            signature |= dict.fromkeys(constexprs, "constexpr")
            specs.append((ring_kv_write_kernel, signature, constexprs, _launch_options(block_tokens, True)))
    return specs

"""Weights on their way into L2 while the kernel before is still running; no kernel of a chunk writes them."""

import triton
import triton.language as tl

# Whether kernels with dependent launch do that.
enabled = True


@triton.jit
def prefetch_weights(ptr, n, k):
    """Asks for this program's share of the 128-byte lines of weights [n, k]."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = 256
    size = tl.cast(n, tl.int64) * k
    share = tl.cdiv(size, tl.num_programs(0))
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, size) - 1
    for start in range(0, share, LINE * LINES):
        address = ptr + tl.minimum(first + start + LINE * tl.arange(0, LINES), last)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

"""`ring_attention` in Triton: one program per (tile of queries, head, batch row), which loops over tiles of keys.

Tokens are numbered relative to the chunk's first; negative ones came before. A program visits the keys in the union of
its queries' windows, no others: first those that lie in the ring, then those of the chunk itself.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moss_kernels._launch import dependent_launch

HEAD_DIMS = (16, 32, 64)

# The start of the running maximum: finite, so that a tile in which a query sees nothing gives weights of 0, not NaN.
_LOWEST = tl.constexpr(-3.0e38)
_NO_KEY = tl.constexpr(-(2**30))
# One compiled kernel serves all chunk lengths of a tile size, and all rings.
_NOT_SPECIALIZED = ("tokens", "slots", "capacity", "window")

# One thread asks for `bytes` at `address` to be brought into L2; a hint that needs no result.
_PREFETCH: tl.constexpr = tl.constexpr(
    """{
    .reg .pred wanted;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 wanted, thread, 0;
    setp.ne.and.u32 wanted, $2, 0, wanted;
    @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def rotate_pairs(x, cos_sin, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rotates neighbouring pairs of [ROWS, HEAD_DIM] queries or keys in float32, rounding once, at the end."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (ROWS, HEAD_DIM // 2, 2)))
    cos, sin = tl.split(tl.reshape(cos_sin, (ROWS, HEAD_DIM // 2, 2)))
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(rotated, (ROWS, HEAD_DIM)).to(x.dtype)


@triton.jit
def _prefetch_ring(ring_k_ptr, ring_v_ptr, slot_ptr, offset_ptr, head, slots, heads, capacity, HEAD_DIM: tl.constexpr):
    # Before the wait the slot and the offset may be stale: they choose what to prefetch, nothing else, and are checked.
    slot = tl.load(slot_ptr, volatile=True)
    slot = tl.where((slot >= 0) & (slot < slots), slot, 0).to(tl.int64)
    held = tl.minimum(tl.maximum(tl.load(offset_ptr + slot, volatile=True), 0), capacity)
    size = held.to(tl.int32) * HEAD_DIM * (ring_k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    ring = (slot * heads + head) * capacity * HEAD_DIM
    arguments = ((ring_k_ptr + ring).to(tl.int64), size)
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", arguments, dtype=tl.int32, is_pure=False, pack=1)
    arguments = ((ring_v_ptr + ring).to(tl.int64), size)
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def attend(q, k, v, visible, result, total, highest, scale):
    # One step of the online softmax, in base 2; `scale` includes log2 e.
    scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    kept = tl.exp2(highest - new_highest)
    total = total * kept + tl.sum(weights, 1)
    result = tl.dot(weights.to(v.dtype), v, result * kept[:, None], input_precision="ieee")
    return result, total, new_highest


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def ring_attention_kernel(
    qkv_ptr,
    cos_sin_ptr,
    ring_k_ptr,
    ring_v_ptr,
    slots_ptr,
    valid_ptr,
    offset_ptr,
    out_ptr,
    scale,
    tokens,
    slots,
    capacity,
    window,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK_IN_RING: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    OWN_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_QUERIES
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if DEPENDENT:
        gdc_launch_dependents()
        if first == 0:
            _prefetch_ring(ring_k_ptr, ring_v_ptr, slots_ptr + row, offset_ptr, head, slots, HEADS, capacity, HEAD_DIM)
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    valid = tl.load(valid_ptr + row)
    start = tl.load(offset_ptr + slot)

    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    query = first + tl.arange(0, BLOCK_QUERIES)
    live = (query < valid)[:, None]
    q_ptrs = qkv_ptr + ((row * tokens + query) * (3 * WIDTH) + head * HEAD_DIM)[:, None] + dims[None, :]
    angle_ptrs = cos_sin_ptr + ((row * tokens + query) * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=live, other=0.0)
    # A chunk of one tile is loaded ahead of the ring, so that its latency is hidden.
    if ONE_TILE and not CHUNK_IN_RING:
        own_k = tl.load(q_ptrs + WIDTH, mask=live, other=0.0)
        own_v = tl.load(q_ptrs + 2 * WIDTH, mask=live, other=0.0)
    cos_sin = tl.load(angle_ptrs, mask=live, other=0.0)
    q = rotate_pairs(q, cos_sin, BLOCK_QUERIES, HEAD_DIM)
    if ONE_TILE and not CHUNK_IN_RING:
        own_k = rotate_pairs(own_k, cos_sin, BLOCK_QUERIES, HEAD_DIM)
    result = tl.zeros((BLOCK_QUERIES, HEAD_DIM), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    highest = tl.full((BLOCK_QUERIES,), _LOWEST, tl.float32)

    # The ring holds the tokens before `edge`, at most the last `capacity` of them. (Not max(-start, edge - capacity):
    # of max(-a, -b, c) ptxas 12.8 drops the minus of a uniform b.)
    edge = valid if CHUNK_IN_RING else 0
    edge_position = ((start + edge) % capacity).to(tl.int32)
    lowest = first - window + 1
    end = tl.minimum(first + BLOCK_QUERIES, valid)
    end = tl.where(first < valid, end, _NO_KEY)
    ring_end = tl.minimum(edge, end)
    ring_base = (slot * HEADS + head) * capacity * HEAD_DIM
    earliest = (query - window)[:, None]
    earliest_held = edge - tl.minimum(start + edge, capacity).to(tl.int32)
    for key_start in tl.range(tl.maximum(lowest, earliest_held), ring_end, BLOCK_KEYS, num_stages=STAGES):
        key = key_start + tl.arange(0, BLOCK_KEYS)
        inside = key < ring_end
        position = edge_position + key - edge
        position = tl.where(position < 0, position + capacity, position)
        tile = (position * HEAD_DIM)[:, None] + dims[None, :]
        k = tl.load(ring_k_ptr + ring_base + tile, mask=inside[:, None], other=0.0)
        v = tl.load(ring_v_ptr + ring_base + tile, mask=inside[:, None], other=0.0)
        key = tl.where(inside, key, _NO_KEY)[None, :]
        visible = key > earliest
        if CHUNK_IN_RING:
            visible &= key <= query[:, None]
        result, total, highest = attend(q, k, v, visible, result, total, highest, scale)

    if not CHUNK_IN_RING:
        if ONE_TILE:
            visible = (query[None, :] > earliest) & (query[None, :] <= query[:, None])
            result, total, highest = attend(q, own_k, own_v, visible, result, total, highest, scale)
        else:
            for key_start in tl.range(tl.maximum(lowest, 0), end, BLOCK_KEYS, num_stages=OWN_STAGES):
                key = key_start + tl.arange(0, BLOCK_KEYS)
                inside = (key < end)[:, None]
                token = (row * tokens + key)[:, None]
                k_ptrs = qkv_ptr + token * (3 * WIDTH) + (WIDTH + head * HEAD_DIM) + dims[None, :]
                k = tl.load(k_ptrs, mask=inside, other=0.0)
                v = tl.load(k_ptrs + WIDTH, mask=inside, other=0.0)
                angles = tl.load(cos_sin_ptr + token * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
                k = rotate_pairs(k, angles, BLOCK_KEYS, HEAD_DIM)
                visible = (key[None, :] > earliest) & (key[None, :] <= query[:, None])
                result, total, highest = attend(q, k, v, visible, result, total, highest, scale)

    # A query that sees no key has a sum of zeros.
    result = tl.where(live, result / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    out_ptrs = out_ptr + ((row * tokens + query) * WIDTH + head * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(query < tokens)[:, None])


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and launch options; chosen by chunk length, dtype and head_dim, never by the batch.

    Attributes:
        queries, keys: of a tile.
        warps: of a program.
        stages: of the loop over the ring.
        own_stages: of the loop over the chunk's own keys, which are rotated on their way.
        max_registers: of a thread; None leaves it to the compiler.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    own_stages: int = 1
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Launch options of Triton."""
        return {"num_warps": self.warps} | ({"maxnreg": self.max_registers} if self.max_registers else {})


def _config(dtype: torch.dtype, tokens: int) -> Config:
    if dtype == torch.float32:
        return Config(queries=16, keys=32, warps=4, stages=2)
    # Few queries wait for latency, not for arithmetic: wide tiles of keys.
    if tokens <= 16:
        return Config(queries=16, keys=128, warps=4, stages=3)
    if tokens <= 32:
        return Config(queries=32, keys=64, warps=4, stages=3)
    return Config(queries=64, keys=64, warps=4, stages=3, own_stages=2)


def require_head_dim(op: str, head_dim: int) -> None:
    """Raises NotImplementedError unless the Triton kernels take the head_dim."""
    if head_dim not in HEAD_DIMS:
        supported = ", ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(f"`{op}`: the Triton kernel takes a head_dim of {supported}, got {head_dim}")


def ring_attention_triton(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    offset: torch.Tensor,
    window: int,
    chunk_in_ring: bool,
    out: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.ring_attention`, which documents and checks the arguments.

    With dependent launch it waits for the kernel before it ahead of its first read of anything that this kernel could
    have written.
    """
    batch, tokens = qkv.shape[:2]
    ring_slots, heads, capacity, head_dim = ring_k.shape
    require_head_dim("ring_attention", head_dim)
    if batch == 0 or tokens == 0:
        return
    config = _config(qkv.dtype, tokens)
    dependent = dependent_launch(qkv.device, default=True)
    ring_attention_kernel[(triton.cdiv(tokens, config.queries), heads, batch)](
        qkv,
        cos_sin,
        ring_k,
        ring_v,
        slots,
        valid,
        offset,
        out,
        head_dim**-0.5 * 1.4426950408889634,
        tokens,
        ring_slots,
        capacity,
        window,
        HEADS=heads,
        HEAD_DIM=head_dim,
        CHUNK_IN_RING=chunk_in_ring,
        BLOCK_QUERIES=config.queries,
        BLOCK_KEYS=config.keys,
        ONE_TILE=tokens <= config.queries,
        STAGES=config.stages,
        OWN_STAGES=config.own_stages,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        **config.options,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for tokens, chunk_in_ring in ((1, False), (32, False), (64, False), (480, False), (480, True)):
            config = _config(dtype, tokens)
            signature = {"qkv_ptr": f"*{name}", "cos_sin_ptr": "*fp32", "ring_k_ptr": f"*{name}"}
            signature |= {"ring_v_ptr": f"*{name}", "slots_ptr": "*i32", "valid_ptr": "*i32", "offset_ptr": "*i64"}
            signature |= {"out_ptr": f"*{name}", "scale": "fp32"} | dict.fromkeys(_NOT_SPECIALIZED, "i32")
            constexprs = {
                "HEADS": 12,
                "HEAD_DIM": 64,
                "CHUNK_IN_RING": chunk_in_ring,
                "BLOCK_QUERIES": config.queries,
                "BLOCK_KEYS": config.keys,
                "ONE_TILE": tokens <= config.queries,
                "STAGES": config.stages,
                "OWN_STAGES": config.own_stages,
                "DEPENDENT": True,
            }
            signature |= dict.fromkeys(constexprs, "constexpr")
            options = config.options | {"launch_pdl": True}
            specs.append((ring_attention_kernel, signature, constexprs, options))
    return specs

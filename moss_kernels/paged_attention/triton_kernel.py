"""`paged_attention` in Triton: programs share the splits of a (row, key head), the last one puts them together.

Each of them normalises and rotates the queries; the one with the last split does the new key as well, and stores it.
How many programs share them is free: a split's partial result and the order of the sum do not depend on who computes.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moss_kernels._launch import dependent_launch
from moss_kernels.kv_append.triton_kernel import rotated_heads

from .reference import MAX_SPLITS, MIN_SPLIT

HEAD_DIMS = (16, 32, 64, 128)
PAGE_SIZES = (16, 32, 64, 128)
WARPS = 4
STAGES = 3
# Three programs on a multiprocessor.
REGISTERS = 168
# Programs that keep all multiprocessors busy; more only end early.
ENOUGH_PROGRAMS = 1024

# The start of the running maximum: finite, so that a difference of two is never NaN.
_LOWEST = tl.constexpr(-3.0e38)
# A split doubles at most so often: beyond 2^31 keys.
_DOUBLINGS = tl.constexpr(20)
# Whether the first pages of a program are asked into L2 while kernels ahead still run.
PREFETCH = True

# One thread asks for `bytes` at `address` to be brought into L2; a hint that needs no result.
_PREFETCH_ASM: tl.constexpr = tl.constexpr(
    """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def _split_size(stored, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    # Keys of a split, where `stored` + 1 keys need at most MAX_SPLITS of them.
    split = tl.full((), MIN_SPLIT, tl.int32)
    for _ in tl.static_range(_DOUBLINGS):
        split = tl.where(stored // MAX_SPLITS >= split, split * 2, split)
    return split


@triton.jit
def _prefetch_pages(
    key_ptr,
    value_ptr,
    page_table_ptr,
    positions_ptr,
    row_ptr,
    kv_head,
    first_split,
    table_pages,
    pool_rows,
    pages,
    KV_HEADS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    # Before the wait all of this may be stale: it chooses what to prefetch, nothing else, and is checked.
    row = tl.load(row_ptr, volatile=True)
    row = tl.where((row >= 0) & (row < pool_rows), row, 0).to(tl.int64)
    stored = tl.minimum(tl.maximum(tl.load(positions_ptr + row, volatile=True), 0), table_pages * PAGE_SIZE - 1)
    first = first_split * _split_size(stored, MIN_SPLIT, MAX_SPLITS)
    size = tl.full((), PAGE_BYTES, tl.int32)
    for step in tl.static_range(MIN_SPLIT // PAGE_SIZE):
        start = first + step * PAGE_SIZE
        if start < stored:
            page = tl.load(page_table_ptr + row * table_pages + start // PAGE_SIZE, volatile=True)
            page = tl.where((page >= 0) & (page < pages), page, 0).to(tl.int64)
            offset = (page * KV_HEADS + kv_head) * PAGE_BYTES
            for base in tl.static_range(2):
                address = (key_ptr if base == 0 else value_ptr).to(tl.int64) + offset
                tl.inline_asm_elementwise(
                    _PREFETCH_ASM, "=r,l,r", (address, size), dtype=tl.int32, is_pure=False, pack=1
                )


@triton.jit
def paged_attention_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    cos_sin_ptr,
    key_ptr,
    value_ptr,
    page_table_ptr,
    positions_ptr,
    row_map_ptr,
    active_ptr,
    out_ptr,
    partials_ptr,
    arrived_ptr,
    scale,
    table_pages,
    pool_rows,
    pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    kv_head = tl.program_id(0)
    batch_row = tl.program_id(1).to(tl.int64)
    first_split, programs = tl.program_id(2), tl.num_programs(2)
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH:
            PAGE_BYTES: tl.constexpr = PAGE_SIZE * HEAD_DIM * key_ptr.dtype.element_ty.primitive_bitwidth // 8
            _prefetch_pages(
                key_ptr, value_ptr, page_table_ptr, positions_ptr, row_map_ptr + batch_row, kv_head, first_split,
                table_pages, pool_rows, pages, KV_HEADS, PAGE_BYTES, PAGE_SIZE, MIN_SPLIT, MAX_SPLITS,
            )  # fmt: skip
        gdc_wait()
    row = tl.load(row_map_ptr + batch_row).to(tl.int64)
    active = tl.load(active_ptr + batch_row) != 0
    # The new token's key is not read back from its page.
    stored = tl.load(positions_ptr + row)
    split = _split_size(stored, MIN_SPLIT, MAX_SPLITS)
    splits = tl.where(active, stored // split + 1, 0)

    dim = tl.arange(0, HEAD_DIM)
    member = tl.arange(0, BLOCK_GROUP)
    is_member = (member < GROUP)[:, None]
    query = (batch_row * KV_HEADS + kv_head) * GROUP
    out_ptrs = out_ptr + (query + member)[:, None] * HEAD_DIM + dim[None, :]
    if splits == 0:
        if first_split == 0:
            tl.store(out_ptrs, tl.zeros((BLOCK_GROUP, HEAD_DIM), out_ptr.dtype.element_ty), mask=is_member)
    elif first_split < splits:
        # Queries of the group, then the new key.
        head, pair = member[:, None], tl.arange(0, HEAD_DIM // 2)[None, :]
        qkv_ptr += batch_row * (KV_HEADS * (GROUP + 2) * HEAD_DIM)
        cos_sin_ptr += stored.to(tl.int64) * HEAD_DIM
        norms = (q_norm_ptr, k_norm_ptr, eps)
        inside = (head <= GROUP) & (pair >= 0)
        low, high = rotated_heads(qkv_ptr, norms, cos_sin_ptr, kv_head, head, pair, inside, KV_HEADS, GROUP, HEAD_DIM)
        q = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_GROUP, HEAD_DIM))
        partials_ptr += query * MAX_SPLITS * (HEAD_DIM + 2)
        page_table_ptr += row * table_pages
        tile = kv_head * PAGE_SIZE * HEAD_DIM + tl.arange(0, PAGE_SIZE)[:, None] * HEAD_DIM + dim[None, :]
        for index in range(first_split, splits, programs):
            result = tl.zeros((BLOCK_GROUP, HEAD_DIM), tl.float32)
            total = tl.zeros((BLOCK_GROUP,), tl.float32)
            highest = tl.full((BLOCK_GROUP,), _LOWEST, tl.float32)
            page = tl.load(page_table_ptr + index * split // PAGE_SIZE)
            if index == splits - 1:
                own_page = tl.load(page_table_ptr + stored // PAGE_SIZE).to(tl.int64)
                place = ((own_page * KV_HEADS + kv_head) * PAGE_SIZE + stored % PAGE_SIZE) * HEAD_DIM
                new_value = tl.load(qkv_ptr + (KV_HEADS * (GROUP + 1) + kv_head) * HEAD_DIM + dim)
                tl.store(value_ptr + place + dim, new_value)
                key_ptrs = key_ptr + place + pair + tl.zeros_like(head)
                is_key = (head == GROUP) & (pair >= 0)
                tl.store(key_ptrs, low, mask=is_key)
                tl.store(key_ptrs + HEAD_DIM // 2, high, mask=is_key)
                highest = _scores_of_last(low, is_key) + _scores_of_last(high, is_key)
                highest *= scale
                total += 1.0
                result += new_value.to(tl.float32)[None, :]
            end = tl.minimum((index + 1) * split, stored)
            for start in tl.range(index * split, end, PAGE_SIZE, num_stages=STAGES):
                base = page.to(tl.int64) * (KV_HEADS * PAGE_SIZE * HEAD_DIM)
                # Read one step ahead: a load whose address is another load would shorten the pipeline.
                page = tl.load(page_table_ptr + start // PAGE_SIZE + 1, mask=start + PAGE_SIZE < end, other=0)
                visible = start + tl.arange(0, PAGE_SIZE) < stored
                k = tl.load(key_ptr + base + tile, mask=visible[:, None], other=0.0)
                v = tl.load(value_ptr + base + tile, mask=visible[:, None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                scores = tl.where(visible[None, :], scores, float("-inf"))
                new_highest = tl.maximum(highest, tl.max(scores, 1))
                weights = tl.exp2(scores - new_highest[:, None])
                kept = tl.exp2(highest - new_highest)
                total = total * kept + tl.sum(weights, 1)
                result = tl.dot(weights.to(v.dtype), v, result * kept[:, None], input_precision="ieee")
                highest = new_highest
            if splits == 1:
                result = result / total[:, None]
                tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_member)
            else:
                part = (index * GROUP + member) * (HEAD_DIM + 2)
                tl.store(partials_ptr + part[:, None] + dim[None, :], result, mask=is_member)
                tl.store(partials_ptr + part + HEAD_DIM, total, mask=member < GROUP)
                tl.store(partials_ptr + part + HEAD_DIM + 1, highest, mask=member < GROUP)
        if splits > 1:
            arrived_ptr += batch_row * KV_HEADS + kv_head
            # Every thread has stored its part before one of them says so.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
            if arrived == tl.minimum(splits, programs) - 1:
                tl.store(arrived_ptr, 0)
                _put_together(partials_ptr, out_ptr + query * HEAD_DIM, splits, GROUP, HEAD_DIM, MAX_SPLITS)


@triton.jit
def _scores_of_last(half, is_key):
    half = half.to(tl.float32)
    return tl.sum(half * tl.sum(tl.where(is_key, half, 0.0), 0)[None, :], 1)


@triton.jit
def _put_together(partials_ptr, out_ptr, splits, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_SPLITS: tl.constexpr):
    dim = tl.arange(0, HEAD_DIM)
    index = tl.arange(0, MAX_SPLITS)
    done = index < splits
    for member in tl.static_range(GROUP):
        part = (index * GROUP + member) * (HEAD_DIM + 2)
        # Other multiprocessors wrote this: L1 may be stale.
        highest = tl.load(partials_ptr + part + HEAD_DIM + 1, mask=done, other=_LOWEST, cache_modifier=".cg")
        total = tl.load(partials_ptr + part + HEAD_DIM, mask=done, other=0.0, cache_modifier=".cg")
        places = partials_ptr + part[:, None] + dim[None, :]
        result = tl.load(places, mask=done[:, None], other=0.0, cache_modifier=".cg")
        weight = tl.exp2(highest - tl.max(highest, 0))
        result = tl.sum(result * weight[:, None], 0) / tl.sum(total * weight, 0)
        tl.store(out_ptr + member * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty))


def programs_per_head(batch: int, kv_heads: int) -> int:
    """Programs that share the splits of a (row, key head)."""
    return min(MAX_SPLITS, triton.cdiv(ENOUGH_PROGRAMS, batch * kv_heads))


def paged_attention_triton(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    row_map: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    arrived: torch.Tensor,
    *,
    min_split: int = MIN_SPLIT,
    programs: int | None = None,
    warps: int = WARPS,
    stages: int = STAGES,
) -> None:
    """Triton implementation of `moss_kernels.paged_attention`, which documents and checks the arguments.

    The keyword arguments are for measurements; `min_split` alone changes the result, in its last bits.
    """
    batch = qkv.shape[0]
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    for name, size, supported in (("head_dim", head_dim, HEAD_DIMS), ("page size", page_size, PAGE_SIZES)):
        if size not in supported:
            raise NotImplementedError(
                f"`paged_attention`: the Triton kernel takes a {name} of {', '.join(map(str, supported))}, got {size}"
            )
    if batch == 0:
        return
    group = out.shape[1] // (kv_heads * head_dim)
    dependent = dependent_launch(qkv.device)
    paged_attention_kernel[(kv_heads, batch, programs or programs_per_head(batch, kv_heads))](
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        key_pages,
        value_pages,
        page_table,
        positions,
        row_map,
        active,
        out,
        partials,
        arrived,
        head_dim**-0.5 * 1.4426950408889634,
        page_table.shape[1],
        page_table.shape[0],
        key_pages.shape[0],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        MIN_SPLIT=max(min_split, page_size),
        MAX_SPLITS=MAX_SPLITS,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group + 1)),
        STAGES=stages,
        DEPENDENT=dependent,
        PREFETCH=PREFETCH,
        num_warps=warps,
        maxnreg=REGISTERS,
        launch_pdl=dependent,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype in ("bf16", "fp32"):
        tensors = ("qkv", "q_norm", "k_norm", "cos_sin", "key", "value", "out")
        signature = {f"{name}_ptr": f"*{dtype}" for name in tensors}
        signature |= {f"{name}_ptr": "*i32" for name in ("page_table", "positions", "row_map", "arrived")}
        signature |= {"active_ptr": "*i1", "partials_ptr": "*fp32"}
        signature |= {"scale": "fp32", "eps": "fp32"}
        signature |= dict.fromkeys(("table_pages", "pool_rows", "pages"), "i32")
        constexprs = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE_SIZE": 64, "MIN_SPLIT": MIN_SPLIT}
        constexprs |= {
            "MAX_SPLITS": MAX_SPLITS,
            "BLOCK_GROUP": 16,
            "STAGES": STAGES,
            "DEPENDENT": True,
            "PREFETCH": True,
        }
        signature = {name: signature.get(name, "constexpr") for name in paged_attention_kernel.arg_names}
        options = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True}
        specs.append((paged_attention_kernel, signature, constexprs, options))
    return specs

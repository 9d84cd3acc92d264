"""`prefill_attention` in Triton: one program per key head and (part of a) tile of queries, which loops over the keys.

A row of a tile is a query head of a position: the query heads of a key head share its keys.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from moss_kernels.ring_attention.triton_kernel import attend

from .reference import TILE

HEAD_DIMS = (16, 32, 64, 128)
# Rows of the smallest product on tensor cores.
_FEWEST_ROWS = 16

# The start of the running maximum: finite, so that a difference of two is never NaN.
_LOWEST = tl.constexpr(-3.0e38)
# One compiled kernel serves passes of all lengths.
_NOT_SPECIALIZED = ("tokens", "table_pages")
_TILE = tl.constexpr(TILE)


@triton.jit
def _load_pages(table_ptr, first, table_pages, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Pages of the keys first .. first + BLOCK_KEYS, as far as the table goes."""
    if PAGE_SIZE % BLOCK_KEYS == 0:
        index = first // PAGE_SIZE
        return tl.load(table_ptr + index, mask=index < table_pages, other=0)
    else:
        index = (first + tl.arange(0, BLOCK_KEYS)) // PAGE_SIZE
        return tl.load(table_ptr + index, mask=index < table_pages, other=0)[:, None]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def prefill_attention_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    page_tables_ptr,
    tiles_ptr,
    out_ptr,
    scale,
    tokens,
    table_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # The last positions of a prompt, with the most keys, begin first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * POSITIONS
    member = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    step = tl.where(member < POSITIONS * GROUP, member // GROUP, tokens)
    # No query lies beyond, but of loads without a condition ptxas has a few under way at a time.
    within = (first + step < tokens)[:, None]
    # Places of a part in 32 bits, of parts and pages in 64.
    part = first.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM)
    places = ((step * KV_HEADS + kv_head) * GROUP + member % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    # Padding is loaded too, so that nothing waits for the count; it is left out at the end.
    q = tl.load(q_ptr + part + places, mask=within, other=0.0)
    whole = first // _TILE
    page_tables_ptr += whole.to(tl.int64) * table_pages
    page = _load_pages(page_tables_ptr, 0, table_pages, PAGE_SIZE, BLOCK_KEYS)
    start = tl.load(tiles_ptr + 2 * whole) + first % _TILE
    count = tl.load(tiles_ptr + 2 * whole + 1) - first % _TILE
    # Keys that the last query sees.
    end = tl.where(count > 0, start + tl.minimum(count, POSITIONS), 0)
    position = (start + step)[:, None]

    result = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    highest = tl.full((BLOCK_ROWS,), _LOWEST, tl.float32)
    for first_key in tl.range(0, end, BLOCK_KEYS, num_stages=STAGES):
        key = first_key + tl.arange(0, BLOCK_KEYS)
        head = (page.to(tl.int64) * KV_HEADS + kv_head) * (PAGE_SIZE * HEAD_DIM)
        # Read one step ahead: a load whose address is another load would shorten the pipeline.
        page = _load_pages(page_tables_ptr, first_key + BLOCK_KEYS, table_pages, PAGE_SIZE, BLOCK_KEYS)
        tile = (key % PAGE_SIZE)[:, None] * HEAD_DIM + dims[None, :]
        inside = (key < end)[:, None]
        k = tl.load(key_ptr + head + tile, mask=inside, other=0.0)
        v = tl.load(value_ptr + head + tile, mask=inside, other=0.0)
        result, total, highest = attend(q, k, v, key[None, :] <= position, result, total, highest, scale)

    result = tl.where((step < count)[:, None], result / total[:, None], 0.0)
    tl.store(out_ptr + part + places, result.to(out_ptr.dtype.element_ty), mask=within)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and launch options; chosen by dtype alone.

    Attributes:
        rows: query heads of positions in a program, at least.
        keys: of a step.
        warps: of a program.
        stages: of the loop over the keys.
        max_registers: of a thread; None leaves it to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Launch options of Triton."""
        return {"num_warps": self.warps} | ({"maxnreg": self.max_registers} if self.max_registers else {})


CONFIGS = {
    # Three programs on a multiprocessor; with fewer registers the first loads wait for each other.
    torch.bfloat16: Config(rows=64, keys=32, warps=4, stages=3, max_registers=160),
    torch.float32: Config(rows=16, keys=32, warps=4, stages=2),
}


def prefill_attention_triton(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """Triton implementation of `moss_kernels.prefill_attention`, which documents and checks the arguments.

    `config` is for measurements; its `keys` alone change the result, in its last bits.
    """
    kv_heads, page_size, head_dim = key_pages.shape[1:]
    if head_dim not in HEAD_DIMS:
        supported = ", ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(
            f"`prefill_attention`: the Triton kernel takes a head_dim of {supported}, got {head_dim}"
        )
    if q.shape[0] == 0:
        return
    group = q.shape[1] // (kv_heads * head_dim)
    config = config or CONFIGS[q.dtype]
    positions, rows = _shape(config, group)
    prefill_attention_kernel[(kv_heads, q.shape[0] // positions)](
        q,
        key_pages,
        value_pages,
        page_tables,
        tiles,
        out,
        head_dim**-0.5 * 1.4426950408889634,
        q.shape[0],
        page_tables.shape[1],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        POSITIONS=positions,
        BLOCK_ROWS=rows,
        BLOCK_KEYS=config.keys,
        STAGES=config.stages,
        **config.options,
    )


def _shape(config: Config, group: int) -> tuple[int, int]:
    """Positions of a program, which divide a tile, and the rows that hold their query heads."""
    positions = TILE
    while positions > 1 and positions * group > config.rows:
        positions //= 2
    return positions, max(triton.next_power_of_2(positions * group), _FEWEST_ROWS)


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        config = CONFIGS[dtype]
        for page_size in (64, 16):
            signature = {f"{tensor}_ptr": f"*{name}" for tensor in ("q", "key", "value", "out")}
            signature |= {"page_tables_ptr": "*i32", "tiles_ptr": "*i32", "scale": "fp32"}
            signature |= dict.fromkeys(_NOT_SPECIALIZED, "i32")
            constexprs = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE_SIZE": page_size}
            constexprs |= dict(zip(("POSITIONS", "BLOCK_ROWS"), _shape(config, 4), strict=True))
            constexprs |= {"BLOCK_KEYS": config.keys, "STAGES": config.stages}
            signature = {name: signature.get(name, "constexpr") for name in prefill_attention_kernel.arg_names}
            specs.append((prefill_attention_kernel, signature, constexprs, config.options))
    return specs

"""Which kernel and which tile of the output `codec_linear` uses: tables, so that nothing is tuned at run time."""

from functools import cache
from typing import Literal, NamedTuple

import torch


class Tile(NamedTuple):
    """A launch configuration.

    Attributes:
        kind: `stream`, `tile` or `persistent`: the kernel, each in the file of that name; `library`: cuBLAS between a
            kernel for the norm and one for what follows the product.
        block_m, block_n: rows and columns of the output tile.
        block_k: step of the loop over K; of a `stream` kernel the part of it that one warp takes.
        warps, stages: of the compiled kernel.
        resident: programs that a `persistent` kernel keeps on a multiprocessor.
    """

    kind: Literal["stream", "tile", "persistent", "library"]
    block_m: int = 1
    block_n: int = 1
    block_k: int = 1
    warps: int = 1
    stages: int = 1
    resident: int = 1

    def count(self, m: int, n: int) -> int:
        """Number of tiles that cover an output of m rows and n columns."""
        return -(-m // self.block_m) * -(-n // self.block_n)


class CudaTile(NamedTuple):
    """Of CUDA C++ kernels for more than a few rows: rows and columns of a tile, and blocks that share its inputs."""

    rows: int
    columns: int
    slices: int


# For weights [N, K]: from how many rows up to how many which tile.
_CudaTable = dict[tuple[int, int], tuple[tuple[int, int, CudaTile], ...]]

_LIBRARY = Tile("library")
_STREAM = Tile("stream", 16, 16, 64, 4, 5)
_TILE_64_32 = Tile("tile", 64, 32, 128, 4, 4)
_TILE_64_64 = Tile("tile", 64, 64, 128, 4, 3)
# For inputs, weights and outputs that are not of one dtype, too.
ANY_DTYPE = Tile("tile", 128, 128, 64, 8, 3)
_PERSISTENT_64_128 = Tile("persistent", 64, 128, 64, 4, 4, resident=2)
_PERSISTENT_128_128 = Tile("persistent", 128, 128, 64, 8, 4)
_PERSISTENT_128_128_TWICE = Tile("persistent", 128, 128, 64, 8, 3, resident=2)
_PERSISTENT_128_256 = Tile("persistent", 128, 256, 64, 8, 4)

# Measured on an H200, for bf16 weights [N, K] of the codec: up to how many rows which tile.
_MEASURED: dict[tuple[int, int], tuple[tuple[float, Tile], ...]] = {
    (3840, 1280): ((128, _TILE_64_32), (512, _PERSISTENT_64_128), (float("inf"), _PERSISTENT_128_256)),
    (1280, 1280): ((256, _TILE_64_32), (1200, _PERSISTENT_128_128), (float("inf"), _PERSISTENT_128_128_TWICE)),
    (5120, 1280): (
        (128, _TILE_64_32),
        (512, _PERSISTENT_64_128),
        (1200, _PERSISTENT_128_128_TWICE),
        (float("inf"), _PERSISTENT_128_128),
    ),
    (1280, 5120): ((256, _TILE_64_32), (640, _PERSISTENT_128_128), (float("inf"), _LIBRARY)),
    (2304, 768): (
        (192, _TILE_64_32),
        (320, _TILE_64_64),
        (800, _PERSISTENT_128_128),
        (6000, _LIBRARY),
        (12000, _PERSISTENT_128_128),
        (float("inf"), _PERSISTENT_128_256),
    ),
    (768, 768): (
        (640, _TILE_64_32),
        (1300, _TILE_64_64),
        (3000, _PERSISTENT_64_128),
        (12000, _PERSISTENT_128_128),
        (float("inf"), _PERSISTENT_128_256),
    ),
    (3072, 768): (
        (192, _TILE_64_32),
        (320, _TILE_64_64),
        (12000, _PERSISTENT_128_128),
        (float("inf"), _PERSISTENT_128_256),
    ),
    (768, 3072): (
        (640, _TILE_64_32),
        (1300, _TILE_64_64),
        (3000, _PERSISTENT_64_128),
        (12000, _PERSISTENT_128_128),
        (float("inf"), _PERSISTENT_128_256),
    ),
}
# For other sizes, largest first: large tiles read less per product, small ones keep all multiprocessors busy.
_BF16_TILES = (_PERSISTENT_128_256, ANY_DTYPE, _PERSISTENT_64_128, _TILE_64_64, _TILE_64_32, _STREAM)
_FP32_TILES = (
    Tile("tile", 64, 64, 32, 8, 3),
    Tile("tile", 32, 32, 32, 4, 3),
    Tile("stream", 16, 16, 16, 4, 3),
)
# Tiles that an output must have to be cut that way: most multiprocessors have work. Of persistent programs each takes
# several tiles, or there is nothing to overlap.
_ENOUGH = {"stream": 88, "tile": 88, "persistent": 528}

_SMALL_24 = CudaTile(64, 24, 1)
_SMALL_24_TWICE = CudaTile(64, 24, 2)
_SMALL_24_FOUR = CudaTile(64, 24, 4)
_SMALL_32 = CudaTile(64, 32, 1)
_SMALL_40_TWICE = CudaTile(64, 40, 2)
_SMALL_48 = CudaTile(64, 48, 1)
_SMALL_48_FOUR = CudaTile(64, 48, 4)
_MIDDLE_72 = CudaTile(128, 72, 1)
_MIDDLE_96_FOUR = CudaTile(128, 96, 4)
_LARGE_48 = CudaTile(192, 48, 1)
_LARGE_64_TWICE = CudaTile(192, 64, 2)
# Measured on an H200 in whole layers.
_MEASURED_CUDA: _CudaTable = {
    (2304, 768): ((33, 256, _SMALL_48), (449, 512, _MIDDLE_72)),
    (768, 768): (
        (33, 64, _SMALL_24_FOUR),
        (65, 256, _SMALL_24_TWICE),
        (257, 448, _SMALL_48),
        (449, 640, _SMALL_32),
        (641, 768, _SMALL_48),
        (769, 1536, _MIDDLE_72),
    ),
    (3072, 768): (
        (33, 64, _SMALL_24),
        (65, 128, _SMALL_32),
        (129, 256, _SMALL_48),
        (257, 384, _MIDDLE_72),
        (1409, 1536, CudaTile(192, 96, 1)),
    ),
    (768, 3072): (
        (33, 64, _SMALL_24_FOUR),
        (65, 128, _SMALL_48_FOUR),
        (129, 256, _SMALL_24_TWICE),
        (257, 384, CudaTile(192, 64, 4)),
        (385, 512, CudaTile(128, 48, 2)),
        (513, 576, CudaTile(128, 80, 2)),
        (577, 768, CudaTile(192, 48, 2)),
        (769, 1536, _MIDDLE_72),
    ),
    (3840, 1280): (
        (17, 32, _SMALL_48),
        (33, 48, _SMALL_24),
        (49, 64, _SMALL_32),
        (65, 128, _SMALL_48),
        (129, 192, _LARGE_48),
        (193, 256, _MIDDLE_72),
    ),
    (1280, 1280): (
        (17, 64, _SMALL_24_FOUR),
        (65, 128, _SMALL_24_TWICE),
        (129, 256, _SMALL_40_TWICE),
        (257, 384, _SMALL_32),
        (385, 576, _LARGE_64_TWICE),
    ),
    (5120, 1280): (
        (17, 32, CudaTile(64, 48, 2)),
        (33, 64, _SMALL_48),
        (65, 128, CudaTile(128, 80, 2)),
        (129, 160, CudaTile(128, 80, 1)),
        (161, 192, _LARGE_48),
    ),
    (1280, 5120): (
        (17, 32, CudaTile(64, 48, 8)),
        (33, 64, _SMALL_24_FOUR),
        (65, 128, _SMALL_48_FOUR),
        (129, 160, _MIDDLE_96_FOUR),
        (161, 192, CudaTile(192, 48, 4)),
        (193, 256, _MIDDLE_96_FOUR),
        (257, 384, CudaTile(128, 128, 4)),
        (385, 576, _LARGE_64_TWICE),
        (577, 768, CudaTile(192, 80, 2)),
        (769, 1024, CudaTile(128, 160, 2)),
    ),
    # From a stage to the next one, and to samples.
    (1536, 1280): ((33, 128, _SMALL_24_TWICE), (129, 256, _SMALL_40_TWICE)),
    (1536, 768): (
        (17, 32, _SMALL_32),
        (33, 64, _SMALL_24),
        (65, 128, _SMALL_40_TWICE),
        (129, 256, _SMALL_32),
        (257, 448, _SMALL_48),
    ),
    (240, 768): ((33, 512, _SMALL_24_TWICE), (513, 3072, CudaTile(192, 48, 2))),
}

# The same for slices of the inputs whose sums the next norm adds up, where that is faster with it than adding them to
# the stream at once; and of q, k and v, whose sums `ring_attention` adds.
_MEASURED_PARTIAL: _CudaTable = {
    (768, 768): (
        (33, 128, CudaTile(64, 32, 3)),
        (129, 256, CudaTile(64, 32, 2)),
        (257, 384, CudaTile(64, 48, 2)),
    ),
    (768, 3072): (
        (33, 64, CudaTile(64, 64, 8)),
        (65, 128, CudaTile(64, 48, 4)),
        (129, 192, CudaTile(64, 48, 3)),
        (193, 256, CudaTile(128, 48, 4)),
        (257, 384, CudaTile(128, 64, 3)),
        (385, 512, CudaTile(128, 64, 2)),
    ),
    (3840, 1280): ((49, 64, CudaTile(64, 64, 4)),),
    (1280, 1280): ((17, 64, CudaTile(64, 40, 4)), (65, 128, CudaTile(64, 40, 2))),
    (1280, 5120): (
        (17, 32, CudaTile(64, 48, 8)),
        (33, 64, CudaTile(64, 40, 5)),
        (65, 128, CudaTile(128, 48, 4)),
        (129, 192, CudaTile(192, 48, 4)),
    ),
}

# The same for linears that leave the stream normalised as well. All of their blocks run at once.
_MEASURED_NORMED: _CudaTable = {
    (768, 768): ((705, 1024, CudaTile(64, 96, 1)), (1409, 2048, CudaTile(128, 96, 1))),
    (768, 3072): ((705, 1024, CudaTile(64, 96, 1)), (1089, 2048, CudaTile(128, 96, 1))),
}

HEAD_DIM = 64  # of heads whose outputs can be rotated

# Tiles of so many columns or more, whose inputs are not shared, are those of the kernels for many rows.
_WIDE_COLUMNS = 96
_WIDE_SIZES = ((192, 192), (192, 96), (128, 192), (128, 160), (128, 144), (128, 128), (128, 96))
# codec_linear_pingpong.cu, in blocks that take several
_TWO_AT_A_TIME = ((128, 192), (128, 144), (128, 128), (128, 96))
_WIDE = tuple(CudaTile(*size, 1) for size in _WIDE_SIZES)
# From how many rows they win, for weights [N, K].
_WIDE_LEAST_ROWS = {
    (3840, 1280): 257,
    (1280, 1280): 577,
    (5120, 1280): 193,
    (1280, 5120): 1025,
    (2304, 768): 257,
    (768, 768): 1537,
    (3072, 768): 385,
    (768, 3072): 1537,
    (1536, 1280): 257,
    (1536, 768): 449,
}
WIDE_MOST_ROWS = 1 << 20  # kClusterMaxRows of csrc/codec_linear.h


def is_wide(tile: CudaTile) -> bool:
    """Whether a tile is one of the kernels for many rows."""
    return tile.columns >= _WIDE_COLUMNS and tile.slices == 1


def _measured(table: _CudaTable, m: int, n: int, k: int) -> CudaTile | None:
    return next((tile for least, most, tile in table.get((n, k), ()) if least <= m <= most), None)


def partial_tile_for(m: int, n: int, k: int) -> CudaTile | None:
    """The tile for m rows of bfloat16 weights [n, k] whose sums over slices are best left as they are, if any."""
    return _measured(_MEASURED_PARTIAL, m, n, k)


def normed_tile_for(m: int, n: int, k: int) -> CudaTile | None:
    """The tile for m rows of bfloat16 weights [n, k] that leaves the next norm's rows as well, if that is best."""
    return _measured(_MEASURED_NORMED, m, n, k)


def normed_rows(m: int, n: int, k: int) -> int:
    """Most rows up to m for which there is such a tile."""
    return max((min(m, most) for least, most, _ in _MEASURED_NORMED.get((n, k), ()) if least <= m), default=0)


def partial_elements(m: int, n: int, k: int) -> int:
    """Most partial sums that any number of rows up to m leaves."""
    choices = [choice for choice in _MEASURED_PARTIAL.get((n, k), ()) if choice[0] <= m]
    return max((tile.slices * min(m, most) * n for _, most, tile in choices), default=0)


def cuda_tile_for(m: int, n: int, k: int) -> CudaTile | None:
    """The tile of a CUDA C++ kernel for m rows of bfloat16 weights [n, k], if one is best."""
    if tile := _measured(_MEASURED_CUDA, m, n, k):
        return tile
    return wide_tile(m, n, k) if _WIDE_LEAST_ROWS.get((n, k), m + 1) <= m <= WIDE_MOST_ROWS else None


def _rotates(tile: CudaTile, rounds: int) -> bool:
    """Whether the kernel of a tile rotates: it has whole heads, and registers for the angles of a thread's rows."""
    return tile.columns == 128 or (tile.columns == 192 and not _hides(tile, rounds))


def _hides(tile: CudaTile, rounds: int) -> bool:
    """Whether what follows the products of a tile is hidden by those of the next."""
    return rounds > 1 and tile[:2] in _TWO_AT_A_TIME


def _rounds(tile: CudaTile, m: int, n: int) -> int:
    return -(-(-(-m // tile.rows) * -(-n // tile.columns)) // 132)


@cache
def wide_tile(m: int, n: int, k: int, *, rotated: bool = False) -> CudaTile:
    """The wide tile that takes the least time for m rows of weights [n, k], on the 132 multiprocessors of an H200.

    With `rotated` of those whose outputs can be rotated.

    Cycles of a tile, fitted to measurements: 2 for each 64 products of a row and a column in steps of 64 inputs, those
    of its loads, and what follows the products: with two tiles at a time hidden by the products of the next, so that
    it counts once.
    """

    def time(tile: CudaTile) -> float:
        rounds = _rounds(tile, m, n)
        steps, area = k / 64, tile.rows * tile.columns / 64
        products = 2 * area * steps + 0.37 * (tile.rows + tile.columns) * steps + 835
        return rounds * products + area * (12 if _hides(tile, rounds) else 8 * rounds)

    return min((tile for tile in _WIDE if not rotated or _rotates(tile, _rounds(tile, m, n))), key=time)


def _tiles_of(table: _CudaTable) -> tuple[CudaTile, ...]:
    return tuple(dict.fromkeys(tile for choices in table.values() for _, _, tile in choices))


def cuda_tiles() -> tuple[CudaTile, ...]:
    """All in use."""
    return tuple(dict.fromkeys((*_tiles_of(_MEASURED_CUDA), *_WIDE)))


def partial_tiles() -> tuple[CudaTile, ...]:
    """All of those whose sums over slices are left."""
    return _tiles_of(_MEASURED_PARTIAL)


def normed_tiles() -> tuple[CudaTile, ...]:
    """All of those that leave the next norm's rows as well."""
    return _tiles_of(_MEASURED_NORMED)


def candidates(dtype: torch.dtype) -> tuple[Tile, ...]:
    """All tiles of Triton kernels in use for weights of a dtype."""
    if dtype == torch.float32:
        return _FP32_TILES
    measured = (tile for choices in _MEASURED.values() for _, tile in choices)
    return tuple(tile for tile in dict.fromkeys((*_BF16_TILES, *measured)) if tile is not _LIBRARY)


def tile_for(m: int, n: int, k: int, dtype: torch.dtype) -> Tile:
    """The tile for m rows of weights [n, k]: the measured one, or the largest that gives most multiprocessors work."""
    if dtype == torch.bfloat16 and m > _STREAM.block_m * 2:
        for most, tile in _MEASURED.get((n, k), ()):
            if m <= most:
                return tile
    tiles = _FP32_TILES if dtype == torch.float32 else _BF16_TILES
    for tile in tiles[:-1]:
        fits = m > tile.block_m // 2 or tile.block_m == 16
        if fits and tile.count(m, n) >= _ENOUGH[tile.kind]:
            return tile
    return tiles[-1]

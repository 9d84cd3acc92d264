"""Which tile of the output one program of `codec_linear` computes: a table, so that nothing is tuned at run time."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A launch configuration.

    Attributes:
        block_m, block_n: rows and columns of the output tile.
        block_k: step of the loop over K.
        warps, stages: of the compiled kernel.
        norm_inside: True: LayerNorm is part of the product's kernel, whose programs all compute the statistics of
            their rows. False: a kernel of its own writes normalised rows first.
        persistent: 0: one program per tile. Otherwise programs per multiprocessor that go from tile to tile.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    norm_inside: bool
    persistent: int = 0


# Large tiles read less per product, small ones keep all multiprocessors busy. Largest first.
_BF16_TILES = (
    Tile(128, 256, 64, 8, 4, False, persistent=1),
    Tile(128, 128, 64, 8, 3, False),
    Tile(128, 64, 64, 4, 4, False),
    Tile(64, 64, 64, 4, 5, False),
    Tile(64, 32, 128, 4, 4, True),
    Tile(32, 32, 128, 4, 5, True),
    Tile(32, 16, 128, 4, 5, True),
    Tile(16, 16, 256, 4, 5, True),
    Tile(16, 8, 256, 4, 6, True),
)
_FP32_TILES = (
    Tile(64, 64, 32, 8, 3, False),
    Tile(32, 32, 32, 4, 3, True),
    Tile(16, 16, 64, 4, 3, True),
)
# Programs that a tile must give to be chosen: most multiprocessors have work, in few waves.
_ENOUGH_PROGRAMS = 88
# Of a persistent tile more: its programs take several each, or there is nothing to overlap.
_ENOUGH_PERSISTENT_TILES = 528


def programs(tile: Tile, m: int, n: int) -> int:
    """Number of tiles that cover an output of m rows and n columns."""
    return -(-m // tile.block_m) * -(-n // tile.block_n)


def candidates(dtype: torch.dtype) -> tuple[Tile, ...]:
    """All tiles in use for weights of a dtype, largest first."""
    return _FP32_TILES if dtype == torch.float32 else _BF16_TILES


def tile_for(m: int, n: int, dtype: torch.dtype) -> Tile:
    """The tile for an output of m rows and n columns: the largest that still gives most multiprocessors work."""
    tiles = candidates(dtype)
    for tile in tiles[:-1]:
        enough = _ENOUGH_PERSISTENT_TILES if tile.persistent else _ENOUGH_PROGRAMS
        if (m > tile.block_m // 2 or tile.block_m == 16) and programs(tile, m, n) >= enough:
            return tile
    return tiles[-1]

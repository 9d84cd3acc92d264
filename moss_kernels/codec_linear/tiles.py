"""Which kernel and which tile of the output `codec_linear` uses: a table, so that nothing is tuned at run time."""

from typing import Literal, NamedTuple

import torch


class Tile(NamedTuple):
    """A launch configuration.

    Attributes:
        kind: `stream`, `tile` or `persistent`: the kernel, each in the file of that name.
        block_m, block_n: rows and columns of the output tile.
        block_k: step of the loop over K; of a `stream` kernel the part of it that one warp takes.
        warps, stages: of the compiled kernel.
        resident: programs that a `persistent` kernel keeps on a multiprocessor.
    """

    kind: Literal["stream", "tile", "persistent"]
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    resident: int = 1

    def count(self, m: int, n: int) -> int:
        """Number of tiles that cover an output of m rows and n columns."""
        return -(-m // self.block_m) * -(-n // self.block_n)


# Large tiles read less per product, small ones keep all multiprocessors busy. Largest first.
_BF16_TILES = (
    Tile("persistent", 128, 256, 64, 8, 4),
    Tile("tile", 128, 128, 64, 8, 3),
    Tile("tile", 128, 64, 64, 4, 4),
    Tile("tile", 64, 64, 64, 4, 5),
    Tile("stream", 64, 32, 16, 8, 4),
    Tile("stream", 64, 16, 32, 4, 5),
    Tile("stream", 32, 32, 32, 4, 5),
    Tile("stream", 32, 16, 64, 4, 5),
    Tile("stream", 16, 16, 64, 4, 5),
    Tile("stream", 16, 8, 64, 4, 6),
)
_FP32_TILES = (
    Tile("tile", 64, 64, 32, 8, 3),
    Tile("tile", 32, 32, 32, 4, 3),
    Tile("stream", 16, 16, 16, 4, 3),
)
# Tiles that an output must have to be cut that way: most multiprocessors have work. Of persistent programs each takes
# several tiles, or there is nothing to overlap.
_ENOUGH = {"stream": 88, "tile": 88, "persistent": 528}


def candidates(dtype: torch.dtype) -> tuple[Tile, ...]:
    """All tiles in use for weights of a dtype, largest first."""
    return _FP32_TILES if dtype == torch.float32 else _BF16_TILES


def tile_for(m: int, n: int, dtype: torch.dtype) -> Tile:
    """The tile for an output of m rows and n columns: the largest that still gives most multiprocessors work."""
    tiles = candidates(dtype)
    for tile in tiles[:-1]:
        fits = m > tile.block_m // 2 or tile.block_m == 16
        if fits and tile.count(m, n) >= _ENOUGH[tile.kind]:
            return tile
    return tiles[-1]

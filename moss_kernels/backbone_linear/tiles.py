"""Which tile of the output a program of `backbone_linear` in Triton takes: a table; nothing is tuned at run time.

The sum over a slice of K runs in steps of 16 in ascending order with every bfloat16 tile, so that the choice, which
looks at the number of rows, cannot show in the result.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A launch configuration.

    Attributes:
        outputs: rows of the weight that a program takes.
        block_k: step of its loop over K.
        warps, stages: of the compiled kernel.
        copy_engine: whether tiles are loaded with the copy engine (TMA) or thread by thread.
    """

    outputs: int
    block_k: int
    warps: int
    stages: int
    copy_engine: bool


ROW_BLOCKS = (16, 32, 64, 128)
_FP32 = Tile(16, 32, 4, 3, False)
# By padded rows. All programs of a launch fit on the multiprocessors at once: there is no last wave.
_BF16 = {
    16: Tile(64, 128, 4, 3, True),
    32: Tile(64, 128, 4, 3, True),
    64: Tile(64, 64, 4, 4, True),
    128: Tile(128, 64, 8, 3, True),
}
# Fewer outputs, for which tiles of 64 still fill the multiprocessors.
_BF16_MIDDLE = {
    16: Tile(64, 128, 4, 4, True),
    32: Tile(64, 128, 4, 4, True),
    64: Tile(64, 128, 4, 5, True),
    128: Tile(64, 64, 4, 8, True),
}
# So few that K is cut as well: two programs have to fit on a multiprocessor.
_BF16_NARROW = {
    16: Tile(64, 128, 4, 4, True),
    32: Tile(64, 128, 4, 4, True),
    64: Tile(64, 64, 4, 6, True),
    128: Tile(64, 64, 4, 4, True),
}
_WIDE, _MIDDLE = 10_000, 5_000


def row_block(rows: int) -> int:
    """Rows padded to what a kernel is compiled for; rows beyond the last of ROW_BLOCKS go in several blocks."""
    return next((block for block in ROW_BLOCKS if rows <= block), ROW_BLOCKS[-1])


def tile_for(rows: int, n: int, slice_k: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` rows and N outputs, summed over `slice_k` columns."""
    if dtype != torch.bfloat16:
        return _FP32
    table = _BF16 if n >= _WIDE else _BF16_MIDDLE if n >= _MIDDLE else _BF16_NARROW
    tile = table[row_block(rows)]
    # The copy engine would run over into the next slice.
    return tile if slice_k % tile.block_k == 0 else tile._replace(copy_engine=False)

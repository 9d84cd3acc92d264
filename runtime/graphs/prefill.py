"""Prefill: all prompt rows but the last go through the backbone; the last row's embedding goes into the staging row."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from moss_kernels.backbone_linear import split_count
from moss_kernels.embed_codes import embed_codes
from moss_kernels.kv_append import kv_append
from moss_kernels.prefill_attention import TILE, prefill_attention
from moss_kernels.prefill_linear import prefill_linear
from moss_kernels.rms_norm import rms_norm
from moss_runtime.graphs.backbone_step import BackboneStep, StepLayer
from moss_runtime.graphs.capture import Branch, GraphSet, bucket_for
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import Metrics
from moss_runtime.state.decode_pool import DecodePool
from moss_runtime.state.kv_cache import PagedKV
from moss_runtime.state.pinned import pinned

# Most tokens of a piece of a prompt.
PIECE = 512
# Most prompts of a pass, and tokens of a pass, to which fewer are padded; from 512 on in tiles of the linears.
PROMPTS = 16
TOKENS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048)
# Most tokens of a pass, padding included: running streams wait for no more than this with a frame.
MAX_TOKENS = TOKENS[-1]
# Rows of a pass, padding and those of running streams included, from which a linear into the residual stream is faster
# in one piece than in slices of its inputs: more than four tiles of 64. The bits are the same.
WHOLE_ROWS = 257


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive rows of one prompt, prefilled in one pass.

    Attributes:
        row: pool row of the request.
        start: tokens of the prompt that earlier pieces hold.
        ids: [n, 1+n_vq] i64; n may be 0.
        last: [1+n_vq] i64. The prompt's last row.
    """

    row: int
    start: int
    ids: np.ndarray
    last: np.ndarray

    @property
    def tiles(self) -> list[tuple[int, int, int]]:
        """Row, first position and number of tokens of each of its tiles in a pass."""
        count = len(self.ids)
        return [(self.row, self.start + first, min(TILE, count - first)) for first in range(0, count, TILE)]


def cut(row: int, prompt: Tensor, size: int = PIECE) -> list[Piece]:
    """Pieces of a prompt [T, 1+n_vq] i64, of at most `size` tokens. How it is cut depends on T alone."""
    rows = prompt.cpu().numpy()
    ids, last = rows[:-1], rows[-1]
    return [Piece(row, start, ids[start : start + size], last) for start in range(0, max(len(ids), 1), size)]


class Prefill:
    """Writes keys and values of prompts into their pages, several prompts in one pass.

    Prompts lie one behind the other, each from a new tile of tokens on. Attention depends on a tile alone; only the
    linears see how many there are, and on a GPU those give a row the same bits in any number of rows.

    Attributes:
        graphs: one for each number of tokens.
        piece: most tokens of a piece.
        max_tokens: most tokens of a pass.
    """

    def __init__(
        self,
        model: MossTTS,
        step: BackboneStep,
        pool: DecodePool,
        kv: PagedKV,
        *,
        piece: int = PIECE,
        prompts: int = PROMPTS,
        tokens: Sequence[int] = TOKENS,
        max_tokens: int = MAX_TOKENS,
        stream: torch.cuda.Stream | None = None,
        metrics: Metrics | None = None,
        graphs: bool = True,
    ):
        """Allocates the static inputs.

        Args:
            model: embeds the prompt; its backbone's norms are read here.
            step: holds the stacked weights of the same backbone.
            pool: gets staging rows and positions.
            kv: gets keys and values; pages must be reserved before a pass.
            piece: most tokens of a piece, a multiple of TILE for every prompt to have the same tiles.
            prompts: most prompts of a pass.
            tokens: buckets of the number of tokens of a pass, multiples of TILE.
            max_tokens: most tokens of a pass, padding included; a piece always fits.
            stream: of the graphs.
            metrics: for replays and eager passes.
            graphs: False runs everything eagerly.
        """
        self.model, self.pool, self.kv, self._step = model, pool, kv, step
        weights = model.frame_weights()
        self._tables = weights.embed_tokens, weights.audio_embeddings, weights.audio_pad_token_id
        self.piece, self._prompts = piece, prompts
        self.max_tokens = max(max_tokens // TILE, -(-piece // TILE)) * TILE
        self.buckets = sorted({count for count in tokens if count < self.max_tokens} | {self.max_tokens})
        # Rows and tiles lie at the same places for every shape, so that null rows without tokens serve all; then come
        # the ids of last rows and of tokens.
        columns = 1 + model.config.n_vq
        self._sizes = prompts, 3 * (self.max_tokens // TILE), (prompts + self.max_tokens) * columns
        self._inputs = torch.zeros(sum(self._sizes), dtype=torch.int64, device=model.device)
        options = {"device": model.device, "stream": stream, "metrics": metrics, "enabled": graphs}
        self.graphs = GraphSet("prefill", [(count,) for count in self.buckets], self.compute, **options)
        self._branch = Branch(self.graphs.stream)

    def warm_up(self, progress=lambda: None) -> None:
        """Capture the graphs."""
        self._inputs.zero_()
        self._inputs[: self._prompts] = self.kv.rows
        self.graphs.capture(progress)

    def next_pass(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those of the waiting pieces, of different rows and in order, that go into the next pass: as many as fit."""
        tiles = itertools.accumulate(len(piece.tiles) for piece in pieces[: self._prompts])
        fit = sum(TILE * count <= self.max_tokens for count in tiles)
        return list(pieces[:fit])

    def run(self, pieces: Sequence[Piece]) -> None:
        """One pass over pieces as `next_pass` gives them. On CUDA the current stream must be that of the graphs."""
        self.graphs.run(self.fill_inputs(pieces))

    def fill_inputs(self, pieces: Sequence[Piece]) -> int:
        """Copy a pass to the device without waiting; returns its tokens, padded to a bucket."""
        config, null_row = self.model.config, self.kv.rows
        tiles = [tile for piece in pieces for tile in piece.tiles]
        tokens = bucket_for(TILE * len(tiles), self.buckets)
        tiles += [(null_row, 0, 0)] * (self.max_tokens // TILE - len(tiles))
        ids = np.full((self._prompts + tokens, 1 + config.n_vq), config.audio_pad_token_id)
        ids[:, 0] = config.pad_token_id
        place = self._prompts
        for index, piece in enumerate(pieces):
            ids[index] = piece.last
            ids[place : place + len(piece.ids)] = piece.ids
            place += -(-len(piece.ids) // TILE) * TILE
        rows = [piece.row for piece in pieces] + [null_row] * (self._prompts - len(pieces))
        values = np.concatenate((rows, np.ravel(tiles), np.ravel(ids)))
        self._inputs[: len(values)].copy_(pinned(values, torch.int64, self._inputs.device), non_blocking=True)
        return tokens

    def compute(self, tokens: int) -> None:
        """The work of a pass: static inputs to pages and staging rows; this is what a graph holds."""
        self.layers(*self.begin(tokens))

    def begin(self, tokens: int) -> tuple[Tensor, "PagedContext"]:
        """Fill the staging rows of a pass; the embeddings [T, H] of its tokens, and where they lie."""
        columns = 1 + self.model.config.n_vq
        rows, tiles, ids = self._inputs.split(self._sizes)
        staging = self.pool.staging
        ids = ids.view(-1, columns)[: len(rows) + tokens]
        embeds = staging.new_empty(len(ids), staging.shape[1])
        embed_codes(ids[:, 0], ids[:, 1:], *self._tables, embeds)
        last, embeds = embeds.split([len(rows), tokens])
        # Padding writes what the null row holds to the null row.
        live = (rows != self.kv.rows)[:, None]
        staging.index_copy_(0, rows, torch.where(live, last, staging[rows]))
        return embeds, PagedContext(self.kv, tiles.view(-1, 3)[: tokens // TILE])

    def layers(self, x: Tensor, context: "PagedContext", attend: Callable[..., None] | None = None) -> Tensor | None:
        """Run tokens through the backbone for their keys and values, and rows of a decode step behind them for all.

        Args:
            x: [T+B, H]. Embeddings of T tokens and B rows; overwritten.
            context: of the tokens, whose last layer stops at keys and values.
            attend: attention of the rows: called with the number of a layer, qkv [B, .] and `out` [B, Hq*D]. None if
                there are no rows.

        Returns:
            [B, H]. Hidden states of the rows after the final norm, bitwise those of `BackboneStep.step` on a GPU.
        """
        step, tokens, eps = self._step, context.tokens, self.model.config.backbone.rms_norm_eps
        layers = step.layers
        normed, qkv = torch.empty_like(x), x.new_empty(len(x), len(layers[0].qkv))
        inner = x.new_empty(len(x), layers[0].down.shape[1])
        # Queries of padding are not written.
        q = torch.zeros(tokens, layers[0].o.shape[1], dtype=x.dtype, device=x.device)
        attended, partials = x.new_empty(len(x), q.shape[1]), None
        for index, layer in enumerate(layers):
            rms_norm(x, partials, layer.input_norm, eps, normed)
            prefill_linear(normed, layer.qkv, qkv)
            if attend is not None:
                # It waits for memory, attention of the prompts for arithmetic.
                with self._branch.fork():
                    attend(index, qkv[tokens:], out=attended[tokens:])
            context.append(index, qkv[:tokens], layer, eps, step.cos_sin, q)
            if index < len(layers) - 1:
                context.attend(index, q, attended[:tokens])
            if attend is not None:
                self._branch.join()
            if index == len(layers) - 1:
                break
            partials = _add(attended, layer.o, x)
            rms_norm(x, partials, layer.mlp_norm, eps, normed)
            prefill_linear(normed, layer.gate_up, inner, gate_up=True)
            partials = _add(inner, layer.down, x)
        if attend is None:
            return None
        x, attended, inner, normed = (tensor[tokens:] for tensor in (x, attended, inner, normed))
        step.end_layer(layers[-1], step.backbone.norm.weight.detach(), x, attended, inner, normed)
        return normed


def _add(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor | None:
    """A linear of x [M, K] into the residual stream [M, N]: added, or the slices that the next norm is to add."""
    if len(x) >= WHOLE_ROWS:
        prefill_linear(x, weight, stream, add=True)
        return None
    partials = torch.empty(split_count(*weight.shape), *stream.shape, device=x.device)
    prefill_linear(x, weight, partials)
    return partials


class PagedContext:
    """Where the tokens of one pass lie in the pages, and attention over them and what earlier pieces wrote.

    Each token is a row of its own to `kv_append`, which writes its key and value.

    Attributes:
        tokens: of the tiles, padding included.
    """

    def __init__(self, kv: PagedKV, tiles: Tensor):
        """Args: tiles: [T, 3] int64. Row, first position and number of tokens of each tile."""
        row, first, count = tiles.unbind(1)
        self.kv, self._tiles, self._tables = kv, tiles[:, 1:].int(), kv.page_table[row]
        self.tokens = TILE * len(tiles)
        steps = torch.arange(TILE, device=tiles.device)
        self._positions = (first[:, None] + steps).int().flatten()
        self._active = (steps < count[:, None]).flatten()
        self._token_tables = self._tables.repeat_interleave(TILE, 0)
        self._row_map = torch.arange(self.tokens, dtype=torch.int32, device=tiles.device)

    def append(self, layer: int, qkv: Tensor, weights: StepLayer, eps: float, cos_sin: Tensor, q: Tensor) -> None:
        """Write keys and values of a layer into the pages, and the rotated queries into q [M, heads*D]."""
        pages = (self.kv.key_pages[layer], self.kv.value_pages[layer], self._token_tables, self._positions)
        kv_append(qkv, weights.q_norm, weights.k_norm, eps, cos_sin, *pages, self._row_map, self._active, q)

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attention output [M, heads*D] of the queries."""
        pages = (self.kv.key_pages[layer], self.kv.value_pages[layer], self._tables)
        prefill_attention(q, *pages, self._tiles, out)

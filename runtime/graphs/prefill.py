"""Prefill: all prompt rows but the last go through the backbone; the last row's embedding goes into the staging row."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from moss_kernels.backbone_linear import split_count
from moss_kernels.kv_append import kv_append
from moss_kernels.prefill_attention import prefill_attention
from moss_kernels.prefill_linear import prefill_linear
from moss_kernels.rms_norm import rms_norm
from moss_runtime.graphs.backbone_step import BackboneStep, StepLayer
from moss_runtime.graphs.capture import GraphSet, bucket_for
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import Metrics
from moss_runtime.state.decode_pool import DecodePool
from moss_runtime.state.kv_cache import PagedKV

LENGTHS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
ROWS = (1, 2, 3, 4, 6, 8)
# Most tokens of a pass, padding included: running streams wait for no more than this between two frames.
MAX_TOKENS = 2048
# Tokens, padding included, from which a linear into the residual stream is faster in one piece than in slices of its
# inputs. The bits are the same.
WHOLE_TOKENS = 768


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive rows of one prompt, prefilled in one pass.

    Attributes:
        row: pool row of the request.
        start: tokens of the prompt that earlier pieces hold.
        ids: [n, 1+n_vq] i64 on the CPU; n may be 0.
        last: [1+n_vq] i64. The prompt's last row.
    """

    row: int
    start: int
    ids: Tensor
    last: Tensor


def cut(row: int, prompt: Tensor, lengths: Sequence[int] = LENGTHS) -> list[Piece]:
    """Pieces of a prompt [T, 1+n_vq], at most the largest length each. How it is cut depends on T alone."""
    ids, last = prompt[:-1], prompt[-1]
    starts = range(0, max(len(ids), 1), lengths[-1])
    return [Piece(row, start, ids[start : start + lengths[-1]], last) for start in starts]


class Prefill:
    """Writes keys and values of prompts into their pages, several prompts of like length in one pass.

    Prompts are padded to a bucket of their own length, so the shapes that a prompt is computed in depend on its length
    alone but for the number of prompts in the pass, which only the linears see; and on a GPU those give a row the same
    bits in any number of rows.

    Attributes:
        graphs: one for each (prompts, length bucket, 0); later pieces of long prompts run eagerly.
    """

    def __init__(
        self,
        model: MossTTS,
        step: BackboneStep,
        pool: DecodePool,
        kv: PagedKV,
        *,
        lengths: Sequence[int] = LENGTHS,
        rows: Sequence[int] = ROWS,
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
            lengths: length buckets; the largest is the most rows of a piece.
            rows: buckets of the number of prompts in a pass.
            max_tokens: most tokens of a pass of several prompts, padding included.
            stream: of the graphs.
            metrics: for replays and eager passes.
            graphs: False runs everything eagerly.
        """
        self.model, self.pool, self.kv, self._step = model, pool, kv, step
        self.lengths, self.rows = sorted(lengths), sorted(rows)
        self.max_tokens = max(max_tokens, self.lengths[-1])
        shapes = [(b, length, 0) for b in self.rows for length in self.lengths if b * length <= self.max_tokens]
        columns = 1 + model.config.n_vq
        size = 2 * self.rows[-1] + max(b * (length + 1) * columns for b, length, _ in shapes)
        self._inputs = torch.zeros(size, dtype=torch.int64, device=model.device)
        # Prompts go ahead of frames: a step takes nearly the same with a row more.
        options = {"device": model.device, "stream": stream, "priority": -1, "metrics": metrics, "enabled": graphs}
        self.graphs = GraphSet("prefill", shapes, self.compute, **options)

    def warm_up(self, progress=lambda: None) -> None:
        """Capture the graphs."""
        self._inputs.zero_()
        self._inputs[: self.rows[-1]] = self.kv.rows
        self.graphs.capture(progress)

    def next_pass(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those of the waiting pieces, of different rows and in order, that go into the next pass: the first, and what
        has the same shape."""
        shape = self._shape(pieces[0])
        alike = [piece for piece in pieces if self._shape(piece) == shape]
        limit = max(b for b in self.rows if b == 1 or b * shape[0] <= self.max_tokens)
        return alike[:limit]

    def run(self, pieces: Sequence[Piece]) -> None:
        """One pass over pieces as `next_pass` gives them. On CUDA the current stream must be that of the graphs."""
        length, start = self._shape(pieces[0])
        rows = bucket_for(len(pieces), self.rows)
        ids = torch.full((rows, length + 1, self._columns), self.model.config.audio_pad_token_id)
        ids[..., 0] = self.model.config.pad_token_id
        for padded, piece in zip(ids, pieces, strict=False):
            padded[: len(piece.ids)] = piece.ids
            padded[length] = piece.last
        unused = self.rows[-1] - len(pieces)
        pool_rows = torch.tensor([piece.row for piece in pieces] + [self.kv.rows] * unused)
        counts = torch.tensor([len(piece.ids) for piece in pieces] + [0] * unused)
        values = torch.cat((pool_rows, counts, ids.flatten()))
        if self._inputs.is_cuda:
            values = values.pin_memory()
        self._inputs[: len(values)].copy_(values, non_blocking=True)
        self.graphs.run(rows, length, start)

    @property
    def _columns(self) -> int:
        return 1 + self.model.config.n_vq

    def _shape(self, piece: Piece) -> tuple[int, int]:
        return bucket_for(len(piece.ids), self.lengths), piece.start

    def _views(self, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pool rows [B], token counts [B] and ids [B, L + 1, 1+n_vq] of a pass in the static inputs.

        Rows and counts lie at the same places for every shape, so that null rows without tokens serve all of them.
        """
        most = self.rows[-1]
        ids = self._inputs[2 * most :][: rows * (length + 1) * self._columns]
        return self._inputs[:rows], self._inputs[most : most + rows], ids.view(rows, length + 1, self._columns)

    def compute(self, rows: int, length: int, start: int) -> None:
        """The work of a pass: static inputs to pages and staging rows; this is what a graph holds."""
        pool_rows, counts, ids = self._views(rows, length)
        embeds = self.model.embed(ids)
        staging = self.pool.staging
        # Padding writes what the null row holds to the null row.
        live = (pool_rows != self.kv.rows)[:, None]
        staging.index_copy_(0, pool_rows, torch.where(live, embeds[:, length], staging[pool_rows]))
        cache = PagedContext(self.kv, pool_rows, counts, length, start)
        self._layers(embeds[:, :length].flatten(0, 1), cache)

    def _layers(self, x: Tensor, cache: "PagedContext") -> None:
        """Run x [B*L, H] through the backbone for its keys and values; the last layer stops there."""
        layers, eps = self._step.layers, self.model.config.backbone.rms_norm_eps
        normed, qkv = torch.empty_like(x), x.new_empty(len(x), len(layers[0].qkv))
        inner = x.new_empty(len(x), layers[0].down.shape[1])
        q = torch.zeros(len(x), layers[0].o.shape[1], dtype=x.dtype, device=x.device)
        partials = None
        for index, layer in enumerate(layers):
            rms_norm(x, partials, layer.input_norm, eps, normed)
            prefill_linear(normed, layer.qkv, qkv)
            cache.append(index, qkv, layer, eps, self._step.cos_sin, q)
            if index == len(layers) - 1:
                return
            partials = _add(cache.attend(index, q), layer.o, x)
            rms_norm(x, partials, layer.mlp_norm, eps, normed)
            prefill_linear(normed, layer.gate_up, inner, gate_up=True)
            partials = _add(inner, layer.down, x)


def _add(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor | None:
    """A linear of x [M, K] into the residual stream [M, N]: added, or the slices that the next norm is to add."""
    if len(x) >= WHOLE_TOKENS:
        prefill_linear(x, weight, stream, add=True)
        return None
    partials = torch.empty(split_count(*weight.shape), *stream.shape, device=x.device)
    prefill_linear(x, weight, partials)
    return partials


class PagedContext:
    """Where the tokens of one pass lie in the pages, and attention over them and what earlier pieces wrote.

    Each token is a row of its own to `kv_append`, which writes its key and value.
    """

    def __init__(self, kv: PagedKV, pool_rows: Tensor, counts: Tensor, length: int, start: int):
        """Args: pool_rows, counts: [B] int64. Row and number of tokens of each prompt, at positions from `start` on."""
        self.kv, self._start = kv, start
        rows, device = len(pool_rows), pool_rows.device
        steps = torch.arange(length, device=device)
        self._tables, self._counts = kv.page_table[:, : kv.pages_for(start + length)][pool_rows], counts.int()
        self._row_map = torch.arange(rows * length, dtype=torch.int32, device=device)
        self._positions = (start + steps).int().repeat(rows)
        self._token_tables = self._tables.repeat_interleave(length, 0)
        self._active = (steps < counts[:, None]).flatten()

    def append(self, layer: int, qkv: Tensor, weights: StepLayer, eps: float, cos_sin: Tensor, q: Tensor) -> None:
        """Write keys and values of a layer into the pages, and the rotated queries into q [B*L, heads*D]."""
        pages = (self.kv.key_pages[layer], self.kv.value_pages[layer], self._token_tables, self._positions)
        kv_append(qkv, weights.q_norm, weights.k_norm, eps, cos_sin, *pages, self._row_map, self._active, q)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention output [B*L, heads*D] of the queries."""
        out = torch.empty_like(q)
        pages = (self.kv.key_pages[layer], self.kv.value_pages[layer], self._tables)
        prefill_attention(q, *pages, self._counts, self._start, out)
        return out

"""The mixed step: a prefill pass and the next frames of running rows in one, so that both read the weights once."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moss_runtime.graphs.capture import GraphSet, bucket_for
from moss_runtime.graphs.frame import FrameGraph
from moss_runtime.graphs.prefill import Piece, Prefill
from moss_runtime.observe import Metrics

# Batch sizes that are captured, up to that of the runtime; beside a pass a row of padding costs little.
BUCKETS = (16, 64, 96)


class MixedStep:
    """Frames beside a prefill pass. On a GPU frames and pages are bitwise those of `FrameGraph` and `Prefill` alone.

    The tokens of the prompts and one token of each row go through the linears of the backbone together; then the rows
    go on as in a frame graph. It runs on the stream of the frame graphs, over their buffers and the inputs of prefill.

    Attributes:
        graphs: one for each (batch bucket, frames, tokens).
    """

    def __init__(
        self,
        frame: FrameGraph,
        prefill: Prefill,
        *,
        frames: int = 1,
        metrics: Metrics | None = None,
        graphs: bool = True,
    ):
        """Captures nothing yet.

        Args:
            frame: graphs of frames alone.
            prefill: graphs of passes alone, on the same stream and over the same pool and pages.
            frames: frames of a launch; the prompts go with the first.
            metrics: for replays and eager steps.
            graphs: False runs everything eagerly.
        """
        self._frame, self._prefill, self._frames = frame, prefill, frames
        largest = frame.buckets[-1]
        self.buckets = [*(bucket for bucket in BUCKETS if bucket < largest), largest]
        shapes = [(bucket, frames, tokens) for bucket in self.buckets for tokens in prefill.buckets]
        common = {"device": frame.graphs.device, "stream": frame.graphs.stream, "metrics": metrics, "enabled": graphs}
        self.graphs = GraphSet("mixed", shapes, self.compute, **common)

    def warm_up(self, progress=lambda: None) -> None:
        """Capture the graphs; those of `Prefill` have filled its inputs with null rows."""
        for bucket in self.buckets:
            self._frame.fill_inputs([], bucket)
        self.graphs.capture(progress)

    def launch(self, rows: Sequence[int], pieces: Sequence[Piece]) -> Tensor:
        """Make the next frames of pool rows and prefill pieces, as `FrameGraph.launch` and `Prefill.run` do alone.

        Args:
            rows: distinct pool rows, none of them of a piece.
            pieces: at least one, as `Prefill.next_pass` gives them.

        Returns:
            [3, bucket] int32, as `FrameGraph.launch`.
        """
        bucket = bucket_for(len(rows), self.buckets)
        self._frame.fill_inputs(rows, bucket)
        tokens = self._prefill.fill_inputs(pieces)
        return self._frame.replay(self.graphs, bucket, self._frames, tokens)

    def compute(self, bucket: int, frames: int, tokens: int) -> None:
        """The work of a launch: this is what a graph holds."""
        self._frame.compute(bucket, frames, tokens, backbone=partial(self._backbone, tokens))

    def _backbone(self, tokens: int, embeds: Tensor, row_map: Tensor, live: Tensor) -> Tensor:
        prompts, context = self._prefill.begin(tokens)
        rows = {"kv": self._frame.kv, "positions": self._frame.pool.positions, "row_map": row_map, "active": live}
        return self._prefill.layers(torch.cat((prompts, embeds)), context, partial(self._frame.step.attend, **rows))

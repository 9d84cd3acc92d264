"""The frame graph: backbone step, local frame decode and bookkeeping of all rows in one launch."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moss_kernels import _library
from moss_kernels.local_frame_decode import LocalFrameDecoder, LocalFrameWeights, local_frame_decode_reference
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.graphs.capture import BUCKETS, GraphSet, Shape, bucket_for
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import FallbackReason, Lap, Metrics, Range, StageTimer
from moss_runtime.state.decode_pool import DecodePool
from moss_runtime.state.kv_cache import PagedKV
from moss_runtime.state.pinned import pinned

FINISHED, STOPPED = 1, 2  # flags of a report
STAGES = (Range.BACKBONE, Range.LOCAL_FRAME, Range.BOOKKEEPING)

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class FrameBuffers:
    """Static memory of a frame; smaller batches use the front of each buffer.

    Attributes:
        inputs: [2 * max_batch] int32. Of a batch of B: row map [B], then active [B]. All that a step gets.
        embeds: [max_batch, H]. Input of the backbone.
        active: [max_batch] bool. What the host asks for.
        live: [max_batch] bool. Active rows that have not finished.
        codes: [max_batch, Q] int64.
        continues: [max_batch] bool.
        feedback: [max_batch, H].
        status: [max_batch] int32. Status bits of the draws.
        report: [3 * max_batch] int32. Of a batch of B, for the host: frames [B], flags [B] (FINISHED, STOPPED),
            status [B] of the pool rows.
    """

    inputs: Tensor
    embeds: Tensor
    active: Tensor
    live: Tensor
    codes: Tensor
    continues: Tensor
    feedback: Tensor
    status: Tensor
    report: Tensor

    @classmethod
    def allocate(cls, model: MossTTS, batch: int) -> "FrameBuffers":
        hidden, codebooks = model.config.backbone.hidden_size, model.config.n_vq

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        return cls(
            inputs=zeros(2 * batch, dtype=torch.int32),
            embeds=zeros(batch, hidden, dtype=model.dtype),
            active=zeros(batch, dtype=torch.bool),
            live=zeros(batch, dtype=torch.bool),
            codes=zeros(batch, codebooks, dtype=torch.int64),
            continues=zeros(batch, dtype=torch.bool),
            feedback=zeros(batch, hidden, dtype=model.dtype),
            status=zeros(batch, dtype=torch.int32),
            report=zeros(3 * batch, dtype=torch.int32),
        )


class FrameGraph:
    """Frames of many requests: one launch makes one frame, or n frames, for every row that it is given.

    A row that finishes inside a launch is masked from its next frame on. Padding rows are inactive null rows.

    Attributes:
        buffers: static memory.
        step: the backbone's step.
        graphs: one for each (batch bucket, frames).
        decoder: the CUDA kernel of the local transformer; None where it does not work. Then its reference runs, whose
            draws are `sample_codebook`; on a GPU that is logged once and counted, unless MOSS_BACKEND asks for it.
    """

    def __init__(
        self,
        model: MossTTS,
        step: BackboneStep,
        pool: DecodePool,
        kv: PagedKV,
        *,
        buckets: Sequence[int] = BUCKETS,
        frames: Sequence[int] = (1,),
        stream: torch.cuda.Stream | None = None,
        metrics: Metrics | None = None,
        timer: StageTimer | None = None,
        graphs: bool = True,
    ):
        """Allocates the buffers, and packs the local transformer's weights on a GPU.

        Args:
            model: with the weights.
            step: the backbone's step; nothing on another stream uses it.
            pool: state of the requests.
            kv: keys and values of the requests; pages must be reserved before a launch.
            buckets: batch sizes to capture; the largest is the most rows of a launch.
            frames: numbers of frames in a launch to capture.
            stream: of the graphs.
            metrics: for replays and eager steps, and as `local_frame` for launches without the kernel.
            timer: for the times of STAGES, of a launch's last frame. On a GPU only graphs are timed.
            graphs: False runs everything eagerly.
        """
        self._timer, self._metrics = timer, metrics
        self._laps: dict[Shape, Lap] = {}
        self.pool, self.kv, self.step = pool, kv, step
        self.buckets = sorted(buckets)
        self.buffers = FrameBuffers.allocate(model, self.buckets[-1])
        self._weights = model.frame_weights()
        self.decoder, self._fallback = _decoder(self._weights, self.buckets[-1])
        if self._fallback is not None:
            setting = f"{self._fallback}; MOSS_BACKEND={_library.requested_backend()}, {model.dtype}"
            _log.warning("local_frame_decode: eager PyTorch decodes frames, not the CUDA kernel (%s)", setting)
        shapes = [(bucket, count) for bucket in self.buckets for count in frames]
        options = {"device": model.device, "stream": stream, "metrics": metrics, "enabled": graphs}
        self.graphs = GraphSet("frame", shapes, self.compute, **options)

    def warm_up(self, progress=lambda: None) -> None:
        """Capture all graphs, over null rows."""
        for bucket in self.buckets:
            self.fill_inputs([], bucket)
        self.graphs.capture(progress)

    def launch(self, rows: Sequence[int], frames: int = 1, active: Sequence[bool] | None = None) -> Tensor:
        """Make the next frames of pool rows, without waiting. On CUDA the current stream must be that of the graphs.

        Args:
            rows: distinct pool rows.
            frames: frames to make for each.
            active: False leaves a row as it is; None: all are active.

        Returns:
            [3, bucket] int32, a view of `buffers.report` that the next launch overwrites; first the columns of `rows`.
        """
        bucket = bucket_for(len(rows), self.buckets)
        if len(rows) > self.buckets[-1]:
            raise ValueError(f"FrameGraph: `rows` must have at most {self.buckets[-1]} entries, got {len(rows)}")
        self.fill_inputs(rows, bucket, active)
        return self.replay(self.graphs, bucket, frames)

    def replay(self, graphs: GraphSet, *shape: int) -> Tensor:
        """Run a shape whose first number is the bucket from a set over `compute`; the report as in `launch`."""
        graphs.run(*shape)
        if self._fallback is not None and self._metrics is not None:
            self._metrics.fell_back("local_frame", self._fallback)
        if shape in self._laps:
            self._timer.watch(self._laps[shape])
        return self.buffers.report[: 3 * shape[0]].view(3, shape[0])

    def fill_inputs(self, rows: Sequence[int], bucket: int, active: Sequence[bool] | None = None) -> None:
        """Copy the row map and the active mask of a launch to the device, padded to a bucket, without waiting."""
        padding = bucket - len(rows)
        flags = [1] * len(rows) if active is None else [int(flag) for flag in active]
        values = [*rows, *[self.pool.null_row] * padding, *flags, *[0] * padding]
        inputs = self.buffers.inputs
        inputs[: 2 * bucket].copy_(pinned(values, inputs.dtype, inputs.device), non_blocking=True)

    def compute(self, bucket: int, frames: int, *more: int, backbone: Callable[..., Tensor] | None = None) -> None:
        """The work of a launch: this is what a graph holds.

        Args:
            bucket: rows, with padding.
            frames: of each row.
            more: what else tells the shape of the graph.
            backbone: makes the hidden states of the first frame in place of the step: called with embeddings [B, H],
                row map [B] int32 and live rows [B] bool, returns [B, H].
        """
        row_map, flags = self.buffers.inputs[: 2 * bucket].view(2, bucket)
        active = self.buffers.active[:bucket]
        torch.ne(flags, 0, out=active)
        lap = self._lap(bucket, frames, *more)
        for frame in range(frames):
            self._frame(row_map, active, lap, self._step if frame or backbone is None else backbone)
        pool, rows = self.pool, row_map.long()
        report = self.buffers.report[: 3 * bucket].view(3, bucket)
        torch.index_select(pool.frames, 0, rows, out=report[0])
        torch.add(pool.finished[rows].int(), pool.stopped[rows].int(), alpha=STOPPED, out=report[1])
        torch.index_select(pool.status, 0, rows, out=report[2])

    def _lap(self, *shape: int) -> Lap | None:
        """Where to stamp the stages. On a GPU only graphs are timed."""
        # Of a capture that failed, half stamped.
        self._laps.pop(shape, None)
        on_gpu = self.buffers.inputs.is_cuda
        if self._timer is None or (on_gpu and not torch.cuda.is_current_stream_capturing()):
            return None
        self._laps[shape] = self._timer.lap(external=on_gpu)
        return self._laps[shape]

    def _step(self, embeds: Tensor, row_map: Tensor, live: Tensor) -> Tensor:
        return self.step.step(embeds, self.kv, self.pool.positions, row_map, live)

    def _frame(
        self, row_map: Tensor, active: Tensor, lap: Lap | None, backbone: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        pool, buffers, batch = self.pool, self.buffers, len(row_map)
        live, embeds = buffers.live[:batch], buffers.embeds[:batch]
        if lap is not None:
            lap.begin()
        pool.begin_frame(row_map, active, embeds=embeds, live=live)
        hidden = backbone(embeds, row_map, live)
        if lap is not None:
            lap.end(Range.BACKBONE)
        codes, continues, feedback, status = (
            tensor[:batch] for tensor in (buffers.codes, buffers.continues, buffers.feedback, buffers.status)
        )
        outputs = {"codes": codes, "continues": continues, "feedback": feedback, "status": status}
        if self.decoder is not None:
            self.decoder.decode(hidden, pool.sampling, row_map, live, **outputs)
        else:
            frame = local_frame_decode_reference(hidden, self._weights, pool.sampling, row_map, live)
            for name, tensor in outputs.items():
                tensor.copy_(getattr(frame, name))
        if lap is not None:
            lap.end(Range.LOCAL_FRAME)
        pool.advance(row_map, live, codes=codes, continues=continues, feedback=feedback, draw_status=status)
        if lap is not None:
            lap.end(Range.BOOKKEEPING)


def _decoder(
    weights: LocalFrameWeights, max_batch: int
) -> tuple[LocalFrameDecoder, None] | tuple[None, FallbackReason | None]:
    """The CUDA kernel, or why a GPU is without it; neither where the reference is what was asked for."""
    device, backend = weights.stop_head.device, _library.requested_backend()
    if device.type != "cuda" or backend == "reference":
        return None, None
    if backend == "triton":  # which has no kernel of it, but of what else a frame consists of
        return None, FallbackReason.DISABLED
    if _library.backend_for("local_frame_decode", ("cuda", "reference"), device) != "cuda":
        return None, FallbackReason.DEVICE
    if weights.stop_head.dtype == torch.bfloat16:
        with contextlib.suppress(NotImplementedError):
            return LocalFrameDecoder(weights, max_batch=max_batch), None
    return None, FallbackReason.SHAPE

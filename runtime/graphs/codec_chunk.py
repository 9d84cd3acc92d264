"""The codec's streaming decode as a step over static buffers, captured in one CUDA graph per (rows, frames)."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from moss_kernels.chunk_epilogue import chunk_epilogue
from moss_kernels.chunk_prologue import chunk_prologue
from moss_kernels.ring_attention import ring_attention, rope_frequencies, takes_slices, wants_rotated
from moss_runtime.graphs.capture import no_collection
from moss_runtime.graphs.codec_layers import StageBuffers, front
from moss_runtime.graphs.codec_weights import StageWeights, code_table, decoder_weights
from moss_runtime.model.codec.codec import Codec
from moss_runtime.model.codec.stream import check_step
from moss_runtime.state.codec_slots import CodecSlots
from moss_runtime.state.pinned import pinned

FRAMES = (1, 2, 3, 4, 6, 8, 10, 12, 15)

_log = logging.getLogger(__name__)


class ChunkBuffers(StageBuffers):
    """Static memory of the step; views of the front of each buffer serve smaller batches and chunks.

    Attributes:
        codes: [max_batch * frames * codebooks] int64.
        inputs: [2, max_batch] int32. `slots` and `valid`.
        stage_valid: [stages, max_batch] int32. Valid tokens of each row at each stage's rate.
        cos_sin: [tokens of all stages * head_dim] float32. Their cosines and sines.
        audio: [max_batch * channels * frames * samples_per_frame] float32.
    """

    def __init__(
        self, codec: Codec, stages: Sequence[StageWeights], batch: int, frames: int, residual_dtype: torch.dtype
    ):
        config, device = codec.config, codec.device
        rows = batch * frames
        super().__init__(stages, rows, dtype=codec.dtype, residual_dtype=residual_dtype, device=device)
        self.codes = torch.zeros(rows * config.codebooks, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(2, batch, dtype=torch.int32, device=device)
        self.stage_valid = torch.zeros(len(stages), batch, dtype=torch.int32, device=device)
        tokens = rows * sum(stage.tokens_per_frame for stage in stages)
        self.cos_sin = torch.zeros(tokens * stages[0].config.head_dim, device=device)
        self.audio = torch.zeros(rows * config.channels * config.samples_per_frame, device=device)

    @property
    def slots(self) -> torch.Tensor:
        """[max_batch] int32. Slot of each row."""
        return self.inputs[0]

    @property
    def valid(self) -> torch.Tensor:
        """[max_batch] int32. Valid frames of each row."""
        return self.inputs[1]

    @property
    def size_in_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


class CodecChunk:
    """Decodes the next chunk of many streams: `CodecStream.step` in few kernels, without an allocation.

    On a CUDA device `capture` makes a graph for each batch size and chunk length wanted; a call then replays the
    smallest graph that it fits, padded with rows of the null slot and frames that count for nothing. What fits none
    runs the same code eagerly and is counted in `fallbacks`.

    Attributes:
        slots: state of the streams, and who holds which slot.
        buffers: static memory.
        replays: number of graph replays.
        fallbacks: number of eager steps by reason: `device` (not CUDA), `not_captured`, `capture_failed`.
    """

    def __init__(
        self,
        codec: Codec,
        slots: CodecSlots | int,
        *,
        max_batch: int,
        frames: Iterable[int] = FRAMES,
        residual_dtype: torch.dtype | None = None,
    ):
        """Allocates the buffers; weights are shared with `codec`.

        Args:
            codec: on the device and in the dtype to run in.
            slots: state to work on, or the number of streams to make one for.
            max_batch: most rows of one call.
            frames: chunk lengths to capture; the largest is the most frames of one step.
            residual_dtype: of the residual stream, float32 or the codec's dtype (None).

        Raises:
            ValueError: the decoder's layout is not supported, or a size is not positive.
        """
        self.codec = codec
        self.frames = sorted(set(frames))
        if max_batch < 1 or not self.frames or self.frames[0] < 1:
            raise ValueError(f"`max_batch` and `frames` must be positive, got {max_batch} and {self.frames}")
        self.max_batch = max_batch
        self.stages = decoder_weights(codec)
        configs = [stage.config for stage in self.stages]
        if len({(config.head_dim, config.max_period) for config in configs}) > 1:
            raise ValueError("`codec` must have the same head size and RoPE period in all decoder stages")
        if isinstance(slots, int):
            slots = CodecSlots(configs, slots, dtype=codec.dtype, device=codec.device)
        self.slots = slots
        self.table = code_table(codec.quantizer, codec.decoder[0].input_proj)
        self.buffers = ChunkBuffers(codec, self.stages, max_batch, self.frames[-1], residual_dtype or codec.dtype)
        self.replays = 0
        self.fallbacks: Counter[str] = Counter()
        rates = [stage.tokens_per_frame for stage in self.stages]
        self._rates = torch.tensor(rates, dtype=torch.int32, device=codec.device)
        self._frequencies = rope_frequencies(configs[0].head_dim, configs[0].max_period, codec.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._failed: set[tuple[int, int]] = set()

    def reset(self, slot: int) -> None:
        """Start the stream of a slot again at its first frame."""
        self.slots.reset(slot)

    @torch.no_grad()
    def __call__(
        self,
        codes: torch.Tensor,
        slots: Sequence[int] | torch.Tensor,
        valid: Sequence[int] | torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode the next frames of each row's stream.

        Lists and CPU tensors are checked; tensors on the device are not, since that would wait for it.

        Args:
            codes: [B, T, codebooks] int, on any device. Frames at or beyond a row's `valid` may hold anything.
            slots: [B]. Slot of each row; rows without valid frames may name any slot, or the null slot.
            valid: [B]. Frames to decode, 0 .. T. A row with 0 changes nothing.
            out: [B, channels, T * samples_per_frame] float32, written; None allocates it.

        Returns:
            `out`; 0 beyond each row's valid frames.

        Raises:
            ValueError: as `CodecStream.step`, and for more than `max_batch` rows.
        """
        check_step(self.codec, self.slots.null_slot, codes, slots, valid)
        rows, frames = codes.shape[:2]
        if rows > self.max_batch:
            raise ValueError(f"`codes` must have at most {self.max_batch} rows, got {rows}")
        config = self.codec.config
        if out is None:
            out = torch.empty(rows, config.channels, frames * config.samples_per_frame, device=self.codec.device)
        on_device = any(isinstance(x, torch.Tensor) and x.is_cuda for x in (slots, valid))
        # Signed, whatever they came as: counts fall below 0.
        slots, valid = (
            torch.as_tensor(x, dtype=torch.int32) if on_device else np.asarray(x, dtype=np.int32)
            for x in (slots, valid)
        )
        for start in range(0, frames if rows else 0, self.frames[-1]):
            part = codes[:, start : start + self.frames[-1]]
            audio = self._step(part, slots, (valid - start).clip(0, part.shape[1]))
            out[:, :, start * config.samples_per_frame :][:, :, : audio.shape[2]].copy_(audio)
        return out

    def capture(self, batches: Iterable[int]) -> None:
        """Capture graphs for batch sizes x `frames`, largest first; on a CPU this does nothing.

        All of them run once before the first capture, so that every kernel is compiled and loaded by then. A capture
        that fails is logged and its shape runs eagerly.
        """
        if self.codec.device.type != "cuda":
            return
        shapes = sorted({(batch, frames) for batch in batches for frames in self.frames}, reverse=True)
        self.buffers.slots.fill_(self.slots.null_slot)
        self.buffers.valid.zero_()
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for shape in shapes:
                self.compute(*shape)
            torch.cuda.synchronize()
            with no_collection():
                for shape in shapes:
                    self._capture(shape, pool, stream)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, shape: tuple[int, int], pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.compute(*shape)
        except RuntimeError:
            _log.exception("codec chunk of %d rows x %d frames could not be captured", *shape)
            self._failed.add(shape)
        else:
            self._graphs[shape] = graph

    def _step(
        self, codes: torch.Tensor, slots: np.ndarray | torch.Tensor, valid: np.ndarray | torch.Tensor
    ) -> torch.Tensor:
        """One step of at most `frames[-1]` frames; returns a view of the static audio."""
        rows, frames = codes.shape[:2]
        graph_shape = min(
            (shape for shape in self._graphs if shape[0] >= rows and shape[1] >= frames),
            key=lambda shape: (shape[0] * shape[1], shape),
            default=None,
        )
        batch, length = graph_shape or (rows, frames)
        self._codes(batch, length)[:rows, :frames].copy_(codes, non_blocking=True)
        self._fill_rows(slots, valid)
        if graph_shape:
            self._graphs[graph_shape].replay()
            self.replays += 1
        else:
            self.fallbacks[self._fallback_reason(rows, frames)] += 1
            self.compute(batch, length)
        return self._audio(batch, length)[:rows, :, : frames * self.codec.config.samples_per_frame]

    def _fill_rows(self, slots: np.ndarray | torch.Tensor, valid: np.ndarray | torch.Tensor) -> None:
        """Slots and valid frames of a step, and padding behind them, without waiting."""
        inputs, rows = self.buffers.inputs, len(slots)
        if isinstance(slots, torch.Tensor):
            self.buffers.slots.fill_(self.slots.null_slot)[:rows].copy_(slots, non_blocking=True)
            self.buffers.valid.zero_()[:rows].copy_(valid, non_blocking=True)
            return
        values = np.zeros(inputs.shape, dtype=np.int32)
        values[0] = self.slots.null_slot
        values[:, :rows] = slots, valid
        inputs.copy_(pinned(values, inputs.dtype, inputs.device), non_blocking=True)

    def _fallback_reason(self, rows: int, frames: int) -> str:
        if self.codec.device.type != "cuda":
            return "device"
        failed = any(rows <= shape[0] and frames <= shape[1] for shape in self._failed)
        return "capture_failed" if failed else "not_captured"

    def _codes(self, batch: int, frames: int) -> torch.Tensor:
        shape = (batch, frames, self.codec.config.codebooks)
        return front(self.buffers.codes, *shape)

    def _audio(self, batch: int, frames: int) -> torch.Tensor:
        config = self.codec.config
        return front(self.buffers.audio, batch, config.channels, frames * config.samples_per_frame)

    def _cos_sin(self, batch: int, frames: int) -> torch.Tensor:
        tokens = batch * frames * sum(stage.tokens_per_frame for stage in self.stages)
        return front(self.buffers.cos_sin, tokens, len(self._frequencies), 2)

    def _rotations(self, batch: int, frames: int) -> list[torch.Tensor]:
        """The part of `_cos_sin` of each stage: [B, tokens, D/2, 2] float32."""
        counts = [frames * stage.tokens_per_frame for stage in self.stages]
        parts = self._cos_sin(batch, frames).split([batch * count for count in counts])
        return [part.unflatten(0, (batch, count)) for part, count in zip(parts, counts, strict=True)]

    def compute(self, batch: int, frames: int) -> None:
        """The work of a step: static inputs to static audio; this is what a graph holds."""
        buffers, config = self.buffers, self.codec.config
        slots, valid, stage_valid = buffers.slots[:batch], buffers.valid[:batch], buffers.stage_valid[:, :batch]
        x = buffers.stream(0, batch, frames, self.table.shape[2])
        inputs = (self._codes(batch, frames), self.table, slots, valid, self.slots.offsets)
        chunk_prologue(*inputs, self._rates, self._frequencies, x, stage_valid, self._cos_sin(batch, frames))
        for index, cos_sin in enumerate(self._rotations(batch, frames)):
            x = self._stage(index, x, cos_sin, stage_valid[index])
        samples = x.view(batch, frames, config.samples_per_frame, config.channels)
        chunk_epilogue(samples, slots, valid, stage_valid, self.slots.offsets, self._audio(batch, frames))

    def _stage(self, index: int, x: torch.Tensor, cos_sin: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """One transformer stage: its residual stream -> [M, output_size], that of the next one, or float32 samples."""
        stage, rings, buffers = self.stages[index], self.slots.stages[index], self.buffers
        batch, tokens = cos_sin.shape[:2]
        slots = buffers.slots[:batch]
        rotated = wants_rotated(batch, tokens, rings.keys[0], stage.config.context)
        own_cos_sin, in_proj_cos_sin = (None, cos_sin) if rotated else (cos_sin, None)

        def attend(layer: int, qkv: torch.Tensor, attended: torch.Tensor) -> None:
            step = (qkv, own_cos_sin, rings.keys[layer], rings.values[layer], slots, valid, rings.offset)
            ring_attention(*step, stage.config.context, False, attended, write=True, settled=True)

        x = x.view(batch * tokens, stage.config.d_model)
        shape = (len(x), stage.output_proj.shape[0])
        last = index == len(self.stages) - 1
        out = front(buffers.wide.view(torch.float32), *shape) if last else buffers.stream(index + 1, *shape)
        options = {"cos_sin": in_proj_cos_sin, "sliced": takes_slices(batch, tokens, rings.keys[0])}
        buffers.run(stage, x, buffers.scratch(index), out, batch, tokens, attend, **options)
        return out

"""`Codec.encode` for clips of many requests, several at a time in one CUDA graph, each to the codes it always has."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from moss_kernels.codec_linear import codec_linear
from moss_kernels.ring_attention import ring_attention, rope_tables, wants_rotated
from moss_runtime.errors import AudioError
from moss_runtime.graphs.capture import GraphSet, bucket_for
from moss_runtime.graphs.codec_layers import StageBuffers, front
from moss_runtime.graphs.codec_weights import StageWeights, encoder_weights
from moss_runtime.model.codec import Codec
from moss_runtime.observe import Metrics

NOT_FINITE = "not encoded: features of a clip overflow in {}, or the codec's weights are corrupt"
# Clips of 3 s have 38 frames, those of 10 s 125. Longer ones than all buckets keep a GPU busy by themselves.
LENGTHS = (16, 24, 32, 40, 48, 64, 80, 104, 128, 192, 256)


class ClipEncoder:
    """Encodes clips without a trace of who else is encoded.

    What a matrix product gives a row depends, in its last bits, on the shape of the whole. So the shape follows from
    the clip's own length alone: it is padded to a bucket, and every pass to the same number of rows. A clip longer than
    all buckets runs by itself.

    The layers are those of `CodecChunk`: a clip is a chunk of a stream that has just begun, with a ring that holds
    nothing yet.

    Attributes:
        stages: weights, shared with the codec.
        buffers: static memory of the stages.
        graphs: one for each length bucket.
    """

    def __init__(
        self,
        codec: Codec,
        rows: int,
        *,
        lengths: Sequence[int] = LENGTHS,
        metrics: Metrics | None = None,
        graphs: bool = True,
    ):
        """Allocates the static inputs and outputs.

        Args:
            codec: with its encoder.
            rows: clips of a pass.
            lengths: buckets in frames.
            metrics: for replays and eager passes.
            graphs: False runs everything eagerly.

        Raises:
            ValueError: the encoder's layout is not supported.
        """
        config, device, dtype = codec.config, codec.device, codec.dtype
        self.codec, self.rows, self.lengths = codec, rows, sorted(lengths)
        self.stages, most = encoder_weights(codec), self.lengths[-1]
        options = {"dtype": dtype, "residual_dtype": dtype, "device": device}
        self.buffers = StageBuffers(self.stages, rows * most, **options)
        self._audio = torch.zeros(rows, config.channels, most * config.samples_per_frame, dtype=dtype, device=device)
        self._frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self._codes = torch.zeros(rows, most, config.codebooks, dtype=torch.int64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._offset = torch.zeros(rows, dtype=torch.int64, device=device)
        ring = rows * max(stage.config.d_model * stage.config.context for stage in self.stages)
        # Keys and values of every layer alike: a stream that has just begun reads nothing of it.
        self._ring = torch.zeros(ring, dtype=dtype, device=device)
        rates = [stage.tokens_per_frame for stage in self.stages]
        # Positions and valid tokens of each stage; those of the padding are valid, too.
        self._cos_sin = [
            rope_tables(torch.arange(most * rate, device=device), stage.config.head_dim, stage.config.max_period)
            for stage, rate in zip(self.stages, rates, strict=True)
        ]
        self._valid = {
            length: torch.tensor([[length * rate] * rows for rate in rates], dtype=torch.int32, device=device)
            for length in self.lengths
        }
        shapes = [(length,) for length in self.lengths]
        # Requests wait for their clips, which go ahead of frames and audio.
        options = {"device": device, "priority": -1, "metrics": metrics, "enabled": graphs}
        self.graphs = GraphSet("reference", shapes, self.compute, **options)
        if self.graphs.stream is not None:
            self.graphs.stream.wait_stream(torch.cuda.current_stream(device))

    def warm_up(self) -> None:
        """Capture all graphs."""
        self.graphs.capture()

    @torch.no_grad()
    def __call__(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Codes of clips; it waits for the device.

        Args:
            clips: [channels, n_i] float32 each, as `Codec.check_clip` accepts them.

        Returns:
            [n_i // samples_per_frame, codebooks] int64 each, on the CPU.

        Raises:
            AudioError: a clip is not as `Codec.check_clip` wants it, or features of one are not finite.
        """
        samples, groups = self.codec.config.samples_per_frame, defaultdict(list)
        for index, clip in enumerate(clips):
            self.codec.check_clip(f"clip {index}", clip)
            groups[bucket_for(-(-clip.shape[1] // samples), self.lengths)].append(index)
        codes: dict[int, Tensor] = {}
        with torch.cuda.stream(self.graphs.stream):
            for length, indices in groups.items():
                rows = self.rows if length in self.lengths else 1
                for start in range(0, len(indices), rows):
                    part = indices[start : start + rows]
                    codes |= zip(part, self._pass([clips[index] for index in part], length), strict=True)
        return [codes[index] for index in range(len(clips))]

    def compute(self, length: int) -> None:
        """The work of a pass: static audio to static codes; this is what a graph holds."""
        config, rows = self.codec.config, self.rows
        samples = length * config.samples_per_frame
        features = front(self.buffers.wide, rows, samples, config.channels)
        features.copy_(self._audio[:, :, :samples].transpose(1, 2))
        for stage, valid, cos_sin in zip(self.stages, self._valid[length], self._cos_sin, strict=True):
            last = stage is self.stages[-1]
            features = self._stage(stage, features, length * stage.tokens_per_frame, valid, cos_sin, last=last)
        torch.all(features.isfinite(), out=self._finite)
        self._codes[:, :length] = self.codec.quantizer.encode(features.view(rows, length, -1), self._frames)

    def _stage(
        self, stage: StageWeights, features: Tensor, tokens: int, valid: Tensor, cos_sin: Tensor, *, last: bool
    ) -> Tensor:
        """One transformer stage over whole clips: a chunk of streams that have just begun."""
        config, rows = stage.config, self.rows
        ring = front(self._ring, rows, config.heads, config.context, config.head_dim)
        rotation = cos_sin[:tokens].expand(rows, -1, -1, -1).contiguous()
        rotated = wants_rotated(rows, tokens, ring, config.context)
        own_cos_sin, in_proj_cos_sin = (None, rotation) if rotated else (rotation, None)

        def attend(_: int, qkv: Tensor, attended: Tensor) -> None:
            step = (qkv, own_cos_sin, ring, ring, self._slots, valid, self._offset)
            ring_attention(*step, config.context, False, attended, settled=True)

        buffers = self.buffers
        x = buffers.stream(0, rows * tokens, config.d_model)
        codec_linear(features.view(len(x), config.input_size), stage.input_proj, x)
        out = front(buffers.wide.view(torch.float32) if last else buffers.wide, len(x), config.output_size)
        buffers.run(stage, x, buffers.scratch(0), out, rows, tokens, attend, cos_sin=in_proj_cos_sin)
        return out

    def _pass(self, clips: Sequence[Tensor], length: int) -> list[Tensor]:
        """Codes of clips of one bucket, or of a clip without one."""
        samples = self.codec.config.samples_per_frame
        if length not in self.lengths:
            self.graphs.count_fallback((length,))
            return [codes.cpu() for codes in self.codec.encode(clips)]
        self._audio[:, :, : length * samples].zero_()
        frames = [clip.shape[1] // samples for clip in clips]
        for row, clip in zip(self._audio, clips, strict=False):
            row[:, : clip.shape[1]].copy_(clip)
        self._frames.copy_(torch.tensor(frames + [0] * (self.rows - len(frames))))
        self.graphs.run(length)
        codes = self._codes.cpu()
        if not self._finite:
            raise AudioError(NOT_FINITE.format(self.codec.dtype))
        return [row[:count].clone() for row, count in zip(codes, frames, strict=False)]

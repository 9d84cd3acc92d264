"""`Codec.encode` for clips of many requests, several at a time in one CUDA graph, each to the codes it always has."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from moss_runtime.errors import AudioError
from moss_runtime.graphs.capture import GraphSet, bucket_for
from moss_runtime.model.codec import Codec
from moss_runtime.observe import Metrics

NOT_FINITE = "not encoded: features of a clip overflow in {}, or the codec's weights are corrupt"
# Up to 10 s: longer clips keep a GPU busy by themselves.
LENGTHS = (25, 50, 75, 100, 125)


class ClipEncoder:
    """Encodes clips without a trace of who else is encoded.

    What a matrix product gives a row depends, in its last bits, on the shape of the whole. So the shape follows from
    the clip's own length alone: it is padded to a bucket, and every pass to the same number of rows. A clip longer than
    all buckets runs by itself.

    Attributes:
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
        """
        config, device = codec.config, codec.device
        self.codec, self.rows, self.lengths = codec, rows, sorted(lengths)
        most = self.lengths[-1]
        shape = (rows, config.channels, most * config.samples_per_frame)
        self._audio = torch.zeros(shape, dtype=codec.dtype, device=device)
        self._frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self._codes = torch.zeros(rows, most, config.codebooks, dtype=torch.int64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        shapes = [(length,) for length in self.lengths]
        self.graphs = GraphSet("reference", shapes, self.compute, device=device, metrics=metrics, enabled=graphs)
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
            AudioError: features of one of them are not finite.
        """
        samples, groups = self.codec.config.samples_per_frame, defaultdict(list)
        for index, clip in enumerate(clips):
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
        samples = self.codec.config.samples_per_frame
        # `Codec.encode_padded` would wait for the device to check the features.
        x = self._audio[:, :, : length * samples].transpose(1, 2).flatten(1)[..., None]
        for module in self.codec.encoder:
            x = module(x)
        torch.all(x.isfinite(), out=self._finite)
        self._codes[:, :length] = self.codec.quantizer.encode(x, self._frames)

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

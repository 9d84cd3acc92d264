"""The codec, MOSS-Audio-Tokenizer: waveforms <-> codes, offline; `Codec.streaming` decodes chunk by chunk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from moss_runtime.errors import AudioError, UserError
from moss_runtime.model.checkpoint import load_weights
from moss_runtime.model.codec.config import CodecConfig, PatchConfig
from moss_runtime.model.codec.quantizer import Quantizer
from moss_runtime.model.codec.stream import CodecStream
from moss_runtime.model.codec.transformer import Patch, TransformerStage, Unpatch


class Codec(nn.Module):
    """Encoder, quantizer and decoder with the official tensor names. The quantizer always computes in fp32."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.config = config
        self.encoder = nn.ModuleList(
            Patch(module.patch_size) if isinstance(module, PatchConfig) else TransformerStage(module)
            for module in config.encoder
        )
        self.quantizer = Quantizer(config.quantizer)
        self.decoder = nn.ModuleList(
            Unpatch(module.patch_size) if isinstance(module, PatchConfig) else TransformerStage(module)
            for module in config.decoder
        )

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "Codec":
        """Load a checkpoint directory.

        Args:
            directory: holds `config.json` and `model.safetensors` (or an index and shards).
            dtype: of encoder, decoder and streaming state.
            device: where it all lies and runs.

        Raises:
            CheckpointError: the config or the tensors cannot be used; the message says which and why.
        """
        codec = cls.on_meta(CodecConfig.from_directory(directory))
        load_weights(codec, directory, dtype=None, device="cpu")
        # The parts go to their dtype and device one tensor at a time, from the mapped file.
        codec.encoder.to(device=device, dtype=dtype)
        codec.quantizer.to(device=device, dtype=torch.float32)
        codec.decoder.to(device=device, dtype=dtype)
        return codec.eval()

    @classmethod
    def on_meta(cls, config: CodecConfig, dtype: torch.dtype = torch.float32) -> "Codec":
        """The codec without storage, to load into or to learn names and sizes from; its quantizer is float32."""
        with torch.device("meta"):
            codec = cls(config)
        codec.encoder.to(dtype)
        codec.decoder.to(dtype)
        return codec

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def encode(self, clips: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Codes of audio clips.

        Each clip runs on its own: its codes are bitwise the same whatever it comes with.

        Args:
            clips: [channels, n_i] float32 each, at the codec's sampling rate, any lengths.

        Returns:
            [n_i // samples_per_frame, codebooks] int64 each: the whole frames, as the official count has it.

        Raises:
            AudioError: a clip has the wrong shape, no samples, or samples or features that are not finite.
        """
        for index, clip in enumerate(clips):
            self.check_clip(f"clip {index}", clip)
        return [self._encode_clip(clip) for clip in clips]

    def encode_padded(self, audio: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Codes of a padded batch with the official treatment of the padding.

        Args:
            audio: [B, channels, n] float32, zero beyond each clip's length; padded with zeros to whole frames.
            lengths: [B] int64. Samples of each clip; n // samples_per_frame of its frames are valid, the codes of
                later ones depend on the quantizer's biases alone.

        Returns:
            [B, ceil(n / samples_per_frame), codebooks] int64.

        Raises:
            AudioError: the encoder's features are not finite.
        """
        samples = self.config.samples_per_frame
        audio = F.pad(audio.to(device=self.device, dtype=self.dtype), (0, -audio.shape[2] % samples))
        x = audio.transpose(1, 2).flatten(1)[..., None]
        for module in self.encoder:
            x = module(x)
        if not x.isfinite().all():
            raise AudioError(f"not encoded: features overflow in {self.dtype}, or the codec's weights are corrupt")
        return self.quantizer.encode(x, lengths.to(self.device) // samples)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Waveforms of whole code sequences.

        Args:
            codes: [B, T, codebooks] int.

        Returns:
            [B, channels, T * samples_per_frame] float32.

        Raises:
            UserError: the shape is wrong or a code is out of range; the message names its place.
        """
        self.check_code_shape(codes)
        self.check_codes(codes)
        x = self.embed(codes.to(self.device))
        for module in self.decoder:
            x = module(x)
        return self.waveform(x)

    def streaming(self, slots: int, ring: Literal["exact", "reference"] = "exact") -> CodecStream:
        """A streaming decoder for up to `slots` streams; see `CodecStream`."""
        return CodecStream(self, slots, ring)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Decoder input of codes: [B, T, codebooks] int -> [B, T, features] in the model's dtype."""
        return self.quantizer.decode(codes.long()).to(self.dtype)

    def waveform(self, x: torch.Tensor) -> torch.Tensor:
        """Decoder output to audio: [B, n * channels, 1] interleaved -> [B, channels, n] float32."""
        return x.float().unflatten(1, (-1, self.config.channels)).squeeze(-1).transpose(1, 2)

    def check_code_shape(self, codes: torch.Tensor) -> None:
        if not isinstance(codes, torch.Tensor):
            raise TypeError(f"`codes` must be a tensor, got {type(codes).__name__}")
        if codes.dim() != 3 or codes.shape[2] != self.config.codebooks:
            raise UserError(f"`codes` must be [B, T, {self.config.codebooks}], got {list(codes.shape)}")
        if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            raise UserError(f"`codes` must be integers, got {codes.dtype}")

    def check_codes(self, codes: torch.Tensor, live: torch.Tensor | None = None) -> None:
        """Raise `UserError` at the first code out of range; `live`: [B, T] bool, the frames that count."""
        codes = codes.long()  # narrower and unsigned types cannot all be compared with the size
        wrong = (codes < 0) | (codes >= self.config.codebook_size)
        if live is not None:
            wrong &= live[..., None]
        if wrong.any():
            row, frame, codebook = wrong.nonzero()[0].tolist()
            raise UserError(
                f"`codes` must be in 0..{self.config.codebook_size - 1}, got {codes[row, frame, codebook].item()} at "
                f"row {row}, frame {frame}, codebook {codebook}"
            )

    def _encode_clip(self, clip: torch.Tensor) -> torch.Tensor:
        samples = clip.shape[1]
        codes = self.encode_padded(clip[None], torch.tensor([samples]))
        return codes[0, : samples // self.config.samples_per_frame]

    def check_clip(self, name: str, clip: torch.Tensor) -> None:
        """Raise TypeError or AudioError, with the clip's name, if `encode` would not take it."""
        if not isinstance(clip, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(clip).__name__}")
        if clip.dim() != 2 or clip.shape[0] != self.config.channels:
            raise AudioError(f"{name} must be [{self.config.channels}, samples], got {list(clip.shape)}")
        if clip.shape[1] == 0:
            raise AudioError(f"{name} has no samples")
        if not clip.is_floating_point():
            raise AudioError(f"{name} must be floating point, got {clip.dtype}")
        if not clip.isfinite().all():
            raise AudioError(f"{name} holds NaN or infinite samples")

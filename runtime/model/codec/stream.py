"""Streaming decode: chunks of code frames of many streams in, exactly their samples out."""

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Literal

import torch

from moss_kernels.ring_attention import ring_attention_reference, ring_visibility
from moss_kernels.ring_kv_write import ring_kv_write_reference, ring_target
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.model.codec.transformer import StageAttention, TransformerStage
from moss_runtime.state.codec_slots import CodecSlots, StageRings

if TYPE_CHECKING:
    from moss_runtime.model.codec.codec import Codec


class RingStageAttention(StageAttention):
    """Attention of one stage in one step: over the slots' rings and the chunk, which is written to the rings."""

    def __init__(
        self,
        config: TransformerConfig,
        rings: StageRings,
        slots: torch.Tensor,
        valid: torch.Tensor,
        *,
        tokens: int,
        exact: bool,
    ):
        """Args: slots, valid: [B] int32. Slot, and valid tokens, of each row; tokens: T, padding included."""
        step = torch.arange(tokens, device=slots.device)
        super().__init__(config, rings.offset[slots][:, None] + step)
        self.rings, self.slots, self.valid, self.exact = rings, slots, valid, exact
        size = {"tokens": tokens, "capacity": config.context}
        self.target = ring_target(slots, valid, rings.offset, **size)
        self.visible = ring_visibility(
            slots, valid, rings.offset, **size, window=config.context, chunk_in_ring=not exact
        )

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        rings = self.rings
        step = (qkv, self.cos_sin, rings.keys[layer], rings.values[layer], self.slots, self.valid, rings.offset)
        out = qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
        if self.exact:
            ring_attention_reference(*step, self.config.context, False, out, visible=self.visible)
            ring_kv_write_reference(*step, target=self.target)
        else:
            ring_kv_write_reference(*step, target=self.target)
            ring_attention_reference(*step, self.config.context, True, out, visible=self.visible)
        return out

    def advance(self) -> None:
        """After the last layer: the tokens count as consumed."""
        self.rings.offset.index_add_(0, self.slots, self.valid.long())


class CodecStream:
    """Decodes chunks of up to `slots` streams; `slots` leases them and holds their state.

    With `ring="exact"` the chunks of a stream, put together, are its offline waveform, however its codes are cut.
    `ring="reference"` is the released streaming decoder: a chunk is written to the ring first and attended after.
    """

    def __init__(self, codec: "Codec", slots: int, ring: Literal["exact", "reference"] = "exact"):
        if ring not in ("exact", "reference"):
            raise ValueError(f'`ring` must be "exact" or "reference", got {ring!r}')
        self.codec = codec
        self.exact = ring == "exact"
        stages = [module.config for module in codec.decoder if isinstance(module, TransformerStage)]
        self.slots = CodecSlots(stages, slots, dtype=codec.dtype, device=codec.device)

    def reset(self, slot: int) -> None:
        """Start the stream of a slot again at its first frame."""
        self.slots.reset(slot)

    def step(
        self, codes: torch.Tensor, slots: Sequence[int] | torch.Tensor, valid: Sequence[int] | torch.Tensor
    ) -> torch.Tensor:
        """Decode the next frames of each row's stream.

        Lists and CPU tensors are checked. Tensors that lie on another device are not, since that would wait for it.
        Memory grows with the square of T: cut long input into chunks of tens of frames.

        Args:
            codes: [B, T, codebooks] int. Frames at or beyond a row's `valid` may hold anything.
            slots: [B]. Slot of each row; rows without valid frames may name any slot, or the null slot.
            valid: [B]. Frames to decode, 0 .. T. A row with 0 changes nothing.

        Returns:
            [B, channels, T * samples_per_frame] float32, 0 beyond each row's valid frames.

        Raises:
            ValueError: shapes do not agree, a slot or a count is out of range, two rows with valid frames name the
                same slot, or (`UserError`) a code of a valid frame is out of range.
        """
        codec, device = self.codec, self.codec.device
        check_step(codec, self.slots.null_slot, codes, slots, valid)
        slots, valid = (torch.as_tensor(x, dtype=torch.int32).to(device) for x in (slots, valid))
        live = torch.arange(codes.shape[1], device=device) < valid[:, None]
        x = codec.embed(torch.where(live[..., None], codes.to(device).long(), 0))
        rings = iter(self.slots.stages)
        for module in codec.decoder:
            if isinstance(module, TransformerStage):
                tokens_per_frame = x.shape[1] // max(codes.shape[1], 1)
                attention = RingStageAttention(
                    module.config,
                    next(rings),
                    slots,
                    valid * tokens_per_frame,
                    tokens=x.shape[1],
                    exact=self.exact,
                )
                x = module(x, attention)
                attention.advance()
            else:
                x = module(x)
        audio = codec.waveform(x)
        return torch.where(live.repeat_interleave(codec.config.samples_per_frame, dim=1)[:, None], audio, 0)


def check_step(
    codec: "Codec",
    null_slot: int,
    codes: torch.Tensor,
    slots: Sequence[int] | torch.Tensor,
    valid: Sequence[int] | torch.Tensor,
) -> None:
    """Check the rows of a streaming step as far as that needs no wait for a device; see `CodecStream.step`."""
    codec.check_code_shape(codes)
    rows, frames = codes.shape[:2]
    if len(slots) != rows or len(valid) != rows:
        raise ValueError(f"`slots` and `valid` must have {rows} entries, got {len(slots)} and {len(valid)}")
    if any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in (slots, valid)):
        return
    live = set()
    for slot, count in zip(map(index, slots), map(index, valid), strict=True):
        if not 0 <= slot <= null_slot:
            raise ValueError(f"`slots` must be in 0..{null_slot}, got {slot}")
        if not 0 <= count <= frames:
            raise ValueError(f"`valid` must be in 0..{frames}, got {count}")
        if count and slot == null_slot:
            raise ValueError(f"slot {slot} is the null slot, it cannot have {count} valid frames")
        if count and slot in live:
            raise ValueError(f"`slots` names slot {slot} twice")
        if count:
            live.add(slot)
    if codes.device.type == "cpu":
        codec.check_codes(codes, torch.arange(frames) < torch.as_tensor(valid)[:, None])

"""State of the requests being decoded: rows of tensors on the device, and who holds which row on the host."""

import enum
import math
import struct
from collections.abc import Hashable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from moss_kernels import SamplingParams, SamplingState
from moss_kernels.frame_bookkeeping import frame_bookkeeping_begin, frame_bookkeeping_end
from moss_kernels.sample_codebook.params import MAX_SEED
from moss_kernels.sample_codebook.state import row_values
from moss_runtime.model.config import ModelConfig
from moss_runtime.state.free_list import Event, FreeList
from moss_runtime.state.pinned import pinned

# What a request begins with, by `struct` format; the rest of its row begins with zeros.
_START = {
    "temperature": "f",
    "top_k": "i",
    "top_p": "f",
    "repetition_penalty": "f",
    "text_temperature": "f",
    "text_top_k": "i",
    "text_top_p": "f",
    "seed": "q",
    "positions": "i",
    "max_frames_row": "i",
}
_DTYPES = {"f": torch.float32, "i": torch.int32, "q": torch.int64}
_PACK = struct.Struct(f"={''.join(_START.values())}")
# Kernels may ask for pointers that are aligned to 16 bytes.
_ALIGNMENT = 16


class PoolFull(RuntimeError):
    """No row is free now."""


class StaleLeaseError(RuntimeError):
    """A lease was released before; its row may belong to another request by now."""


@dataclass(frozen=True)
class RowLease:
    """The right of a request to a row; `generation` tells it from earlier and later holders of the row."""

    request_id: Hashable
    row: int
    generation: int


class _Stage(enum.Enum):
    DECODING = "decoding"
    FINISHED = "finished"
    CONSUMED = "consumed"


@dataclass
class _Holder:
    lease: RowLease
    stage: _Stage = _Stage.DECODING
    event: Event | None = None


class DecodePool:
    """Rows 0 .. S-1 for requests; row S is the null row, at which padding points: it keeps every bit.

    The device marks a row finished by itself and masks it from the next frame on, so the host may learn of it late.
    The host's side: `acquire`, `finish` when no frame will follow, `consumed` when the last codes have been handed to
    whoever reads them, `release`. `abort` ends a request at any point. Resets of rows are enqueued on the current
    stream, which must be the one that runs the frames.

    Attributes:
        staging: [S+1, H]. Input of the row's next backbone step.
        codes: [S+1, Q] int64. The newest frame.
        history: [S+1, max_frames, Q] int16. All frames so far; later entries hold anything.
        sampling: parameters, seed, frame number and seen codes.
        positions: [S+1] int32. Tokens that the KV cache holds, the position of the next one.
        frames: [S+1] int32. Frames produced.
        max_frames_row: [S+1] int32. Limit of the request.
        stopped: [S+1] bool. The request drew "stop".
        finished: [S+1] bool. No frame will follow; always set in the null row.
        status: [S+1] int32. Status bits of the draw that ended the row; not 0 is an error.
    """

    def __init__(
        self, config: ModelConfig, *, rows: int, max_frames: int, dtype: torch.dtype, device: torch.device | str
    ):
        """Allocates all rows.

        Args:
            config: of the model.
            rows: S, requests at a time.
            max_frames: most frames of a request.
            dtype: of the backbone's inputs.
            device: of all tensors.
        """
        for name, size in (("rows", rows), ("max_frames", max_frames)):
            if size < 1:
                raise ValueError(f"DecodePool: `{name}` must be at least 1, got {size}")
        self.null_row, self.max_frames = rows, max_frames

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        layout = {name: ((), _DTYPES[kind]) for name, kind in _START.items()}
        layout |= {name: ((), torch.int32) for name in ("frame", "frames", "status")}
        layout |= {name: ((), torch.bool) for name in ("stopped", "finished")}
        layout["codes"] = (config.n_vq,), torch.int64
        layout["seen"] = (config.n_vq, -(-config.audio_vocab_size // 32)), torch.int32
        self._memory, tensors, self._places = _together(layout, rows + 1, device)
        self.sampling = SamplingState(**{field.name: tensors[field.name] for field in fields(SamplingState)})
        self.codes, self.positions, self.frames = tensors["codes"], tensors["positions"], tensors["frames"]
        self.max_frames_row, self.status = tensors["max_frames_row"], tensors["status"]
        self.stopped, self.finished = tensors["stopped"], tensors["finished"]
        self.finished[rows] = True
        self.staging = zeros(rows + 1, config.backbone.hidden_size, dtype=dtype)
        self.history = zeros(rows + 1, max_frames, config.n_vq, dtype=torch.int16)
        self._free = FreeList(rows)
        self._generation = [0] * rows
        self._holders: dict[Hashable, _Holder] = {}

    @classmethod
    def bytes(cls, config: ModelConfig, *, rows: int, max_frames: int, dtype: torch.dtype) -> int:
        """Device memory that a pool made with the same arguments takes."""
        return cls(config, rows=rows, max_frames=max_frames, dtype=dtype, device="meta").size_in_bytes

    @property
    def size_in_bytes(self) -> int:
        """Device memory of all tensors."""
        return sum(tensor.nbytes for tensor in (self._memory, self.staging, self.history))

    @property
    def free(self) -> int:
        """Rows that can be acquired now."""
        return self._free.available

    @property
    def in_use(self) -> int:
        """Rows that requests hold."""
        return len(self._holders)

    def acquire(
        self, request_id: Hashable, params: SamplingParams, *, seed: int, max_frames: int, position: int = 0
    ) -> RowLease:
        """Take a free row and reset all of its state but the staging row, which the prompt's last row fills.

        Args:
            request_id: names the request in the pool until its row is released.
            params: how its codes are drawn; its own `seed` is not read.
            seed: the seed in force, 0 .. 2^63-1.
            max_frames: limit of the request, 1 .. the pool's `max_frames`.
            position: tokens that the KV cache will hold before its first frame.

        Raises:
            PoolFull: no row is free; nothing has changed.
            ValueError: the request holds a row already, or an argument is out of range.
        """
        if request_id in self._holders:
            raise ValueError(f"DecodePool: request {request_id!r} holds row {self.row_of(request_id)} already")
        if not 1 <= max_frames <= self.max_frames:
            raise ValueError(f"DecodePool: `max_frames` must be in 1..{self.max_frames}, got {max_frames}")
        if not 0 <= position < 2**31:
            raise ValueError(f"DecodePool: `position` must be in 0..2^31-1, got {position}")
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"DecodePool: `seed` must be in 0..2^63-1, got {seed}")
        if not self._free.available:
            waiting = self._free.returning
            raise PoolFull(
                f"all {self.null_row} rows are taken: {self.in_use} by requests, {waiting} until their codes are read"
            )
        (row,) = self._free.take(1)
        try:
            self._reset(row, params, seed, max_frames, position)
        except BaseException:
            self._free.give([row])
            raise
        self._generation[row] += 1
        lease = RowLease(request_id, row, self._generation[row])
        self._holders[request_id] = _Holder(lease)
        return lease

    def row_of(self, request_id: Hashable) -> int:
        """Row of a request that holds one, else KeyError."""
        return self._holders[request_id].lease.row

    def check(self, lease: RowLease) -> None:
        """Raise StaleLeaseError unless the lease is still held."""
        self._holder(lease)

    def finish(self, lease: RowLease) -> None:
        """No frame will follow; the last ones are still to be consumed.

        Raises:
            StaleLeaseError: the lease was released.
            RuntimeError: it was finished before.
        """
        holder = self._holder(lease)
        if holder.stage is not _Stage.DECODING:
            raise RuntimeError(f"request {lease.request_id!r} finished before")
        holder.stage = _Stage.FINISHED

    def consumed(self, lease: RowLease, event: Event | None) -> None:
        """All frames so far have been handed to their reader, whose reads end with the event.

        Called after `finish`, it says that the last frame is among them. Events of one row are in order: a later one
        completes after the earlier ones.

        Args:
            lease: of the row.
            event: recorded after the reads of the row's codes; None where they are over (on a CPU).

        Raises:
            StaleLeaseError: the lease was released.
        """
        holder = self._holder(lease)
        holder.event = event
        if holder.stage is _Stage.FINISHED:
            holder.stage = _Stage.CONSUMED

    def release(self, lease: RowLease) -> None:
        """Give the row of a finished and consumed request back. It is reused once the event of `consumed` is over.

        Raises:
            StaleLeaseError: the lease was released before.
            RuntimeError: the request is not finished, or its last frames are not consumed; nothing has changed.
        """
        stage = self._holder(lease).stage
        if stage is not _Stage.CONSUMED:
            raise RuntimeError(f"row {lease.row} of request {lease.request_id!r} is {stage.value}, not consumed")
        self.abort(lease)

    def abort(self, lease: RowLease) -> None:
        """End a request at any point and give its row back. Frames that nobody has read are lost.

        Raises:
            StaleLeaseError: the lease was released before.
        """
        holder = self._holder(lease)
        del self._holders[lease.request_id]
        self._free.give([lease.row], holder.event)

    def begin_frame(self, row_map: Tensor, active: Tensor, *, embeds: Tensor, live: Tensor) -> None:
        """Inputs of a frame, and which rows are live: see `moss_kernels.frame_bookkeeping`. Graph-safe: yes."""
        frame_bookkeeping_begin(row_map, active, self.staging, self.finished, embeds, live)

    def advance(
        self, row_map: Tensor, live: Tensor, *, codes: Tensor, continues: Tensor, feedback: Tensor, draw_status: Tensor
    ) -> None:
        """Keep what a frame made; the arguments are those of `moss_kernels.frame_bookkeeping_end`. Graph-safe: yes."""
        frame_bookkeeping_end(
            row_map,
            live,
            codes,
            continues,
            feedback,
            draw_status,
            self.staging,
            self.codes,
            self.history,
            self.positions,
            self.frames,
            self.max_frames_row,
            self.stopped,
            self.finished,
            self.status,
        )

    def _holder(self, lease: RowLease) -> _Holder:
        holder = self._holders.get(lease.request_id)
        if holder is None or holder.lease != lease:
            raise StaleLeaseError(
                f"lease {lease.generation} of row {lease.row} (request {lease.request_id!r}) was released"
            )
        return holder

    def _reset(self, row: int, params: SamplingParams, seed: int, max_frames: int, position: int) -> None:
        """Start values of a row; nothing here waits for the device."""
        values = {**row_values(params), "seed": seed, "positions": position, "max_frames_row": max_frames}
        first, stride = self._places
        size = len(first)
        # Where the row's bytes lie, and the bytes.
        message = np.zeros(9 * size, dtype=np.uint8)
        message[: 8 * size].view(np.int64)[:] = first + row * stride
        _PACK.pack_into(message, 8 * size, *(values[name] for name in _START))
        device = self._memory.device
        places, fresh = pinned(message, torch.uint8, device).to(device, non_blocking=True).split([8 * size, size])
        self._memory.index_copy_(0, places.view(torch.int64), fresh)


def _together(
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]], rows: int, device: torch.device | str
) -> tuple[Tensor, dict[str, Tensor], tuple[np.ndarray, np.ndarray]]:
    """Tensors in one piece of memory, so that one copy can write a row of all of them.

    Args:
        layout: shape of a row of each tensor, and its dtype.
        rows: of each tensor.
        device: of the memory.

    Returns:
        The memory [.] uint8, zeros; the tensors [rows, ...]; and the places of a row's bytes in it: of row 0 [n] int64,
        and how far those of the next row are [n] int64.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name] = end
        end += -(-size * rows // _ALIGNMENT) * _ALIGNMENT
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    tensors = {
        name: memory[starts[name] : starts[name] + sizes[name] * rows].view(dtype).view(rows, *shape)
        for name, (shape, dtype) in layout.items()
    }
    first = np.concatenate([starts[name] + np.arange(size) for name, size in sizes.items()])
    return memory, tensors, (first, np.repeat(list(sizes.values()), list(sizes.values())))

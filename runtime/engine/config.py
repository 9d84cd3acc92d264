"""Settings of the engine: named modes, files, and the combinations that are refused."""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moss_runtime.errors import UserError
from moss_runtime.graphs.capture import BUCKETS
from moss_runtime.graphs.codec_chunk import FRAMES
from moss_runtime.graphs.prefill import PROMPTS

_MODES = Path(__file__).parents[1] / "assets" / "engine_modes.toml"
SLOT_POLICIES = ("queue", "offline", "reject")
PCM = ("float32", "int16")
# Streams of a codec call, to which fewer are padded.
CODEC_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# Largest sensible value of a count or a number of milliseconds: what is beyond is a mistake.
_MOST = 2**31 - 1
# Each call under way has a staging buffer.
_MOST_CALLS = 16


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an `Engine`. Frames are of 80 ms with the released codec.

    Attributes:
        mode: name of the mode that the values come from, for logs.
        stream: audio is handed out while it is made; False: in one piece when the request ends.
        rows: requests that make frames at a time, at most 128.
        max_tokens: most tokens of a request, prompt and frames.
        max_frames: most frames of a request.
        pages: KV pages that all rows share; None: enough for every row at `max_tokens`.
        frames_per_launch: frames of a row in one launch; the host learns of them together.
        max_in_flight: launches that the host runs ahead of the device. More of them bridge the time in which the host
            has other things to do, and each delays a new request by a frame.
        max_waiting: accepted requests that wait for a row; `submit` refuses more.
        prefill_batch: waiting requests that are admitted without waiting for more, a few between two launches.
        prefill_wait_ms: longest time that a request waits for others to be prefilled with, while others make frames.
        codec_slots: streams that the codec holds at a time; None: one for each row.
        slot_policy: what happens to a request that gets a row but no codec slot: "queue" (it waits for one), "offline"
            (its audio is decoded in one piece at its end, without a slot), "reject" (it ends with an error).
        codec_batch: most streams in one codec call; None: all slots.
        chunk_ramp: frames of a request's first, second, ... chunk; the last size goes on.
        crowd: from so many requests on, ramps begin with their second size: steps take so long then that one frame of
            audio is over before the next chunk comes.
        largest_chunk: most frames of a chunk. Chunks grow to it when the codec lags or waits for others.
        chunk_wait_ms: longest time that a chunk waits for chunks of other requests. The first chunk of a stream never
            waits, and none beyond the moment when its client has only `chunk_lead_ms` left to play.
        chunk_lead_ms: how long before the client's audio ends the next chunk is due at the codec.
        final_wait_ms: as `chunk_wait_ms`, of a request's last chunk, which keeps its client from its next request;
            where there are fewer requests than `crowd`, shorter in proportion.
        codec_calls: codec calls that may be enqueued, or on their way to the host, at a time; at most 16. Only calls
            for first chunks are enqueued behind another one.
        overlap: frames and codec calls run at the same time; False: one after the other.
        max_pending_frames: frames of one request that may wait for the codec; at the limit its row pauses.
        max_pending_total: frames that may wait for the codec in all; at the limit rows pause and nobody is admitted.
            Frames of requests whose client reads too slowly do not count: they have their own limit.
        max_output_frames: frames of audio that a streaming client may leave unread; then its request alone stops.
        pcm: samples are "float32" or "int16".
        reference_cache_bytes: memory for codes of reference audio.
        reference_batch: clips that are encoded together. On a GPU fewer take as long, so that more than one pay only
            where clips come in bursts.
        reference_wait_ms: how long the first clip waits for others, where more than one are encoded together.
        graphs: False runs everything eagerly.
    """

    mode: str = "streaming-balanced"
    stream: bool = True
    rows: int = 64
    max_tokens: int = 8192
    max_frames: int = 4096
    pages: int | None = None
    frames_per_launch: int = 1
    max_in_flight: int = 2
    max_waiting: int = 256
    prefill_batch: int = 1
    prefill_wait_ms: float = 0.0
    codec_slots: int | None = None
    slot_policy: str = "queue"
    codec_batch: int | None = None
    chunk_ramp: tuple[int, ...] = (1, 2, 4, 8)
    crowd: int = 32
    largest_chunk: int = 15
    chunk_wait_ms: float = 200.0
    chunk_lead_ms: float = 120.0
    final_wait_ms: float = 80.0
    codec_calls: int = 2
    overlap: bool = True
    max_pending_frames: int = 64
    max_pending_total: int = 4096
    max_output_frames: int = 256
    pcm: str = "float32"
    reference_cache_bytes: int = 64 * 2**20
    reference_batch: int = 1
    reference_wait_ms: float = 5.0
    graphs: bool = True

    def __post_init__(self):
        """Raises UserError naming the field, or the fields that contradict each other."""
        object.__setattr__(self, "chunk_ramp", _sizes(self.chunk_ramp))
        for field in dataclasses.fields(self):
            _check(field.name, field.type, getattr(self, field.name))
        limits = {
            "rows": BUCKETS[-1],
            "prefill_batch": PROMPTS,
            "codec_calls": _MOST_CALLS,
        }
        for name, most in limits.items():
            if getattr(self, name) > most:
                raise UserError(f"engine: `{name}` must be at most {most}, got {getattr(self, name)}")
        for name, choices in (("slot_policy", SLOT_POLICIES), ("pcm", PCM)):
            if getattr(self, name) not in choices:
                raise UserError(f"engine: `{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for wrong, message in self._contradictions():
            if wrong:
                raise UserError(f"engine: {message}")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        first, steady = self.chunk_ramp[0], self.chunk_ramp[-1]
        learnt = self.unlearnt_frames
        yield (
            list(self.chunk_ramp) != sorted(self.chunk_ramp),
            f"`chunk_ramp` must not decrease, got {list(self.chunk_ramp)}",
        )
        yield (
            self.largest_chunk < steady,
            f"`largest_chunk` must be at least the last size of `chunk_ramp`, {steady}, got {self.largest_chunk}",
        )
        yield (
            self.stream and first >= self.max_frames > 1,
            f"`stream` needs a first chunk below `max_frames`, {self.max_frames}; `chunk_ramp` begins with {first}",
        )
        yield (
            self.stream and self.frames_per_launch > first,
            f"`stream` with a first chunk of {first} frames needs `frames_per_launch` of at most that, got "
            f"{self.frames_per_launch}",
        )
        yield (
            self.frames_per_launch > self.max_frames,
            f"`frames_per_launch` must be at most `max_frames`, {self.max_frames}, got {self.frames_per_launch}",
        )
        yield (
            not self.stream and len(self.chunk_ramp) > 1,
            f"without `stream` there is no early chunk: `chunk_ramp` must be one size, got {list(self.chunk_ramp)}",
        )
        yield (
            self.max_frames >= self.max_tokens,
            f"`max_frames` must be below `max_tokens`, {self.max_tokens}, for the prompt's sake, got {self.max_frames}",
        )
        yield (
            self.slots > self.rows,
            f"`codec_slots` must be at most `rows`, {self.rows}: no row could use more, got {self.slots}",
        )
        yield (
            self.batch > self.slots,
            f"`codec_batch` must be at most the codec slots, {self.slots}, got {self.batch}",
        )
        yield (
            self.max_pending_frames < self.largest_chunk + learnt,
            f"`max_pending_frames` must hold the largest chunk and {learnt} frames that the host has not learnt of, "
            f"{self.largest_chunk + learnt}, got {self.max_pending_frames}",
        )
        yield (
            self.max_pending_total < self.rows * (1 + learnt),
            f"`max_pending_total` must hold {1 + learnt} frames of each of {self.rows} rows, "
            f"{self.rows * (1 + learnt)}, got {self.max_pending_total}",
        )
        yield (
            self.max_output_frames < self.largest_chunk,
            f"`max_output_frames` must hold the largest chunk, {self.largest_chunk}, got {self.max_output_frames}",
        )

    @property
    def slots(self) -> int:
        """Codec slots in force."""
        return self.rows if self.codec_slots is None else self.codec_slots

    @property
    def batch(self) -> int:
        """Most streams of a codec call."""
        return self.slots if self.codec_batch is None else self.codec_batch

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Lengths of codec calls, padding included; no request has more than `max_frames`."""
        between = (size for size in FRAMES if self.chunk_ramp[0] < size < self.largest_chunk)
        sizes = (*self.chunk_ramp, *between, self.largest_chunk)
        return tuple(sorted({min(size, self.max_frames) for size in sizes}))

    @property
    def unlearnt_frames(self) -> int:
        """Most frames of a row that are launched while the host does not know of them."""
        return self.max_in_flight * self.frames_per_launch

    @classmethod
    def from_mode(cls, mode: str, **overrides: Any) -> "EngineConfig":
        """A named mode: offline-fast, streaming-low-latency or streaming-balanced, with other values where given.

        Raises:
            UserError: there is no such mode or field, or the values contradict each other.
        """
        modes = _read(_MODES)
        if not isinstance(mode, str) or mode not in modes:
            raise UserError(f"engine: `mode` must be one of {', '.join(modes)}, got {mode!r}")
        return cls._from({"mode": mode} | modes[mode] | overrides)

    @classmethod
    def from_toml(cls, path: str | Path) -> "EngineConfig":
        """Read a file of fields; `mode` names the mode that they change.

        Raises:
            UserError: the file cannot be read; and as `from_mode`.
        """
        values = _read(Path(path))
        return cls.from_mode(values.pop("mode", cls.mode), **values)

    @classmethod
    def _from(cls, values: Mapping[str, Any]) -> "EngineConfig":
        unknown = values.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise UserError(f"engine: unknown settings: {', '.join(sorted(unknown))}")
        return cls(**values)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not TOML ({error})") from None


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"engine: `chunk_ramp` must be a list of frame counts, got {value!r}")
    for index, size in enumerate(value):
        _check(f"chunk_ramp[{index}]", int, size)
    return tuple(value)


def _check(name: str, kind: Any, value: Any) -> None:
    """Type and range of one field."""
    if kind == int | None:
        if value is None:
            return
        kind = int
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        least = 1 if kind is int else 0
        if isinstance(value, bool) or not isinstance(value, numbers) or not least <= value <= _MOST:
            expected = "a positive integer below 2^31" if kind is int else "a number in 0..2^31-1"
            raise UserError(f"engine: `{name}` must be {expected}, got {value!r}")
    elif kind in (bool, str) and not isinstance(value, kind):
        raise UserError(f"engine: `{name}` must be a {kind.__name__}, got {value!r}")

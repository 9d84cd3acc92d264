"""A closed load on an engine: so many clients, each with one request at a time, and what they see."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from moss_runtime.engine.engine import Engine
from moss_runtime.engine.handle import Handle
from moss_runtime.engine.request import FIRST_AUDIO_STAGES, Request
from moss_runtime.observe import percentiles

PERCENTILES = (20, 50, 80, 95, 99)


@dataclasses.dataclass
class Load:
    """What clients saw of an engine within a window of time. Times are in seconds.

    Attributes:
        concurrency: number of clients.
        window: length of the window.
        frames: (seconds since its beginning, frames) of each piece of audio that came in the window.
        first_audio: from submit to the first audio, of requests submitted in the window.
        gaps: between two pieces of audio of a request.
        latency, rtf: from submit to the end, and that over the seconds of audio, of requests that ended in the window.
        stages: of each of FIRST_AUDIO_STAGES, of the same requests.
        underruns: pieces of audio that came when a client playing in real time had nothing left.
        frame_rate: frames of a second of audio.
    """

    concurrency: int
    window: float
    frame_rate: float
    frames: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    first_audio: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    latency: list[float] = dataclasses.field(default_factory=list)
    rtf: list[float] = dataclasses.field(default_factory=list)
    stages: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in FIRST_AUDIO_STAGES}
    )
    underruns: int = 0

    @property
    def audio_seconds(self) -> float:
        return sum(count for _, count in self.frames) / self.frame_rate

    def rates(self, slices: int = 10) -> list[float]:
        """Seconds of audio per second in equal parts of the window."""
        parts = [0.0] * slices
        for when, count in self.frames:
            parts[min(int(when / self.window * slices), slices - 1)] += count / self.frame_rate
        return [part / (self.window / slices) for part in parts]

    def summary(self) -> dict[str, Any]:
        """Percentiles and rates, ready for JSON; times in milliseconds."""
        numbers = {"concurrency": self.concurrency, "window_s": round(self.window, 2), "requests": len(self.latency)}
        numbers |= {
            "audio_s_per_s": round(self.audio_seconds / self.window, 2),
            "requests_per_s": round(len(self.latency) / self.window, 2),
            "underruns": self.underruns,
        }
        for name in ("first_audio", "gaps", "latency"):
            numbers[f"{name}_ms"] = _rounded(1e3 * value for value in getattr(self, name))
        numbers["rtf"] = _rounded(self.rtf)
        numbers["stages_ms"] = {
            name: _rounded(1e3 * value for value in values).get("p50") for name, values in self.stages.items()
        }
        return numbers


def _rounded(values: Iterable[float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in percentiles(values, PERCENTILES).items()}


def measure(
    engine: Engine, make: Callable[[int], Request], *, concurrency: int, warm_s: float, window_s: float
) -> Load:
    """Put a load on an engine and watch it for a while; what is unfinished then is aborted.

    Args:
        engine: without other requests.
        make: makes request number 0, 1, 2, ...
        concurrency: number of clients.
        warm_s: seconds under load before the window begins.
        window_s: length of the window.
    """
    return asyncio.run(_Clients(engine, make, concurrency, warm_s, window_s).run())


class _Clients:
    def __init__(
        self, engine: Engine, make: Callable[[int], Request], concurrency: int, warm_s: float, window_s: float
    ):
        self._engine, self._make, self._numbers = engine, make, itertools.count()
        self._load = Load(concurrency, window_s, engine.stage.codec.config.frame_rate)
        self._start = time.perf_counter() + warm_s
        self._end = self._start + window_s
        self._handles: set[Handle] = set()

    async def run(self) -> Load:
        clients = [asyncio.create_task(self._client()) for _ in range(self._load.concurrency)]
        left = self._end - time.perf_counter()
        await asyncio.wait(clients, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        for handle in list(self._handles):
            handle.abort()
        await asyncio.gather(*clients)
        return self._load

    async def _client(self) -> None:
        while time.perf_counter() < self._end:
            handle = self._engine.submit(self._make(next(self._numbers)))
            self._handles.add(handle)
            try:
                await self._listen(handle)
            finally:
                self._handles.discard(handle)

    async def _listen(self, handle: Handle) -> None:
        load, latest, horizon = self._load, None, 0.0
        async for chunk in handle:
            now = time.perf_counter()
            if self._start <= now < self._end:
                load.frames.append((now - self._start, chunk.frames))
                if latest is not None:
                    load.gaps.append(now - latest)
                    load.underruns += now > horizon
            if latest is None and handle.submitted >= self._start:
                load.first_audio.append(now - handle.submitted)
            horizon = max(horizon, now) + chunk.frames / load.frame_rate
            latest = now
        self._ended(handle)

    def _ended(self, handle: Handle) -> None:
        result, load = handle.result(), self._load
        ended = handle.submitted + result.latency
        if result.finish_reason not in ("stop", "length") or not self._start <= ended < self._end:
            return
        load.latency.append(result.latency)
        if result.seconds:
            load.rtf.append(result.latency / result.seconds)
        for name, seconds in result.stages.items():
            load.stages[name].append(seconds)

"""Stage timings from CUDA events, read when the device has passed them; nothing here waits."""

import time
from collections import deque
from collections.abc import Sequence

import torch

from moss_runtime.observe.percentiles import percentiles

PERCENTILES = (50, 90, 99)
_WINDOW = 4096


class Lap:
    """One pass through the stages: a time stamp ahead of the first and one after each."""

    def __init__(self, stages: Sequence[str], device: torch.device, *, external: bool = False):
        """Args: external: stamped inside a capture the events become nodes of the graph, and each replay sets them."""
        self.stages = tuple(stages)
        self._events = None
        self._times = [0.0] * (len(stages) + 1)
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True, external=external) for _ in self._times]

    def begin(self) -> None:
        """Stamp the beginning, on the current stream."""
        self._stamp(0)

    def end(self, stage: str) -> None:
        """Stamp the end of a stage, which is the beginning of the next."""
        self._stamp(1 + self.stages.index(stage))

    def read(self) -> list[float] | None:
        """Milliseconds of each stage, or None while the device is not through.

        Of a lap in a graph whose next replay is under way the stamps are of two passes, and a stage would end before it
        began: that gives None, too.
        """
        if self._events is None:
            times = [1e3 * (end - start) for start, end in zip(self._times, self._times[1:], strict=False)]
        elif all(event.query() for event in self._events):
            times = [start.elapsed_time(end) for start, end in zip(self._events, self._events[1:], strict=False)]
        else:
            return None
        return times if min(times) >= 0 else None

    def _stamp(self, index: int) -> None:
        if self._events is None:
            self._times[index] = time.perf_counter()
        else:
            self._events[index].record()


class StageTimer:
    """Times of stages over the latest passes.

    Make a lap, stamp it in the stream's order, `watch` it, and call `collect` now and then; what the device has not
    passed by then is read another time. An external lap is made and stamped once, inside the capture of a graph, and
    watched after each replay.
    """

    def __init__(self, stages: Sequence[str], device: torch.device | str):
        self.stages, self.device = tuple(stages), torch.device(device)
        self._watched: dict[int, Lap] = {}
        self._samples: deque[list[float]] = deque(maxlen=_WINDOW)

    def lap(self, *, external: bool = False) -> Lap:
        """A lap to stamp."""
        return Lap(self.stages, self.device, external=external)

    def watch(self, lap: Lap) -> None:
        """Read a lap, stamped to its end, when the device is through. Of an unread lap the later pass counts."""
        self._watched[id(lap)] = lap

    def collect(self) -> None:
        """Read the laps that are over."""
        for key, lap in list(self._watched.items()):
            times = lap.read()
            if times is not None:
                self._samples.append(times)
                del self._watched[key]

    def percentiles(self, points: Sequence[int] = PERCENTILES) -> dict[str, dict[str, float]]:
        """Milliseconds of each stage at percentiles of the laps collected; empty before the first."""
        if not self._samples:
            return {}
        by_stage = zip(*self._samples, strict=True)
        return {stage: percentiles(times, points) for stage, times in zip(self.stages, by_stage, strict=True)}

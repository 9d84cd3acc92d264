"""What a device did when, from a torch profile: time by kernel, and the gaps between kernels."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from moss_runtime.observe.ranges import Range

if TYPE_CHECKING:
    from rich.table import Table

_NAME_WIDTH = 80
_RANGES = {name.value for name in Range}


@dataclasses.dataclass(frozen=True)
class Span:
    """One run of a kernel, from `start` to `end` in microseconds."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """All runs of a kernel.

    Attributes:
        name: of the kernel; on a CPU of the operator.
        count: runs.
        total: microseconds; what runs side by side counts twice.
        added: microseconds of it in which nothing ran that had begun earlier. A kernel of a dependent launch begins
            early and waits: this is what it costs.
        share: of the time with something running, by `added`.
        gaps: microseconds in which nothing ran just ahead of it.
        moved: bytes that all runs must read and write; None if that is not known.
    """

    name: str
    count: int
    total: float
    added: float
    share: float
    gaps: float
    moved: float | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Kernels, the costliest first; microseconds from the first to the last, with something running, and each gap."""

    kernels: list[KernelTime]
    elapsed: float
    busy: float
    gaps: list[float]

    @classmethod
    def of(cls, spans: Iterable[Span], moved: Mapping[str, float] | None = None) -> "Timeline":
        """Spans of any order, which may overlap; moved: bytes of a run, of the kernels of which they are known."""
        moved = moved or {}
        spans = sorted(spans, key=lambda span: (span.start, span.end))
        times: dict[str, list[float]] = defaultdict(list)
        before: dict[str, float] = defaultdict(float)
        added: dict[str, float] = defaultdict(float)
        gaps, end = [], spans[0].start if spans else 0.0
        for span in spans:
            if span.start > end:
                gaps.append(span.start - end)
                before[span.name] += gaps[-1]
            added[span.name] += max(0.0, span.end - max(end, span.start))
            end = max(end, span.end)
            times[span.name].append(span.end - span.start)
        elapsed = end - spans[0].start if spans else 0.0
        busy = elapsed - sum(gaps)
        kernels = [
            KernelTime(
                name,
                count=len(runs),
                total=sum(runs),
                added=added[name],
                share=added[name] / (busy or 1.0),
                gaps=before[name],
                moved=len(runs) * moved[name] if name in moved else None,
            )
            for name, runs in times.items()
        ]
        return cls(sorted(kernels, key=lambda kernel: (-kernel.added, -kernel.total)), elapsed, busy, gaps)

    def summary(self) -> str:
        """Elapsed and busy time, and the gaps, in one line."""
        longest, mean = max(self.gaps, default=0.0), sum(self.gaps) / max(len(self.gaps), 1)
        return (
            f"{self.elapsed:.0f} us, busy {self.busy:.0f} us in {sum(kernel.count for kernel in self.kernels)} runs, "
            f"{len(self.gaps)} gaps of {mean:.2f} us, the longest {longest:.1f} us"
        )

    def table(self, rows: int, what: str = "kernel") -> "Table":
        """A table of the costliest for a `rich` console."""
        from rich.table import Table

        table = Table(what)
        for name in ("count", "time, us", "each, us", "added, us", "GB/s", "share", "gaps ahead, us"):
            table.add_column(name, justify="right")
        for kernel in self.kernels[:rows]:
            each = kernel.total / kernel.count
            rate = "-" if kernel.moved is None or not kernel.added else f"{kernel.moved / kernel.added / 1e3:.1f}"
            numbers = (f"{kernel.total:.1f}", f"{each:.2f}", f"{kernel.added:.1f}", rate)
            numbers += (f"{kernel.share:.1%}", f"{kernel.gaps:.1f}")
            table.add_row(kernel.name[:_NAME_WIDTH], str(kernel.count), *numbers)
        return table


def device_spans(profile: torch.profiler.profile, device: torch.device) -> list[Span]:
    """Kernels and copies of a profile; on a CPU the operators that no other operator called."""
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU

    def counts(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
        if event.device_type != kind or event.name in _RANGES or event.is_user_annotation:
            return False
        return device.type == "cuda" or event.cpu_parent is None or event.cpu_parent.name in _RANGES

    return [
        Span(event.name, event.time_range.start, event.time_range.end) for event in profile.events() if counts(event)
    ]

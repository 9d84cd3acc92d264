"""What a running program shows of itself: metrics, profiler ranges, stage timings."""

from moss_runtime.observe.metrics import FallbackReason, Metrics
from moss_runtime.observe.percentiles import percentiles
from moss_runtime.observe.ranges import Range, annotate, torch_ranges
from moss_runtime.observe.timing import Lap, StageTimer

__all__ = ["FallbackReason", "Lap", "Metrics", "Range", "StageTimer", "annotate", "percentiles", "torch_ranges"]

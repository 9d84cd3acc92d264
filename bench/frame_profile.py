"""Where the time of a graph's replay goes: by kernel, and between kernels."""

from collections import defaultdict
from collections.abc import Callable

import torch

_SHOWN = 16
_WARM_UP = 20


def print_profile(name: str, run: Callable[[], None]) -> None:
    """Captures `run` and prints what one replay of it spends in each kernel, and in gaps between kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.no_grad():
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    for _ in range(_WARM_UP):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    busy, gaps, end = 0.0, [], spans[0][0]
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for start, stop, kernel in spans:
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        by_kernel[kernel].append(stop - start)
    print(
        f"{name}: {end - spans[0][0]:.0f} us, busy {busy:.0f} us in {len(spans)} kernels, "
        f"{len(gaps)} gaps of {sum(gaps) / max(len(gaps), 1):.2f} us, the longest {max(gaps, default=0):.1f} us",
        flush=True,
    )
    for kernel, times in sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:_SHOWN]:
        print(f"    {sum(times):9.1f} us {len(times):5d} x {sum(times) / len(times):8.2f}  {kernel[:90]}", flush=True)

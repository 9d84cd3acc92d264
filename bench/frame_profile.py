"""Where the time of a graph's replay goes: by kernel, and between kernels."""

from collections.abc import Callable

import torch
from rich.console import Console

from moss_runtime.observe.timeline import Timeline, device_spans

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
    timeline = Timeline.of(device_spans(profile, torch.device("cuda")))
    console = Console()
    console.print(f"{name}: {timeline.summary()}", timeline.table(_SHOWN))

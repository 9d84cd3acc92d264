"""Where the time of a backbone step goes: each linear by tile, the attention by launch, the step by kernel."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from contextlib import contextmanager
from unittest import mock

import torch

from bench.codec_profile import replay_seconds
from bench.harness import COPY_BYTES_PER_SECOND
from moss_kernels import _launch
from moss_kernels.backbone_linear import split_count, triton_kernel
from moss_kernels.backbone_linear.tiles import Tile, row_block, tile_for
from moss_kernels.paged_attention import cuda_kernel as cuda_attention
from moss_kernels.paged_attention import triton_kernel as attention_kernel
from moss_kernels.rms_norm import rms_norm
from moss_kernels.testing.backbone import PagedInputs
from moss_runtime.graphs.backbone_step import BackboneStep

# Enough weights, over 240 MB, that the first is not in L2 when its turn comes again.
COLD_BYTES = 240e6
SHARED_BYTES = 232_448
MULTIPROCESSORS = 132

# What might beat the tiles in use. Those that leave a last wave, or do not fit, are left out for a shape.
_TILES = (
    Tile(64, 32, 4, 9, True),
    Tile(64, 32, 4, 12, True),
    Tile(64, 64, 4, 4, True),
    Tile(64, 64, 4, 5, True),
    Tile(64, 64, 4, 6, True),
    Tile(64, 64, 4, 8, True),
    Tile(64, 64, 4, 12, True),
    Tile(64, 128, 4, 2, True),
    Tile(64, 128, 4, 3, True),
    Tile(64, 128, 4, 4, True),
    Tile(64, 128, 4, 5, True),
    Tile(64, 128, 4, 6, True),
    Tile(64, 256, 4, 2, True),
    Tile(64, 256, 4, 3, True),
    Tile(128, 32, 4, 9, True),
    Tile(128, 32, 8, 9, True),
    Tile(128, 64, 4, 4, True),
    Tile(128, 64, 8, 4, True),
    Tile(128, 64, 8, 6, True),
    Tile(128, 64, 8, 8, True),
    Tile(128, 128, 8, 2, True),
    Tile(128, 128, 8, 3, True),
    Tile(128, 128, 8, 4, True),
    Tile(256, 32, 8, 8, True),
    Tile(256, 64, 8, 4, True),
    Tile(256, 64, 8, 5, True),
    Tile(64, 64, 4, 6, False),
    Tile(64, 128, 4, 4, False),
    Tile(128, 64, 8, 4, False),
)
_SPLITS = {"qkv": (1, 2), "gate_up": (1,), "o": (2, 4, 8), "down": (2, 4, 8)}
_ATTENTION = tuple(
    {"min_split": split, "programs": programs, "warps": warps, "stages": stages}
    for split, programs, warps, stages in (
        (128, None, 4, 3), (128, None, 4, 2), (128, None, 4, 4), (128, None, 8, 3), (128, 16, 4, 3), (128, 1, 4, 3),
        (64, None, 4, 3), (256, None, 4, 3), (256, 1, 4, 3), (256, 4, 4, 3), (512, None, 4, 3), (512, None, 4, 4),
    )
)  # fmt: skip
_ATTENTION_PARTS = (1, 2, 4, 8, 16)
_PREFETCH = (0, 4_000_000, 8_000_000, 16_000_000)


@contextmanager
def dependent_launch(enabled: bool):
    """Switches programmatic dependent launch for what is launched or captured inside."""
    with mock.patch.object(_launch, "enabled", enabled):
        yield


def fits(tile: Tile, rows: int, n: int, splits: int) -> bool:
    """Whether all programs of a launch are on the multiprocessors at once."""
    shared = tile.stages * (tile.outputs + row_block(rows)) * tile.block_k * 2 + 2048
    programs = -(-n // tile.outputs) * splits
    return programs <= MULTIPROCESSORS * (SHARED_BYTES // shared)


def linear_times(step: BackboneStep, name: str, rows: int) -> dict[tuple[Tile, int], float]:
    """Microseconds of one linear by (tile, splits); every layer's weights in turn, so that they are cold."""
    weights = [getattr(layer, name) for layer in step.layers]
    weights = weights[: max(2, int(COLD_BYTES / weights[0].nbytes) + 1)]
    (n, k), device = weights[0].shape, weights[0].device
    x, times = torch.randn(rows, k, device=device).bfloat16(), {}
    gated = name == "gate_up"
    for splits in _SPLITS[name]:
        out = torch.empty(splits, rows, n, device=device)
        if splits == 1:
            out = torch.empty(rows, n // 2 if gated else n, dtype=x.dtype, device=device)
        for tile in dict.fromkeys((tile_for(rows, n, k // splits, x.dtype), *_TILES)):
            if k // splits % tile.block_k or not fits(tile, rows, n, splits):
                continue

            def run(tile=tile, out=out) -> None:
                for weight in weights:
                    triton_kernel.backbone_linear_triton(x, weight, gated, out, tile=tile)

            times[tile, splits] = timed(run, len(weights))
    return times


def timed(run: Callable[[], None], repeats: int) -> float:
    """Microseconds of one repeat; infinite, with a line that says why, where the kernel cannot be launched."""
    try:
        return 1e6 * replay_seconds(run) / repeats
    except Exception as error:  # a tile that needs more shared memory or registers than there are
        print(f"    {str(error).splitlines()[0][:100]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")


def print_linears(step: BackboneStep, name: str, rows: int) -> None:
    """The fastest tiles of a linear, the library, and the tile in use."""
    weights = [getattr(layer, name) for layer in step.layers]
    n, k = weights[0].shape
    x = torch.randn(rows, k, device=weights[0].device).bfloat16()

    def library() -> None:
        for weight in weights:
            torch.mm(x, weight.T)

    times = linear_times(step, name, rows)
    chosen = tile_for(rows, n, k // split_count(n, k), x.dtype), split_count(n, k)
    floor = 1e6 * weights[0].nbytes / COPY_BYTES_PER_SECOND
    print(f"{name} B{rows}: floor {floor:.1f}, library {timed(library, len(weights)):.1f}, "
          f"in use {times.get(chosen, float('nan')):.1f} us {tuple(chosen[0])}", flush=True)  # fmt: skip
    for (tile, splits), microseconds in sorted(times.items(), key=lambda item: item[1])[:8]:
        rate = weights[0].nbytes / microseconds / 1e6
        print(f"    {microseconds:8.2f} us {rate:5.2f} TB/s  splits {splits} {tuple(tile)}", flush=True)


def print_attention(step: BackboneStep, kv: PagedInputs) -> None:
    """The attention of a layer by launch configuration."""
    config, rows = step.backbone.config, len(kv.row_map)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    scratch, layers, layer = step.buffers.attention, len(kv.key_pages), step.layers[0]
    qkv, out = step.buffers.qkv[:rows].normal_(), step.buffers.attended[:rows]
    token = (qkv, layer.q_norm, layer.k_norm, config.rms_norm_eps, step.cos_sin)
    times = {}
    launches = [(attention_kernel.paged_attention_triton, options) for options in _ATTENTION]
    launches += [(cuda_attention.paged_attention_cuda, {"parts": parts}) for parts in _ATTENTION_PARTS]
    for launch, options in launches:

        def run(launch=launch, options=options) -> None:
            for index in range(layers):
                launch(*token, *kv.layer(index), out, scratch.partials, scratch.arrived, **options)

        times[launch.__name__, *options.items()] = timed(run, layers)
    moved = 4 * rows * int(kv.positions.max()) * heads[1] * heads[2]
    print(f"paged_attention B{rows}: floor {1e6 * moved / COPY_BYTES_PER_SECOND:.1f} us", flush=True)
    for (name, *options), microseconds in sorted(times.items(), key=lambda item: item[1])[:8]:
        print(f"    {microseconds:8.2f} us {moved / microseconds / 1e6:5.2f} TB/s  {name} {dict(options)}", flush=True)


def print_norm(step: BackboneStep, rows: int) -> None:
    """The kernel between linears."""
    buffers, layer, count = step.buffers, step.layers[0], len(step.layers)
    x, normed = buffers.x[:rows], buffers.normed[:rows]
    partials = buffers.partials[: split_count(*layer.o.shape) * x.numel()].view(-1, *x.shape)

    def run() -> None:
        for _ in range(count):
            rms_norm(x, partials, layer.mlp_norm, 1e-6, normed)

    print(f"rms_norm B{rows}: {timed(run, count):.2f} us", flush=True)


def print_step(step: BackboneStep, kv: PagedInputs) -> None:
    """The whole step, with dependent launch off and on, and how much it prefetches; then its kernels."""
    rows = len(kv.row_map)
    embeds = torch.randn(rows, step.backbone.config.hidden_size, device=kv.row_map.device).bfloat16()

    def run() -> None:
        step.step(embeds, kv, kv.positions, kv.row_map, kv.active)

    with dependent_launch(False):
        print(f"backbone_step B{rows}: {timed(run, 1000):.3f} ms", flush=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    linears, times = itertools.cycle(("qkv", "o", "gate_up", "down")), defaultdict(list)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for kernel in sorted(kernels, key=lambda event: event.time_range.start):
        label = next(linears) if "backbone_linear" in kernel.name else kernel.name[:60]
        times[label].append(kernel.time_range.elapsed_us())
    for label, spans in times.items():
        print(f"    {sum(spans):9.1f} us {len(spans):5d} x {sum(spans) / len(spans):8.2f}  {label}", flush=True)
    with dependent_launch(True):
        for prefetch in _PREFETCH:
            with mock.patch.object(triton_kernel, "PREFETCH_BYTES", prefetch):
                print(f"    dependent launch, prefetch {prefetch / 1e6:.0f} MB: {timed(run, 1000):.3f} ms", flush=True)
        with mock.patch.object(attention_kernel, "PREFETCH", False):
            print(f"    dependent launch, no pages prefetched: {timed(run, 1000):.3f} ms", flush=True)


def print_all(step: BackboneStep, kv: PagedInputs, batches: Iterable[int], parts: Container[str]) -> None:
    """Everything for some batch sizes, or only "step", "attention" or "linear"; tells how long each part took."""
    start = time.perf_counter()
    for batch in batches:
        if "step" in parts:
            print_step(step, kv.take(range(batch)))
            print_norm(step, batch)
        if "attention" in parts:
            print_attention(step, kv.take(range(batch)))
    print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
    for batch in batches if "linear" in parts else ():
        for name in ("gate_up", "down", "qkv", "o"):
            print_linears(step, name, batch)
        print(f"[{time.perf_counter() - start:.0f} s]", flush=True)

"""Where the time of a codec chunk goes: by stage, by kernel, and by tile of each linear."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from moss_kernels.codec_linear import cuda_kernel, scratch_size
from moss_kernels.codec_linear.tiles import Tile, tile_for
from moss_kernels.codec_linear.triton_kernel import codec_linear_triton
from moss_runtime.graphs import CodecChunk

REPLAYS = 20

# What might beat the tiles in use.
_TILES = (
    Tile("tile", 64, 32, 128, 4, 4),
    Tile("tile", 64, 64, 128, 4, 3),
    Tile("tile", 64, 128, 64, 4, 4),
    Tile("tile", 128, 64, 64, 4, 4),
    Tile("persistent", 64, 128, 64, 4, 4, resident=2),
    Tile("persistent", 128, 128, 64, 8, 3, resident=2),
    Tile("persistent", 128, 128, 64, 8, 4),
    Tile("persistent", 128, 128, 128, 8, 3),
    Tile("persistent", 128, 256, 64, 8, 3),
    Tile("persistent", 128, 256, 64, 8, 4),
    Tile("library"),
)
# Neither tiles far larger than the output nor tiles by the ten thousand.
_MOST_TILES = 20_000
_COMPILING = 8


def replay_seconds(run: Callable[[], None]) -> float:
    """Median time of a graph's replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in itertools.pairwise(events))
    return times[REPLAYS // 2] / 1e3


def print_profile(step: CodecChunk, batch: int, frames: int) -> None:
    """Time of each stage as a graph of its own, then of each kernel in replays of the whole step."""
    print(f"B{batch}/T{frames}: {1e3 * replay_seconds(lambda: step.compute(batch, frames)):.3f} ms")
    rotations = step._rotations(batch, frames)
    for index, stage in enumerate(step.stages):
        tokens = rotations[index].shape[1]
        x = step.buffers.stream(index, batch * tokens, stage.config.d_model)
        valid = step.buffers.stage_valid[index, :batch]
        run = partial(step._stage, index, x, rotations[index], valid)
        time = 1e3 * replay_seconds(run)
        print(f"  stage {index + 1} ({stage.config.layers} layers, {batch * tokens} rows): {time:.3f} ms")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.compute(batch, frames)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.device_time_total)
    for kernel in kernels:
        total, count = kernel.device_time_total / REPLAYS, kernel.count / REPLAYS
        print(f"  {total:10.1f} us {count:6.0f} x {total / count:8.2f}  {kernel.key[:90]}")


def print_tiles(
    step: CodecChunk, shapes: Iterable[tuple[int, int]], only_rows: list[int] | None, only: list[str] | None
) -> None:
    """Time of each linear by tile, the weights of all layers that share its shape in turn (so that they are cold).

    `only`: names of linears with their number of inputs, as in `linear1:768`.
    """
    linears: dict[tuple[str, int, int], list[dict]] = defaultdict(list)
    rows: dict[int, set[int]] = defaultdict(set)
    for stage in step.stages:
        rows[stage.config.d_model] |= {batch * frames * stage.tokens_per_frame for batch, frames in shapes}
        for layer in stage.layers:
            for name, arguments in vars(layer).items():
                linears[name, *arguments["weight"].shape].append(arguments)
    for (name, n, k), weights in linears.items():
        for m in sorted(only_rows or rows[n if name in ("out_proj", "linear2") else k]):
            if not only or f"{name}:{k}" in only:
                # Many rows evict the weights by themselves, and take their time.
                _print_tiles_of(name, m, n, k, weights if m < 1000 else weights[:4])


def _print_tiles_of(name: str, m: int, n: int, k: int, weights: list[dict]) -> None:
    normed, device = "norm_sums" in weights[0], weights[0]["weight"].device
    x = torch.randn(m, k, device=device).bfloat16()
    out = torch.randn(m, n, device=device).bfloat16()
    scratch = torch.empty(scratch_size(m, n, k, norm=normed), dtype=x.dtype, device=device)
    chosen, times = tile_for(m, n, k, x.dtype), {}

    def run(implementation, weights, **options) -> None:
        for arguments in weights:
            names = ("norm_weight", "norm_bias", "norm_sums")
            norm = [arguments.get(part) for part in names]
            gelu, scale = name == "linear1", arguments.get("scale")
            implementation(x, arguments["weight"], *norm, gelu, scale, scratch, out, **options)

    def compiled(tile: Tile) -> bool:
        try:
            run(codec_linear_triton, weights[:1], tile=tile)
        except Exception as error:  # a tile that needs more shared memory than there is
            print(f"    {tuple(tile)}: {str(error).splitlines()[0][:80]}")
            return False
        return True

    def measured(implementation, **options) -> float:
        return 1e6 * replay_seconds(lambda: run(implementation, weights, **options)) / len(weights)

    tiles = [tile for tile in dict.fromkeys((chosen, *_TILES)) if tile.block_m < 2 * max(m, 9)]
    tiles = [tile for tile in tiles if tile.kind == "library" or tile.count(m, n) <= _MOST_TILES]
    with ThreadPoolExecutor(_COMPILING) as pool:
        tiles = [tile for tile, works in zip(tiles, pool.map(compiled, tiles), strict=True) if works]
    for tile in tiles:
        times[tuple(tile)] = measured(codec_linear_triton, tile=tile)
    parts = weights[0]
    if cuda_kernel.takes(x, parts["weight"], parts.get("norm_weight"), name == "linear1", parts.get("scale"), out):
        times["cuda"] = measured(cuda_kernel.codec_linear_cuda)
    floor = max(2 * (n * k + m * k + m * n) / 4.25e12, 2 * m * n * k / 775e12) * 1e6
    print(f"{name} M={m} N={n} K={k}: floor {floor:.2f}, chosen {times[tuple(chosen)]:.2f} us")
    for tile, time in sorted(times.items(), key=lambda item: item[1])[:5]:
        print(f"    {time:8.2f} us  {tile}", flush=True)

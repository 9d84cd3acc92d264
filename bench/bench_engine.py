"""The engine under load at full size: `python -m bench.bench_engine`.

Weights are random and never stop; a request has a prompt of 150 tokens and 60 to 120 frames, and each client sends one
after the other. Cases of an engine that streams, and of one that does not (`/offline`): under a load that has lasted
for a while; from the moment when all clients come at once to an idle engine (`/cold`); and with 3 s of reference audio
in each request, half of it known (`/clone`). A rate's p50 is all audio of the window by the window's length, its p20
and p80 are of tenths of the window.

Nothing is timed before requests under load have the codes that they have alone, bit for bit, and their streamed audio
is as close to float32 offline decoding as that of the eager bfloat16 codec, within 1 dB.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch

from bench import harness
from bench.bench_codec_chunk import snr
from bench.plot_engine import plot
from moss_runtime.commands.bench_engine import FRAMES, PROMPT_TOKENS, RandomPrompts, Workload, for_load
from moss_runtime.engine import AudioChunk, Engine, EngineConfig
from moss_runtime.engine.load import Load, measure
from moss_runtime.errors import UserError
from moss_runtime.observe import percentiles
from moss_runtime.random_weights import codec_config, random_codec, random_model

CONCURRENCY = (1, 4, 16, 64, 128)
TARGETS = (1, 64, 128)
CLONES = 64
MODES = {"streaming-balanced": "", "streaming-low-latency": "/low_latency", "offline-fast": "/offline"}
WARM_S, COLD_S = 1.5, 1.2
# Audio seconds per second if all stages ran one after the other, each at its floor.
FLOORS = {64: 1130.0, 128: 1460.0}
MAX_SNR_LOSS_DB = 1.0
EXACT_DB = 110.0
CHECKED = 6
MAX_GROWTH_MIB = 64


class Bench:
    """Models, the codec in float32 to compare with, and an engine over them."""

    def __init__(self, size: str, device: str, *, clones: bool = False):
        """Args: clones: load the codec's encoder, too."""
        self.device = torch.device(device)
        # On a CPU bits depend on the batch in bfloat16.
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.exact = random_codec(codec_config(size), device=device, encoder=clones)
        self.exact.encoder = torch.nn.ModuleList()
        self.codec = random_codec(codec_config(size), device=device, dtype=dtype, encoder=clones)
        self.model = random_model(size, device=device, dtype=dtype)

    def engine(self, mode: str, rows: int, **changes) -> Engine:
        """A warm engine; its start is printed."""
        start = time.perf_counter()
        config = dataclasses.replace(for_load(EngineConfig.from_mode(mode), rows), **changes)
        engine = Engine(config, self.model, self.codec, RandomPrompts(self.model.config))
        engine.runtime.warm_up()
        middle, free = time.perf_counter(), self._free()
        engine.stage.warm_up()
        self.codec_graph_bytes = free - self._free()
        if engine.encoder is not None:
            engine.encoder.warm_up()
        print(f"engine of {rows} rows, {mode}: {middle - start:.1f} s, codec {time.perf_counter() - middle:.1f} s")
        return engine

    def check(self, engine: Engine, concurrency: int, *, clone: bool = False) -> None:
        """Raises AssertionError unless codes and audio under load are what they should be."""
        requests = Workload(engine, clone=clone)
        tried = [requests(index) for index in range(CHECKED)]
        alone = [engine.submit(request).result(60) for request in tried]
        others = [engine.submit(requests(CHECKED + index)) for index in range(concurrency - CHECKED)]
        handles = [engine.submit(request) for request in tried]
        chunks = [list(handle) for handle in handles]
        for other in others:
            other.result(60)
        vocab, samples = self.model.config.audio_vocab_size, self.codec.config.samples_per_frame
        for index, (handle, first, parts) in enumerate(zip(handles, alone, chunks, strict=True)):
            result = handle.result()
            assert result.error is None and result.frames == tried[index].max_frames, f"{result}"
            assert ((result.codes >= 0) & (result.codes < vocab)).all(), f"request {index}: a code is out of range"
            same = (result.codes == first.codes).all(1).long().cumprod(0).sum().item()
            assert same == result.frames, f"request {index}: codes under load differ from frame {same} on"
            assert sum(part.pcm.shape[1] for part in parts) == result.frames * samples
        self._check_audio([handle.result().codes for handle in handles], chunks)

    @torch.no_grad()
    def _check_audio(self, codes: Sequence[torch.Tensor], chunks: Sequence[Sequence[AudioChunk]]) -> None:
        """Of all requests together: of one alone, roundings that are worth the same differ by half a decibel and more,
        since a random model repeats codes, and with them their errors."""
        codes = [of_request[None].long().to(self.device) for of_request in codes]
        exact, eager = (torch.cat([codec.decode(c)[0] for c in codes], 1) for codec in (self.exact, self.codec))
        pcm = numpy.concatenate([chunk.pcm for of_request in chunks for chunk in of_request], axis=1)
        # Nobody is asked for more than the rounding of float32 allows.
        limit = min(snr(eager, exact), EXACT_DB) - MAX_SNR_LOSS_DB
        reached = snr(torch.from_numpy(pcm).to(self.device), exact)
        assert reached >= limit, f"SNR to float32 offline must be at least {limit:.2f} dB, got {reached:.2f} dB"
        print(f"codes as alone; audio {reached:.2f} dB to float32 offline, at least {limit:.2f} asked", flush=True)

    def load(
        self, engine: Engine, concurrency: int, *, warm_s: float, window_s: float, clone: bool = False
    ) -> tuple[Load, float]:
        """What clients see, and by how many MiB the memory of the device has grown meanwhile.

        Args:
            engine: without other requests.
            concurrency: number of clients.
            warm_s: seconds under load before the window; 0: all clients come at its beginning, with whole requests.
            window_s: length of the window.
            clone: with reference audio.
        """
        requests = Workload(engine, clients=concurrency if warm_s else 0, clone=clone, seed=concurrency)
        engine.stats.reset()
        free = self._free()
        load = measure(engine, requests, concurrency=concurrency, warm_s=warm_s, window_s=window_s)
        return load, (free - self._free()) / 2**20

    def memory_row(self, engine: Engine) -> dict[str, object]:
        """Weights of the codec's decoder and quantizer, state, buffers and graphs."""
        chunk = engine.stage.chunk
        decoding = self.codec.decoder, self.codec.quantizer
        weights = [tensor for module in decoding for tensor in module.state_dict().values()]
        state = [tensor for rings in chunk.slots.stages for tensor in (rings.keys, rings.values)]
        parts = {
            "weights": sum(tensor.nbytes for tensor in weights) + chunk.table.nbytes,
            "state": sum(tensor.nbytes for tensor in state) + chunk.slots.offsets.nbytes,
            "buffers": chunk.buffers.size_in_bytes + engine.stage.audio.nbytes,
            "graphs": self.codec_graph_bytes,
        }
        mib = {name: round(size / 2**20, 1) for name, size in parts.items()}
        total = round(sum(parts.values()) / 2**20, 1)
        values = {"p20": total, "p50": total, "p80": total, "unit": "MiB"}
        return _described({"case": f"engine/C{engine.config.rows}/memory", **values}, {"parts_mib": mib})

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0


def rows_of(load: Load, engine: Engine, suffix: str, growth_mib: float) -> list[dict[str, object]]:
    """Result rows of a load: the rate (or, of one client, the first audio), then the times clients see."""
    summary, shot, case = load.summary(), engine.snapshot(), f"engine/C{load.concurrency}{suffix}"
    calls = max(shot["codec_calls"], 1)
    conditions = summary | {
        "mode": engine.config.mode,
        "stream": engine.config.stream,
        "overlap": engine.config.overlap,
        "dtype": "bfloat16",
        "prompt_tokens": PROMPT_TOKENS,
        "frames_of_a_request": list(FRAMES),
        "rate_p50": "audio of the window by its length; p20 and p80 of tenths",
        "frames": sum(count for _, count in load.frames),
        "audio_seconds": round(load.audio_seconds, 2),
        "sampling_rate": shot["sampling_rate"],
        "channels": shot["channels"],
        "graph_hits": {name: round(graph["hit_ratio"], 4) for name, graph in shot["graphs"].items()},
        "reference_hits": shot["reference_hits"],
        "reference_misses": shot["reference_misses"],
        "frame_ms_p50": {name: round(times["p50"], 3) for name, times in shot["frame_ms"].items()},
        "stage_seconds": {name: round(value, 3) for name, value in shot["stage_seconds"].items()},
        "codec_streams_per_call": round(shot["codec_rows"] / calls, 1),
        "codec_padding_frames": shot["codec_padding_frames"],
        "memory_growth_mib": round(growth_mib, 1),
    }
    times = {"first_audio": load.first_audio, "gap": load.gaps, "latency": load.latency}
    rows = [_row(f"{case}/{name}", [1e3 * value for value in values], "ms") for name, values in times.items() if values]
    if load.concurrency == 1 and not suffix:
        rows[0]["case"] = case
    rate = f"{case}/rate" if load.concurrency == 1 and not suffix else case
    rows.append(_row(rate, load.rates(), "audio_s_per_s") | {"p50": round(load.audio_seconds / load.window, 3)})
    if load.concurrency in FLOORS:
        rows[-1] |= {
            "floor": FLOORS[load.concurrency],
            "ratio_to_floor": round(FLOORS[load.concurrency] / rows[-1]["p50"], 2),
        }
    return [_described(row, conditions) for row in rows]


def _row(case: str, values: list[float], unit: str) -> dict[str, object]:
    found = {name: round(value, 3) for name, value in percentiles(values, harness.PERCENTILES).items()}
    return {"case": case, **found, "unit": unit}


def _described(row: dict[str, object], conditions: dict[str, object]) -> dict[str, object]:
    return {**row, "impl": "runtime", "conditions": conditions}


def save(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    harness.save([row | harness.environment() for row in rows], options)


def cases(mode: str, options: argparse.Namespace) -> list[tuple[str, int]]:
    """Kind ("/cold", "" or "/clone") and clients of each case of a mode that is wanted, in the order of measurement."""
    kinds = [("", n) for n in options.concurrency]
    if mode == "streaming-balanced" and CLONES in options.concurrency:
        kinds.append(("/clone", CLONES))
    if not options.quick:
        kinds += [("/cold", n) for n in options.concurrency]
    suffix = MODES[mode] + "/turns" * options.turns
    return [(kind, n) for kind, n in kinds if harness.wanted(f"engine/C{n}{suffix}{kind}", options)]


def run(options: argparse.Namespace) -> None:
    wanted = {mode: found for mode in options.modes if (found := cases(mode, options))}
    bench = Bench("full", "cuda", clones=any(kind == "/clone" for found in wanted.values() for kind, _ in found))
    for mode, found in wanted.items():
        changes = {"overlap": not options.turns} | dict(options.set)
        with bench.engine(mode, max(n for _, n in found), **changes) as engine:
            run_mode(bench, engine, found, options)
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def run_mode(bench: Bench, engine: Engine, found: list[tuple[str, int]], options: argparse.Namespace) -> None:
    """Checks an engine, then measures its cases."""
    suffix = MODES[engine.config.mode] + "/turns" * options.turns
    try:
        bench.check(engine, min(engine.config.rows, 64), clone=any(kind == "/clone" for kind, _ in found))
    except AssertionError as error:
        if not options.dry_run:
            raise
        print(f"NOT TO BE RECORDED, the check failed: {error}", flush=True)
    for kind, concurrency in found:
        times = {"warm_s": WARM_S, "window_s": options.seconds}
        if kind == "/cold":
            times = {"warm_s": 0, "window_s": COLD_S}
        load, growth = bench.load(engine, concurrency, clone=kind == "/clone", **times)
        print(load.summary(), flush=True)
        assert growth <= MAX_GROWTH_MIB, f"the run took {growth:.0f} MiB more"
        save(rows_of(load, engine, suffix + kind, growth), options)
    if engine.config.rows == 128 and not suffix:
        save([bench.memory_row(engine)], options)


def smoke(options: argparse.Namespace) -> None:
    """Checks a tiny engine on the CPU and puts a short load on it."""
    bench = Bench("tiny", "cpu", clones=True)
    for mode in options.modes:
        with bench.engine(mode, 4) as engine:
            if engine.config.stream:
                bench.check(engine, 8, clone=True)
            load, growth = bench.load(engine, 3, warm_s=0.1, window_s=2)
            for row in rows_of(load, engine, "", growth):
                print(f"{row['case']:32} {row['p50']:10.2f} {row['unit']}", flush=True)


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY), help="clients (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only the cases that have a target, for a shorter time")
    modes = {"nargs": "+", "choices": MODES, "default": ["streaming-balanced", "offline-fast"]}
    parser.add_argument("--modes", **modes, help="of the engine (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="length of a measurement (%(default)s)")
    parser.add_argument("--turns", action="store_true", help="frames and codec calls one after the other")
    parser.add_argument("--set", nargs="+", type=setting, default=[], metavar="NAME=NUMBER", help="engine settings")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows in --results, and measure nothing")
    options = parser.parse_args()
    if options.quick:
        options.concurrency, options.modes = list(TARGETS), [EngineConfig.mode]
        options.seconds = min(options.seconds, 5)
    nothing = not any(cases(mode, options) for mode in options.modes)
    if nothing or "runtime" not in (options.impl or ["runtime"]):
        return
    if options.plot:
        try:
            plot(options.results, options.plot)
        except (UserError, ValueError) as error:
            parser.error(str(error))
    elif options.smoke:
        smoke(options)
    else:
        run(options)


def setting(text: str) -> tuple[str, float]:
    """A setting of the engine as on the command line: an integer where it has no point."""
    name, _, value = text.partition("=")
    return name, float(value) if "." in value else int(value)


if __name__ == "__main__":
    main()

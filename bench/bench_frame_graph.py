"""Time of whole frames and of prefill at full size: `python -m bench.bench_frame_graph`.

Weights are random and never stop, every row holds 512 tokens of random keys and values, and the graph holds one frame.
Nothing is timed before prefill and step have come as close to float32 as the eager bfloat16 model, up to a factor of 2.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch

from bench import harness
from bench.baselines_frame import TorchFrame
from bench.frame_profile import print_profile
from moss_kernels import SamplingParams
from moss_kernels.prefill_attention import TILE
from moss_runtime.graphs.capture import bucket_for
from moss_runtime.graphs.prefill import cut
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model.tts import MossTTS
from moss_runtime.random_weights import random_model, random_prompts

CONTEXT = 512
MARGIN = 64  # tokens that rows may grow by
BATCHES = (1, 8, 16, 32, 64, 128)
PREFILLS = ((1, 150), (8, 150))
TARGETS = (1, 64, 128)
MULTI = 8


class Bench:
    """A runtime whose rows are all live, and its baselines."""

    def __init__(self, model: MossTTS, rows: int, context: int):
        self.model, self.context = model, context
        most = max(context + MARGIN, max(length for _, length in PREFILLS))
        self.runtime = Runtime(model, rows=rows, max_tokens=most, max_frames=MARGIN)
        self.frame, self.prefill = self.runtime.frame, self.runtime.prefill
        self.pool, self.kv = self.runtime.pool, self.runtime.kv

    def admit(self, row: int, position: int) -> None:
        """A request that may grow to the end of its pages in the next free row, which is `row`."""
        params = SamplingParams(repetition_penalty=1.1)
        assert self.pool.acquire(row, params, seed=row, max_frames=MARGIN, position=position).row == row
        self.kv.reserve(row, self.kv.max_tokens)

    @torch.no_grad()
    def check(self) -> None:
        """Raises AssertionError unless prefill and step are at most twice as far from float32 as the eager model."""
        prompts = random_prompts(self.model, [self.context + 1, self.context // 2])
        for row, prompt in enumerate(prompts):
            self.admit(row, len(prompt) - 1)
            for piece in cut(row, prompt, self.prefill.piece):
                self.prefill.run([piece])
        self.frame.launch([0, 1])
        got = self.frame.step.buffers.normed[:2].float()
        exact_model = copy.deepcopy(self.model).float()
        exact, eager = (last_hidden(model, prompts) for model in (exact_model, self.model))
        error, allowed = ((hidden - exact).square().mean(1).sqrt() for hidden in (got, eager))
        print(f"error of the hidden states {error.tolist()}, of eager bf16 {allowed.tolist()}", flush=True)
        assert (error <= 2 * allowed).all(), f"error of the hidden states {error}, of eager bf16 {allowed}"

    def occupy(self) -> None:
        """A request in every row, random keys and values."""
        self.kv.key_pages[:, :-1].normal_(std=1.5)
        self.kv.value_pages[:, :-1].normal_()
        for row in range(2, self.pool.null_row):
            self.admit(row, self.context)
        self.pool.staging.normal_()

    def run(self, batch: int, frames: int) -> None:
        """Frames of `batch` rows that begin at the same context each time."""
        self.pool.positions[:batch].fill_(self.context)
        self.pool.frames[:batch].zero_()
        self.frame.compute(batch, frames)

    def check_codes(self, batch: int) -> None:
        """Raises AssertionError unless every row has continued with valid codes."""
        codes, continues = self.frame.buffers.codes[:batch], self.frame.buffers.continues[:batch]
        valid = (codes >= 0) & (codes < self.model.config.audio_vocab_size)
        assert valid.all() and continues.all(), f"{valid.sum()} of {valid.numel()} codes are valid"

    def frame_case(self, batch: int, frames: int) -> harness.Case:
        local = self.model.config.local
        position = local.n_embd * (local.n_embd + 2 * local.n_inner) + self.model.config.audio_vocab_size * local.n_embd
        numbers = self.linears + 3 * local.n_embd**2 + self.model.config.n_vq * position
        kv = batch * self.context * 2 * self.kv.key_pages[:, 0, :, 0].numel()
        name = f"frame_graph/B{batch}/ctx{self.context}" + (f"/n{frames}" if frames > 1 else "")
        conditions = {"dtype": str(self.model.dtype), "context": self.context, "l2": "what the frame before left"}
        size = self.model.dtype.itemsize
        return harness.Case(name, "ms", size * (numbers + kv), batch * (2 * numbers), frames, conditions)

    def prefill_case(self, batch: int, length: int) -> harness.Case:
        tokens = batch * (length - 1)
        conditions = {
            "dtype": str(self.model.dtype),
            "bucket": self._bucket(batch, length),
            "l2": "the weights of the pass",
        }
        flops = 2 * tokens * self.linears
        return harness.Case(
            f"prefill/B{batch}/L{length}", "ms", self.model.dtype.itemsize * self.linears, flops, 1, conditions
        )

    @property
    def linears(self) -> int:
        """Numbers in the backbone's linears."""
        return sum(
            w.numel() for layer in self.frame.step.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )

    def frame_variants(self, batch: int, frames: int, baseline: bool) -> list[harness.Variant]:
        self.frame.fill_inputs(range(batch), batch)
        run, check_after = partial(self.run, batch, frames), partial(self.check_codes, batch)
        variants = [harness.Variant("runtime", run, lambda: None, check_after)]
        if baseline:
            torch_frame = TorchFrame(self.model, self.frame.step, batch, self.context)
            variants.append(harness.Variant("torch_graph", torch_frame.run, lambda: None))
        return variants

    def prefill_variants(self, batch: int, length: int) -> list[harness.Variant]:
        prompts = random_prompts(self.model, [length] * batch)
        pieces = [cut(row, prompt, self.prefill.piece)[0] for row, prompt in enumerate(prompts)]
        self.prefill.run(pieces)
        rows = torch.stack(prompts)[:, :-1].to(self.model.device)

        def eager() -> None:
            self.model.transformer(self.model.embed(rows), self.model.transformer.new_cache(batch))

        runs = {"runtime": partial(self.prefill.compute, self._bucket(batch, length)), "torch_graph": eager}
        return [harness.Variant(name, run, lambda: None) for name, run in runs.items()]

    def _bucket(self, batch: int, length: int) -> int:
        return bucket_for(batch * TILE * -(-(length - 1) // TILE), self.prefill.buckets)


def last_hidden(model: MossTTS, prompts: list[torch.Tensor]) -> torch.Tensor:
    """[B, H] float32. Hidden state of each prompt's last row by the eager model."""
    hidden = []
    for prompt in prompts:
        embeds = model.embed(prompt.to(model.device))[None]
        hidden.append(model.transformer(embeds, model.transformer.new_cache(1))[0, -1].float())
    return torch.stack(hidden)


def measure(options: argparse.Namespace) -> None:
    model = random_model("full", device="cuda", dtype=torch.bfloat16)
    bench = Bench(model, max(options.batch), CONTEXT)
    assert bench.frame.decoder is not None, "the CUDA kernel of the local transformer is missing: run `make lib`"
    bench.check()
    bench.occupy()
    seconds = 0.2 if options.quick else 0.5
    for batch in options.batch:
        for frames in (1, MULTI) if batch in TARGETS else (1,):
            case = bench.frame_case(batch, frames)
            harness.bench(case, partial(bench.frame_variants, batch, frames, frames == 1), options, seconds=seconds)
    for batch, length in PREFILLS:
        make = partial(bench.prefill_variants, batch, length)
        harness.bench(bench.prefill_case(batch, length), make, options, seconds=seconds)
    if options.case is None:
        launches(bench)


def profile() -> None:
    """Prints where frames and prefill passes spend their time."""
    bench = Bench(random_model("full", device="cuda", dtype=torch.bfloat16), max(TARGETS), CONTEXT)
    bench.check()
    bench.occupy()
    for batch in TARGETS:
        bench.frame.fill_inputs(range(batch), batch)
        print_profile(f"frame_graph/B{batch}/ctx{CONTEXT}", partial(bench.run, batch, 1))
    for batch, length in PREFILLS:
        for variant in bench.prefill_variants(batch, length):
            print_profile(f"prefill/B{batch}/L{length}, {variant.impl}", variant.run)


def launches(bench: Bench) -> None:
    """Prints the time of a frame as the runtime launches it: n launches against one launch of n frames."""
    for batch in TARGETS:
        graphs = {}
        for frames in (1, MULTI):
            bench.frame.graphs.shapes = frozenset({(batch, frames)})
            bench.frame.graphs.capture()
            graphs[frames] = MULTI // frames
        times: dict[int, list[float]] = {frames: [] for frames in graphs}
        stream = bench.frame.graphs.stream
        for _ in range(20):
            for frames, count in graphs.items():
                with torch.cuda.stream(stream):
                    bench.pool.positions[:batch].fill_(bench.context)
                    bench.pool.frames[:batch].zero_()
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    events[0].record()
                    for _ in range(count):
                        bench.frame.launch(range(batch), frames)
                    events[1].record()
                torch.cuda.synchronize()
                times[frames].append(events[0].elapsed_time(events[1]) / MULTI)
        one, many = (sorted(times[frames])[10] for frames in (1, MULTI))
        print(f"launches/B{batch}: {one:.3f} ms a frame in {MULTI} launches, {many:.3f} ms in one", flush=True)


def start_up() -> None:
    """Prints seconds until the first request can be served, with a cold and with a warm kernel cache."""
    code = "import bench.bench_frame_graph as b; b.time_start_up()"
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            print(f"start_up/{name}: {output.stdout.strip() or output.stderr[-2000:]}", flush=True)


def time_start_up() -> None:
    """Prints JSON: seconds and MiB of making and warming up a runtime of 64 rows, without loading weights."""
    model = random_model("full", device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    runtime = Runtime(model, rows=64, max_tokens=1024, max_frames=512)
    made = time.perf_counter()
    runtime.warm_up()
    sets = {"frame": runtime.frame.graphs, "prefill": runtime.prefill.graphs}
    report = {"made_s": made - start, "total_s": time.perf_counter() - start, "graphs": runtime.graph_count}
    report |= {f"{name}_s": graphs.seconds for name, graphs in sets.items()}
    report |= {f"{name}_mib": graphs.bytes / 2**20 for name, graphs in sets.items()}
    print(json.dumps({key: round(value, 2) for key, value in report.items()}))


def smoke(options: argparse.Namespace) -> None:
    bench = Bench(random_model("tiny", device="cpu", dtype=torch.bfloat16, layers=1), 4, 24)
    bench.check()
    bench.occupy()
    for frames in (1, 2):
        harness.bench(bench.frame_case(3, frames), partial(bench.frame_variants, 3, frames, baseline=True), options)
    harness.bench(bench.prefill_case(2, 20), partial(bench.prefill_variants, 2, 20), options)


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes of the frame graph")
    parser.add_argument("--quick", action="store_true", help="only the cases that have a target, for a shorter time")
    parser.add_argument("--profile", action="store_true", help="time by kernel instead of rows")
    parser.add_argument("--start-up", action="store_true", help="time of the start instead")
    options = parser.parse_args()
    options.batch = options.batch or (TARGETS if options.quick else BATCHES)
    if options.smoke:
        smoke(options)
    elif options.start_up:
        start_up()
    elif options.profile:
        profile()
    else:
        measure(options)


if __name__ == "__main__":
    main()

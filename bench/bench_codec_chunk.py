"""Time of one codec chunk at full size: `python -m bench.bench_codec_chunk`.

Weights and codes are random, every row decodes T frames, and the graph holds one chunk. `full` rings have been
written round; `young` streams are at their first frame in every replay. A variant is timed only if its audio, from a
fresh state on, is as close to float32 offline decoding as the eager bfloat16 codec, within 1 dB.
"""

import argparse
import json
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from bench import codec_profile, harness
from bench.baselines_codec import TorchOpsChunk
from moss_kernels import _launch
from moss_kernels.codec_linear import prefetch, triton_kernel
from moss_kernels.codec_linear.arguments import CodecLinearArguments
from moss_kernels.testing.codec_weights import codec_weights
from moss_runtime.graphs import CodecChunk
from moss_runtime.graphs.codec_chunk import FRAMES
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.state.codec_slots import CodecSlots

ROOT = Path(__file__).parents[1]
BATCHES = (1, 8, 64, 128)
TARGETS = ((1, 1), (1, 15), (64, 1), (64, 15), (128, 15))
IMPLS = ("runtime", "torch_graph")
FULL_RING_FRAMES = 10_000
MAX_SNR_LOSS_DB = 1.0
CHECKED_FRAMES = 16


def random_codec(config: CodecConfig, device: str) -> Codec:
    """A float32 codec without its encoder."""
    with torch.device("meta"):
        codec = Codec(config)
    codec.encoder = torch.nn.ModuleList()
    shapes = {name: tensor.shape for name, tensor in codec.state_dict().items()}
    codec.load_state_dict(codec_weights(shapes, 0, device=device), assign=True)
    return codec.eval()


class Bench:
    """Both codecs, one set of slots, and the chunk steps that share them."""

    def __init__(self, config: CodecConfig, device: str, shapes: Iterable[tuple[int, int]], dtype: torch.dtype):
        self.exact = random_codec(config, device)
        self.codec = random_codec(config, device)
        self.codec.decoder.to(dtype)
        batch, frames = (max(sizes) for sizes in zip(*shapes, strict=True))
        stages = [module.config for module in self.codec.decoder if hasattr(module, "config")]
        self.slots = CodecSlots(stages, batch, dtype=dtype, device=device)
        for rings in self.slots.stages:
            rings.keys[:, :-1].normal_()
            rings.values[:, :-1].normal_()
        common = {"slots": self.slots, "max_batch": batch, "frames": (frames,)}
        self.steps = {
            "runtime": CodecChunk(self.codec, **common),
            "runtime_fp32_residual": CodecChunk(self.codec, **common, residual_dtype=torch.float32),
            "torch_graph": TorchOpsChunk(self.codec, **common),
        }
        self.rates = torch.tensor([[s.tokens_per_frame] for s in self.steps["runtime"].stages], device=device)

    def prepare(self, step: CodecChunk, frames: int) -> None:
        """Full rings, all rows live."""
        step.buffers.codes.random_(0, self.codec.config.codebook_size)
        step.buffers.slots.copy_(torch.arange(len(step.buffers.slots)))
        step.buffers.valid.fill_(frames)
        self.slots.offsets[:, :-1] = FULL_RING_FRAMES * self.rates

    def run(self, impl: str, batch: int, frames: int, *, young: bool) -> None:
        if young:
            self.slots.offsets.zero_()
        self.steps[impl].compute(batch, frames)

    @torch.no_grad()
    def check(self, impl: str, batch: int, frames: int) -> None:
        """Raises AssertionError if the audio of the first and the last row is further from float32 than allowed."""
        step, config = self.steps[impl], self.codec.config
        device, chunks = self.codec.device, -(-CHECKED_FRAMES // frames)
        generator = torch.Generator(device).manual_seed(0)
        shape = (batch, chunks * frames, config.codebooks)
        codes = torch.randint(config.codebook_size, shape, generator=generator, device=device)
        for slot in range(batch):
            step.reset(slot)
        parts = [step(part, range(batch), [frames] * batch) for part in codes.split(frames, dim=1)]
        rows = [0, batch - 1]
        expected = self.exact.decode(codes[rows])
        limit = snr(self.codec.decode(codes[rows]), expected) - MAX_SNR_LOSS_DB
        reached = snr(torch.cat(parts, dim=2)[rows], expected)
        assert reached >= limit, f"SNR to float32 offline must be at least {limit:.2f} dB, got {reached:.2f} dB"
        print(f"{impl}: {reached:.2f} dB to float32 offline, at least {limit:.2f} asked", flush=True)
        self.prepare(step, frames)

    def case(self, batch: int, frames: int, *, young: bool) -> harness.Case:
        """Bytes: weights, and rings that are not empty; operations: linears, and attention over what rings hold."""
        step, size = self.steps["runtime"], self.codec.dtype.itemsize
        numbers, flops, rings = 0, 0, 0
        for stage in step.stages:
            config, tokens = stage.config, frames * stage.tokens_per_frame
            layer = config.d_model * (4 * config.d_model + 2 * config.feedforward_size)
            linears = config.layers * layer + stage.output_proj.numel()
            seen = tokens / 2 if young else config.context
            numbers += linears
            flops += 2 * linears * tokens + int(4 * config.layers * config.d_model * seen * tokens)
            rings += 0 if young else 2 * config.layers * config.d_model * config.context
        conditions = {"dtype": str(self.codec.dtype), "rings": "young" if young else "full", "l2": "the chunk's own"}
        name = f"codec_chunk/B{batch}/T{frames}" + ("/young" if young else "")
        return harness.Case(name, "ms", size * (numbers + batch * rings), batch * flops, 1, conditions)

    def variants(self, impls: Iterable[str], batch: int, frames: int, *, young: bool) -> list[harness.Variant]:
        return [
            harness.Variant(
                impl,
                torch.no_grad()(partial(self.run, impl, batch, frames, young=young)),
                partial(self.check, impl, batch, frames),
            )
            for impl in impls
        ]


def snr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to noise in dB."""
    return (10 * torch.log10(expected.square().sum() / (actual - expected).square().sum())).item()


@contextmanager
def switched(options: argparse.Namespace):
    """Kernel switches for the whole run: what is left out, and from how many rows products go to cuBLAS."""
    own = triton_kernel.codec_linear_triton

    def by_rows(*arguments) -> None:
        given = CodecLinearArguments(*arguments)
        products_fit = given.out.dtype == given.weight.dtype or given.scale is not None
        alone = given.partials is None and given.normed is None
        if options.library_rows is not None and len(given.x) >= options.library_rows and products_fit and alone:
            triton_kernel.codec_linear_library(*given[:9])
        else:
            own(*arguments)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton_kernel, "codec_linear_triton", by_rows))
        if "prefetch" in options.without:
            stack.enter_context(mock.patch.object(prefetch, "enabled", False))
        if "dependent_launch" in options.without:
            stack.enter_context(mock.patch.object(_launch, "enabled", False))
        yield


def parse() -> argparse.Namespace:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the shapes that have a target")
    parser.add_argument("--shapes", nargs="+", metavar="BxT", help="only these, as in 1x1 64x15")
    parser.add_argument("--young", action="store_true", help="also streams whose rings are empty")
    parser.add_argument("--profile", action="store_true", help="time by stage and by kernel instead of rows")
    parser.add_argument("--variants", action="store_true", help="time of each linear by tile instead of rows")
    parser.add_argument("--rows", nargs="+", type=int, help="with --variants: these numbers of rows")
    parser.add_argument(
        "--linears", nargs="+", help="with --variants: only these, by name and inputs, as in linear1:768"
    )
    parser.add_argument("--without", nargs="+", default=[], choices=["prefetch", "dependent_launch"])
    parser.add_argument("--library-rows", type=int, help="products of at least so many rows go to cuBLAS")
    return parser.parse_args()


def main() -> None:
    options = parse()
    shapes = TARGETS if options.quick or options.variants else [(b, t) for b in BATCHES for t in FRAMES]
    if options.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    if options.smoke:
        return smoke(options)
    config = CodecConfig.from_dict(json.loads((ROOT / "tests/manifests/codec_config.json").read_text()))
    bench = Bench(config, "cuda", shapes, torch.bfloat16)
    with switched(options), torch.no_grad():
        if options.variants:
            return codec_profile.print_tiles(bench.steps["runtime"], shapes, options.rows, options.linears)
        for (batch, frames), young in ((s, y) for s in shapes for y in ([False, True] if options.young else [False])):
            if options.profile:
                bench.prepare(bench.steps["runtime"], frames)
                codec_profile.print_profile(bench.steps["runtime"], batch, frames)
                continue
            make = partial(bench.variants, options.impl or IMPLS, batch, frames, young=young)
            harness.bench(bench.case(batch, frames, young=young), make, options)
    return None


def smoke(options: argparse.Namespace) -> None:
    config = json.loads((ROOT / "tests/golden/codec/config.json").read_text())
    bench = Bench(CodecConfig.from_dict(config), "cpu", [(3, 4)], torch.bfloat16)
    for young in (False, True):
        make = partial(bench.variants, bench.steps, 3, 4, young=young)
        harness.bench(bench.case(3, 4, young=young), make, options)


if __name__ == "__main__":
    main()

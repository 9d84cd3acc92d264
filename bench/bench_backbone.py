"""Time of one decode step of the backbone and of its parts at full size: `python -m bench.bench_backbone`.

Weights and tokens are random, every row holds 512 tokens, and a graph holds all layers, so that nothing is found in L2
that a step would not find there. Times of linears and of the attention are those of one layer. A variant is timed only
if it errs at most twice as much as the eager modules in bfloat16, both against float64. `--quick` prints a table of
launch configurations instead.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import backbone_profile, harness
from bench.baselines_backbone import TorchGraphBackbone, attend, cached_tokens, eager_hidden
from moss_kernels.backbone_linear import backbone_linear, split_count
from moss_kernels.kv_append import kv_append_reference
from moss_kernels.paged_attention import (
    AttentionScratch,
    cuda_kernel,
    paged_attention_reference,
    triton_kernel,
)
from moss_kernels.testing.backbone import FULL_BACKBONE, PagedInputs, backbone_weights
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.model.backbone import Backbone
from moss_runtime.model.config import BackboneConfig

BATCHES = (1, 64, 128)
CONTEXT = 512
PARTS = ("linear", "attention", "step")
LINEARS = ("qkv", "o", "gate_up", "down")
SMOKE_SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
SMOKE_SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
CHECKED_ROWS = 2


class Bench:
    """A backbone, its step, and pages for the largest batch."""

    def __init__(self, sizes: dict[str, int], device: str, max_batch: int, context: int):
        config = BackboneConfig(**FULL_BACKBONE | sizes)
        with torch.device("meta"):
            self.backbone = Backbone(config)
        shapes = {name: tensor.shape for name, tensor in self.backbone.state_dict().items()}
        weights = backbone_weights(shapes, 0, device=device, dtype=torch.bfloat16)
        self.backbone.load_state_dict(weights, assign=True)
        self.backbone.requires_grad_(False)
        self.step = BackboneStep(self.backbone, max_batch=max_batch)
        self.context, self.device = context, device
        self.kv = PagedInputs.make(
            [(context, True)] * max_batch,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            layers=config.num_hidden_layers,
            max_tokens=config.max_position_embeddings,
            dtype=torch.bfloat16,
            device=device,
        )
        self.config = config

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device=self.device).bfloat16()

    def norms(self) -> tuple[Tensor, Tensor, float]:
        return self.step.layers[0].q_norm, self.step.layers[0].k_norm, self.config.rms_norm_eps

    def rows(self, batch: int) -> PagedInputs:
        return self.kv.take(range(batch))

    def case(self, name: str, unit: str, numbers: int, flops: int, repeats: int = 1) -> harness.Case:
        conditions = {"dtype": "bfloat16", "l2": "what the layer before left", "context": self.context}
        return harness.Case(name, unit, 2 * numbers, flops, repeats, conditions)

    def linear(self, name: str, batch: int) -> tuple[harness.Case, list[harness.Variant]]:
        """One linear of every layer; o and down leave their sums, as the step asks for."""
        weights = [getattr(layer, name) for layer in self.step.layers]
        (n, k), gated = weights[0].shape, name == "gate_up"
        x, splits = self.normal(batch, k), split_count(n, k)
        out = torch.empty(batch, n // 2 if gated else n, dtype=x.dtype, device=x.device)
        if name in ("o", "down"):
            out = torch.empty(splits, batch, n, device=x.device)

        def own(weight: Tensor) -> Tensor:
            backbone_linear(x, weight, out, gate_up=gated)
            return out.sum(0) if out.dim() == 3 else out

        def library(weight: Tensor) -> Tensor:
            if not gated:
                return F.linear(x, weight)
            gate, up = TorchGraphBackbone.gate_up(x, weight)
            return F.silu(gate) * up

        def exact(weight: Tensor) -> Tensor:
            product = F.linear(x.double(), weight.double())
            return F.silu(product[:, 0::2]) * product[:, 1::2] if gated else product

        def run(compute: Callable[[Tensor], object]) -> None:
            for weight in weights:
                compute(weight)

        def launch(weight: Tensor) -> None:
            backbone_linear(x, weight, out, gate_up=gated)

        def check(compute: Callable[[Tensor], Tensor]) -> None:
            require_accurate(compute(weights[0]), exact(weights[0]), library(weights[0]))

        variants = [
            harness.Variant("cuda", partial(run, launch), partial(check, own)),
            harness.Variant("torch_graph", partial(run, library), partial(check, library)),
        ]
        numbers = n * k + x.numel() + batch * n
        return self.case(f"backbone_linear/{name}/B{batch}", "us", numbers, 2 * batch * n * k, len(weights)), variants

    def attention(self, batch: int) -> tuple[harness.Case, list[harness.Variant]]:
        """A new token in every layer; the baseline's queries and keys are normalised, rotated and stored already."""
        kv, config = self.rows(batch), self.config
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        qkv = self.normal(batch, (heads[0] + 2 * heads[1]) * heads[2])
        scratch = AttentionScratch.allocate(batch, *heads, qkv.device)
        out = torch.empty(batch, heads[0] * heads[2], dtype=qkv.dtype, device=qkv.device)
        token = (qkv, *self.norms(), self.step.cos_sin)
        after = dataclasses.replace(kv, positions=kv.positions + 1)

        def own(layer: int, attention: Callable[..., None]) -> Tensor:
            attention(*token, *kv.layer(layer), out, scratch.partials, scratch.arrived)
            return out

        kernels = {"reference": partial(torch.ops.moss.paged_attention, settled=False)}
        if qkv.is_cuda:
            kernels = {"triton": triton_kernel.paged_attention_triton, "cuda": cuda_kernel.paged_attention_cuda}
        own_variants = {name: partial(own, attention=attention) for name, attention in kernels.items()}

        q = torch.empty_like(out)
        for layer in range(config.num_hidden_layers):
            kv_append_reference(*token, *kv.layer(layer), q)
        stored = [cached_tokens(after, row) for row in range(batch)]
        keys, values = (torch.stack(part, 1) for part in zip(*stored, strict=True))
        grouped = q.unflatten(1, (heads[0], heads[2]))

        def library(layer: int) -> Tensor:
            return attend(grouped, keys[layer], values[layer])

        def run(compute: Callable[[int], Tensor]) -> None:
            for layer in range(config.num_hidden_layers):
                compute(layer)

        def check(compute: Callable[[int], Tensor]) -> None:
            wide_token = [x.double() if torch.is_tensor(x) else x for x in token]
            wide_q = q.double()
            kv_append_reference(*wide_token, *(pages.double() for pages in kv.layer()[:2]), *kv.layer()[2:], wide_q)
            exact = attend(wide_q.view(grouped.shape), keys[0].double(), values[0].double())
            eager = torch.empty_like(out)
            paged_attention_reference(*token, *kv.layer(), eager)
            require_accurate(compute(0), exact, eager)

        computes = own_variants | {"torch_graph": library}
        variants = [harness.Variant(name, partial(run, f), partial(check, f)) for name, f in computes.items()]
        numbers = batch * self.context * 2 * heads[1] * heads[2] + qkv.numel() + out.numel()
        flops = 4 * batch * self.context * heads[0] * heads[2]
        name = f"paged_attention/B{batch}/ctx{self.context}"
        return self.case(name, "us", numbers, flops, config.num_hidden_layers), variants

    def whole(self, batch: int) -> tuple[harness.Case, list[harness.Variant]]:
        """All of a step."""
        kv, embeds = self.rows(batch), self.normal(batch, self.config.hidden_size)
        baseline = TorchGraphBackbone(self.step, kv)

        def own() -> Tensor:
            return self.step.step(embeds, kv, kv.positions, kv.row_map, kv.active)

        def library() -> Tensor:
            return baseline.run(embeds)

        def check(compute: Callable[[], Tensor]) -> None:
            hidden, rows = compute(), range(min(batch, CHECKED_ROWS))
            exact, eager = (
                torch.stack([eager_hidden(self.backbone, kv, embeds, row, dtype) for row in rows])
                for dtype in (torch.float64, torch.bfloat16)
            )
            require_accurate(hidden[: len(rows)], exact, eager)

        variants = [harness.Variant("runtime", own, partial(check, own))]
        variants.append(harness.Variant("torch_graph", library, partial(check, library)))
        weights = sum(getattr(layer, name).numel() for layer in self.step.layers for name in LINEARS)
        stored = 2 * batch * self.context * self.config.num_hidden_layers * kv.key_pages[0, 0, :, 0].numel()
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        flops = 2 * batch * weights + 2 * group * stored
        return self.case(f"backbone_step/B{batch}/ctx{self.context}", "ms", weights + stored, flops), variants

    def cases(
        self, batches: Iterable[int], parts: Iterable[str] = PARTS
    ) -> Iterable[tuple[harness.Case, list[harness.Variant]]]:
        for batch in batches:
            if "linear" in parts:
                yield from (self.linear(name, batch) for name in LINEARS)
            if "attention" in parts:
                yield self.attention(batch)
            if "step" in parts:
                yield self.whole(batch)


def require_accurate(actual: Tensor, exact: Tensor, eager: Tensor) -> None:
    """Raises AssertionError unless the root mean square error is at most twice that of the eager result."""
    error, allowed = ((x.double() - exact.double()).square().mean().sqrt().item() for x in (actual, eager))
    assert error <= 2 * allowed + 1e-9, f"error {error:.3e}, that of eager modules {allowed:.3e}"


@torch.no_grad()
def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a table of launch configurations instead of rows")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="batch sizes (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to time (%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        for case, variants in Bench(SMOKE_SIZES, "cpu", 3, 20).cases([1, 3]):
            harness.bench(case, lambda made=variants: made, options)
        return
    bench = Bench({}, "cuda", max(options.batch), CONTEXT)
    if options.quick:
        backbone_profile.print_all(bench.step, bench.kv, options.batch, options.parts)
        return
    for case, variants in bench.cases(options.batch, options.parts):
        harness.bench(case, lambda made=variants: made, options)


if __name__ == "__main__":
    main()

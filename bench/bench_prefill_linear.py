"""Time of the backbone's linears over the tokens of whole prompts: `python -m bench.bench_prefill_linear`.

One prompt and eight prompts of 160 tokens, beside cuBLAS. Weights are random, and of several layers, so that none is
found in L2. A variant is timed only if it errs at most twice as much as the library in bfloat16, both against float64.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.bench_backbone import require_accurate
from moss_kernels.backbone_linear import split_count
from moss_kernels.prefill_linear import prefill_linear
from moss_runtime.graphs.prefill import WHOLE_ROWS

TOKENS = (160, 1280)
# (N, K) of each.
FULL = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
SMOKE = {"qkv": (48, 64), "o": (32, 64), "gate_up": (96, 64), "down": (32, 2048)}
# Enough weights, over 240 MB, that the first is not in L2 when its turn comes again.
COLD_BYTES = 240e6


def linear(
    name: str, n: int, k: int, rows: int, weights: int, device: str
) -> tuple[harness.Case, list[harness.Variant]]:
    """One linear with each of several weights; o and down as prefill asks for them."""
    gated, into_stream = name == "gate_up", name in ("o", "down")
    x = torch.randn(rows, k, device=device).bfloat16()
    layers = [(torch.randn(n, k, device=device) * k**-0.5).bfloat16() for _ in range(weights)]
    added = into_stream and rows >= WHOLE_ROWS
    out = torch.zeros(rows, n // 2 if gated else n, dtype=x.dtype, device=device)
    if into_stream and not added:
        out = torch.empty(split_count(n, k), rows, n, device=device)

    def launch(weight: Tensor) -> None:
        prefill_linear(x, weight, out, gate_up=gated, add=added)

    def own(weight: Tensor) -> Tensor:
        out.zero_()
        launch(weight)
        return out.sum(0) if out.dim() == 3 else out

    def plain(dtype: torch.dtype, weight: Tensor) -> Tensor:
        product = F.linear(x.to(dtype), weight.to(dtype))
        return F.silu(product[:, 0::2]) * product[:, 1::2] if gated else product

    library, exact = (partial(plain, dtype) for dtype in (torch.bfloat16, torch.float64))

    def run(compute: Callable[[Tensor], object]) -> None:
        for weight in layers:
            compute(weight)

    def check(compute: Callable[[Tensor], Tensor]) -> None:
        require_accurate(compute(layers[0]), exact(layers[0]), library(layers[0]))

    conditions = {"dtype": "bfloat16", "l2": "cold weights"}
    numbers = n * k + x.numel() + rows * n // (1 + gated)
    case = harness.Case(f"prefill_linear/{name}/B{rows}", "us", 2 * numbers, 2 * rows * n * k, weights, conditions)
    variants = [harness.Variant("cuda", partial(run, launch), partial(check, own))]
    return case, [*variants, harness.Variant("torch_graph", partial(run, library), partial(check, library))]


@torch.no_grad()
def main() -> None:
    options = harness.argument_parser(__doc__).parse_args()
    device, sizes, tokens = ("cpu", SMOKE, (5,)) if options.smoke else ("cuda", FULL, TOKENS)
    for rows in tokens:
        for name, (n, k) in sizes.items():
            weights = 1 if options.smoke else int(COLD_BYTES / (2 * n * k)) + 1
            case, variants = linear(name, n, k, rows, weights, device)
            harness.bench(case, lambda made=variants: made, options)


if __name__ == "__main__":
    main()

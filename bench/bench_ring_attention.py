"""Time of the ring ops of one codec layer: `python -m bench.bench_ring_attention`.

A graph holds twelve layers with rings of their own, so that 64 streams find them in memory, not in L2; times are those
of one layer. `young` streams are at their first token. The baseline gathers the rings by slot for torch's attention.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F

from bench import harness
from bench.codec_profile import replay_seconds
from moss_kernels import _library
from moss_kernels.ring_attention import (
    cuda_kernel,
    ring_attention_reference,
    ring_visibility,
    rotate_interleaved,
    triton_kernel,
)
from moss_kernels.ring_kv_write import ring_kv_write_reference
from moss_kernels.testing.compare import implementation, require_equal
from moss_kernels.testing.ring import CODEC_STAGES, RING_CASES, RingCase, RingInputs

LAYERS = 12
L2_BYTES = 60e6


def attend_gathered(inputs: RingInputs, visible: torch.Tensor, out: torch.Tensor) -> None:
    """`ring_attention` with torch's scaled_dot_product_attention over gathered rings, which must be finite.

    Args:
        visible: [B, 1, T, C + T] bool. Computed once for all layers.
    """
    qkv, cos_sin, ring_k, ring_v, slots, *_ = inputs.step
    heads, index = ring_k.shape[1], slots.long()
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    q, k = (rotate_interleaved(x, cos_sin).transpose(1, 2) for x in (q, k))
    keys, values = torch.cat((ring_k[index], k), 2), torch.cat((ring_v[index], v.transpose(1, 2)), 2)
    out.copy_(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible).transpose(1, 2).flatten(2))


def visible_keys(inputs: RingInputs) -> torch.Tensor:
    size = {"tokens": inputs.qkv.shape[1], "capacity": inputs.ring_k.shape[2], "window": inputs.window}
    return ring_visibility(inputs.slots, inputs.valid, inputs.offset, **size, chunk_in_ring=False)[:, None]


def _attention_variants(layers: list[RingInputs]) -> list[harness.Variant]:
    first = layers[0]
    finite = [
        dataclasses.replace(layer, ring_k=layer.ring_k.nan_to_num(), ring_v=layer.ring_v.nan_to_num())
        for layer in layers
    ]
    visible = visible_keys(first)

    def gathered(inputs: RingInputs, out: torch.Tensor) -> None:
        attend_gathered(inputs, visible, out)

    names = ["triton", "reference"] if first.qkv.is_cuda else ["reference"]
    runs = [(name, partial(_attend, implementation("ring_attention", name)), layers) for name in names]
    if first.qkv.is_cuda and _library.is_available():
        rotated = not cuda_kernel.takes(first.qkv, first.cos_sin, first.ring_k, first.window, False)
        own = [layer.rotated() for layer in layers] if rotated else layers
        name = "cuda_rotated" if rotated else "cuda"
        runs.insert(0, (name, partial(_attend, implementation("ring_attention", "cuda")), own))
    return [
        harness.Variant(name, partial(_run_attention, run, inputs), partial(_check_attention, run, inputs[0]))
        for name, run, inputs in [*runs, ("torch_sdpa", gathered, finite)]
    ]


def _attend(attention: Callable[..., None], inputs: RingInputs, out: torch.Tensor) -> None:
    attention(*inputs.step, inputs.window, False, out)


def _run_attention(run: Callable[..., None], layers: list[RingInputs]) -> None:
    out = torch.empty_like(layers[0].qkv[..., : layers[0].qkv.shape[2] // 3], memory_format=torch.contiguous_format)
    for layer in layers:
        run(layer, out)


def _check_attention(run: Callable[..., None], inputs: RingInputs) -> None:
    """Errs at most twice as much as the reference in the same dtype and one rounding, both against float32."""
    wide = {name: getattr(inputs, name).float() for name in ("qkv", "ring_k", "ring_v")}
    exact = dataclasses.replace(inputs, **wide).attend(ring_attention_reference)
    out = torch.full_like(exact, torch.nan, dtype=inputs.qkv.dtype)
    run(inputs, out)
    error = (out.float() - exact).abs().max().nan_to_num(torch.inf).item()
    allowed = 2 * (inputs.attend(ring_attention_reference).float() - exact).abs().max().item()
    allowed += torch.finfo(out.dtype).eps / 2 * exact.abs().max().item()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def _write_variants(layers: list[RingInputs]) -> list[harness.Variant]:
    names = ["reference"]
    if layers[0].qkv.is_cuda:
        names = ["cuda", "triton", "reference"] if _library.is_available() else ["triton", "reference"]

    def run(write: Callable[..., None]) -> None:
        for layer in layers:
            write(*layer.step)

    writers = [(name, implementation("ring_kv_write", name)) for name in names]
    return [
        harness.Variant(name, partial(run, write), partial(_check_write, write, layers[0])) for name, write in writers
    ]


def _check_write(write: Callable[..., None], inputs: RingInputs) -> None:
    written, expected = inputs.to(inputs.qkv.device), inputs.to(inputs.qkv.device)
    write(*written.step)
    ring_kv_write_reference(*expected.step)
    require_equal("ring_k", written.ring_k.nan_to_num(), expected.ring_k.nan_to_num())
    require_equal("ring_v", written.ring_v.nan_to_num(), expected.ring_v.nan_to_num())


def _conditions(case: RingCase, dtype: torch.dtype) -> dict[str, object]:
    rings = 2 * LAYERS * case.batch * case.heads * case.capacity * case.head_dim * dtype.itemsize
    l2 = "cold" if rings > 3 * L2_BYTES else "hot"
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "l2": l2, "window": case.capacity, "offset": case.offset, "tokens": case.tokens}


def _attention_case(case: RingCase, inputs: RingInputs) -> harness.Case:
    width, size = case.heads * case.head_dim, inputs.qkv.element_size()
    stored = min(case.offset, case.capacity - 1)
    token_bytes = 4 * width * size + case.head_dim * 4  # q, k, v, output; angles
    bytes_moved = case.batch * (case.tokens * token_bytes + 2 * stored * width * size)
    seen = sum(min(case.offset + token + 1, case.capacity) for token in range(case.tokens))
    flops = 4 * case.batch * width * seen
    conditions = _conditions(case, inputs.qkv.dtype)
    return harness.Case(f"ring_attention/{case.name}", "us", bytes_moved, flops, LAYERS, conditions)


def _write_case(case: RingCase, inputs: RingInputs) -> harness.Case:
    width, size = case.heads * case.head_dim, inputs.qkv.element_size()
    bytes_moved = case.batch * min(case.tokens, case.capacity) * (4 * width * size + case.head_dim * 4)
    conditions = _conditions(case, inputs.qkv.dtype)
    return harness.Case(f"ring_kv_write/{case.name}", "us", bytes_moved, 0, LAYERS, conditions)


def print_configs() -> None:
    """Time of one layer by launch configuration of the Triton kernel, for chunks of 15 frames; nothing is checked."""
    configs = [
        triton_kernel.Config(64, 64, 4, 3, 1),
        triton_kernel.Config(64, 64, 4, 3, 2),
        triton_kernel.Config(64, 64, 4, 2, 2),
        triton_kernel.Config(64, 32, 4, 4, 2),
        triton_kernel.Config(128, 64, 8, 3, 1),
        triton_kernel.Config(128, 64, 8, 3, 2),
        triton_kernel.Config(128, 64, 8, 3, 2, max_registers=128),
        triton_kernel.Config(128, 32, 8, 4, 2),
    ]
    for batch, layers in ((64, 3), (1, LAYERS)):
        for stage, (rate, heads, capacity) in reversed(list(enumerate(CODEC_STAGES, 1))[2:]):
            case = RingCase(f"B{batch}/T15/stage{stage}", batch, 15 * rate, heads, capacity, 123_457)
            first = case.inputs("cuda", torch.bfloat16)
            inputs = [first, *(first.to("cuda") for _ in range(layers - 1))]
            for config in configs:
                with mock.patch.object(triton_kernel, "_config", lambda dtype, tokens, config=config: config):
                    run = partial(_run_attention, partial(_attend, implementation("ring_attention", "triton")), inputs)
                    print(f"{case.name} {1e6 * replay_seconds(run) / layers:8.2f} us  {config}", flush=True)


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--configs", action="store_true", help="time by launch configuration instead of rows")
    options = parser.parse_args()
    if options.configs:
        return print_configs()
    for case in RING_CASES:
        if options.smoke:
            case = dataclasses.replace(case, batch=2, tokens=min(case.tokens, 5), capacity=7, head_dim=16)
        first = case.inputs("cpu" if options.smoke else "cuda", torch.bfloat16)
        layers = [first, *(first.to(first.qkv.device) for _ in range(LAYERS - 1))]
        pairs = ((_attention_case(case, first), _attention_variants), (_write_case(case, first), _write_variants))
        for timed, variants in pairs:
            harness.bench(timed, partial(variants, layers), options)
    return None


if __name__ == "__main__":
    main()

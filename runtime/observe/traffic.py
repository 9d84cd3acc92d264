"""Bytes that kernels must move: noted at the calls of operations, and brought to the kernels that these launch."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode

from moss_kernels.codec_linear.arguments import CodecLinearArguments
from moss_kernels.local_frame_decode.reference import LocalFrameWeights

Call = tuple[str, int]


def _all(*arguments: object) -> int:
    return sum(value.nbytes for value in arguments if isinstance(value, Tensor))


def _codec_linear(*arguments) -> int:
    given = CodecLinearArguments(*arguments)
    stream = given.out if given.scale is not None else None if given.partials is None else given.x
    no_traffic = {"norm_sums": None, "scratch": None, "moments": None}
    return _all(*given._replace(**no_traffic), stream)


def _rms_norm(x, partials, weight, eps, out) -> int:
    return _all(x, None if partials is None else x, partials, weight, out)


def _prefill_linear(x, weight, gate_up, add, out) -> int:
    return _all(x, weight, out, out if add else None)


def _kv_append(
    qkv, q_norm, k_norm, eps, cos_sin, key_pages, value_pages, table, positions, row_map, active, out
) -> int:
    return _all(qkv, out) + int(active.sum()) * _token(key_pages)


def _paged_attention(
    qkv, q_norm, k_norm, eps, cos_sin, key_pages, value_pages, table, positions, row_map, active, out, *scratch
) -> int:
    # The new token's key and value are written, those ahead of it are read.
    tokens = (positions[row_map.long()] + 1)[active].sum()
    return _all(qkv, out) + int(tokens) * _token(key_pages)


def _prefill_attention(q, key_pages, value_pages, page_tables, tiles, out) -> int:
    first, count = tiles.unbind(1)
    # Tiles of a prompt have the same pages, and the last one sees all of its keys.
    ends = torch.where(count > 0, first + count, 0)
    tokens = ends.new_zeros(len(key_pages)).scatter_reduce(0, page_tables[:, 0].long(), ends, "amax").sum()
    return _all(q, out) + int(tokens) * _token(key_pages)


def _token(pages: Tensor) -> int:
    """Key and value of a token in pages [P+1, H, Z, D]."""
    return 2 * pages.shape[1] * pages.shape[3] * pages.element_size()


def _ring_attention(
    qkv, cos_sin, ring_k, ring_v, slots, valid, offset, window, chunk_in_ring, out, write=False, settled=False
) -> int:
    token = 2 * ring_k.shape[1] * ring_k.shape[3] * ring_k.element_size()
    stored = offset[slots.long()].clamp(max=window - 1)[valid > 0].sum()
    written = valid.clamp(max=ring_k.shape[2]).sum() if write else 0
    return _all(qkv, cos_sin, out) + int(stored + written) * token


def _ring_kv_write(qkv, cos_sin, ring_k, ring_v, slots, valid, offset) -> int:
    tokens = int(valid.clamp(max=ring_k.shape[2]).sum())
    angles = 0 if cos_sin is None else 4 * ring_k.shape[3]
    return tokens * (4 * ring_k.shape[1] * ring_k.shape[3] * ring_k.element_size() + angles)


def _chunk_prologue(codes, table, slots, valid, offsets, rates, frequencies, features, stage_valid, cos_sin) -> int:
    return _all(codes, features, cos_sin) + codes.numel() * table.shape[2] * table.element_size()


def _chunk_epilogue(samples, slots, valid, stage_valid, offsets, audio) -> int:
    return _all(audio) + int(valid.sum()) * samples.shape[2:].numel() * samples.element_size()


# What an operation reads and writes, each byte once, of arguments in the order of its schema. Missing are those that
# wait for latencies and not for bytes, and those of a reference that no kernel replaces.
BYTES: dict[str, Callable[..., int]] = {
    "moss::backbone_linear": _all,
    "moss::chunk_epilogue": _chunk_epilogue,
    "moss::chunk_prologue": _chunk_prologue,
    "moss::codec_linear": _codec_linear,
    "moss::kv_append": _kv_append,
    "moss::paged_attention": _paged_attention,
    "moss::prefill_attention": _prefill_attention,
    "moss::prefill_linear": _prefill_linear,
    "moss::ring_attention": _ring_attention,
    "moss::ring_kv_write": _ring_kv_write,
    "moss::rms_norm": _rms_norm,
    "aten::mm": _all,
    "aten::addmm": _all,
}


class Traffic(TorchDispatchMode):
    """Inside, each call of an operation of BYTES is noted with its bytes; it reads lengths, so it waits for the device.

    Attributes:
        calls: name and bytes of each call.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name in BYTES:
            written = kwargs.get("out", result) if name.startswith("aten::") else None
            named = {key: value for key, value in kwargs.items() if key != "out" or written is None}
            self.calls.append((name, BYTES[name](*args, **named) + _all(written)))
        return result


def local_frame_bytes(weights: LocalFrameWeights) -> int:
    """Weights of a frame, each once at every position that it is needed at; of c_attn the rest can be looked up."""
    layer = (weights.c_proj_weight, weights.fc_in_weight, weights.fc_out_weight)
    tables = sum(table.nbytes for table in weights.audio_embeddings)
    return weights.c_attn_weight.nbytes + len(weights.audio_embeddings) * _all(*layer) + tables


def mean_bytes(calls: Iterable[Call]) -> dict[str, float]:
    """Mean bytes of a call, by name."""
    return {name: sum(sizes) / len(sizes) for name, sizes in _by_name(calls).items()}


def bytes_by_kernel(events: Iterable[FunctionEvent], calls: Iterable[Call]) -> dict[str, float]:
    """Mean bytes of a run, by kernel.

    The bytes of a call are its longest kernel's. A kernel that also runs elsewhere is left out, and so is an operation
    that was not called as often as `calls` say.

    Args:
        events: of a profile of the same work without graphs.
        calls: of `Traffic`.
    """
    noted, runs = _by_name(calls), Counter()
    found: dict[str, list[FunctionEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.time_range.start):
        runs.update(kernel.name for kernel in event.kernels)
        if event.name in noted and not _inside(event, noted):
            found[event.name].append(event)
    launched: list[Call] = []
    for name, sizes in noted.items():
        for event, size in zip(found[name], sizes, strict=False) if len(found[name]) == len(sizes) else ():
            kernels = _kernels(event)
            if kernels:
                launched.append((max(kernels, key=lambda kernel: kernel.duration).name, size))
    carried = Counter(name for name, _ in launched)
    return {name: size for name, size in mean_bytes(launched).items() if carried[name] == runs[name]}


def _by_name(calls: Iterable[Call]) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, size in calls:
        sizes[name].append(size)
    return sizes


def _inside(event: FunctionEvent, names: Iterable[str]) -> bool:
    parent = event.cpu_parent
    return parent is not None and (parent.name in names or _inside(parent, names))


def _kernels(event: FunctionEvent) -> list:
    """Kernels that a call has launched, also through other operators."""
    return [*event.kernels, *(kernel for child in event.cpu_children for kernel in _kernels(child))]

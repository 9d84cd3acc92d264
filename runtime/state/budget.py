"""The device memory of a runtime, part by part: known before anything is allocated, and measured afterwards."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moss_kernels import _library
from moss_kernels.local_frame_decode import cuda_kernel
from moss_runtime.errors import UserError
from moss_runtime.graphs.audio_feed import CHUNKS, AudioFeed
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.tts import MossTTS

if TYPE_CHECKING:
    from rich.table import Table

# What the plan allows for a captured graph, besides its activations.
GRAPH_BYTES = 4 * 2**20
HEAD_ROOM = 2**30
# Part of the table -> what makes it smaller.
PARTS = {
    "backbone weights": "dtype",
    "local weights and tables": "dtype",
    "KV cache": "rows, max_tokens, pages",
    "decode pool": "rows, max_frames",
    "codec weights": "dtype, no codec",
    "codec state": "rows, no codec",
    "graph buffers": "rows, chunks, prefill_tokens",
    "graph pools": "prefill_tokens, no graphs",
    "head-room": "head_room",
}


class MemoryBudgetError(UserError):
    """The runtime does not fit into the memory."""


class MemoryBudget:
    """What a `Runtime` takes, from configs and options alone.

    Everything but graph pools and head-room is exact: it is the sizes of the runtime's own tensors, made on the meta
    device, where they have no memory.

    Attributes:
        options: keyword arguments of `Runtime`, with the number of KV pages.
        planned: bytes of each part.
        measured: bytes of each part of a live runtime, once `measure` was called.
    """

    def __init__(
        self,
        config: ModelConfig,
        codec: CodecConfig | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        head_room: int = HEAD_ROOM,
        codec_slots: int | None = None,
        **options: Any,
    ):
        """Plans a runtime.

        Args:
            config: of the model.
            codec: of the codec, or None.
            dtype: of weights and state.
            device: where it will run; graphs and their pools are on CUDA only.
            head_room: bytes that stay free, for library workspaces and whatever else allocates.
            codec_slots: streams that the codec holds at a time; None: one for each row.
            options: keyword arguments of `Runtime`; without `pages` there are enough for all rows at `max_tokens`, and
                `fit` may take fewer.
        """
        self._arguments = {"config": config, "codec": codec, "dtype": dtype, "device": device, "head_room": head_room}
        self._arguments["codec_slots"] = codec_slots
        self._pages_are_given = options.get("pages") is not None
        runtime = _on_meta(config, codec, dtype, codec_slots, options)
        self._kv, self._feed = runtime.kv, runtime.feed
        self.options = options | {"pages": runtime.kv.pages, "prefill_tokens": runtime.prefill.max_tokens}
        self.planned = _tensor_bytes(runtime)
        self.planned["local weights and tables"] += _local_kernel_bytes(config, dtype, torch.device(device))
        self.planned["graph pools"] = _pool_bytes(config, runtime, torch.device(device), options.get("graphs", True))
        self.planned["head-room"] = head_room
        self.measured: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Bytes of all parts as planned."""
        return sum(self.planned.values())

    @property
    def least(self) -> int:
        """Bytes that it needs at least: with the pages asked for or, if none were, those of one request."""
        kv = self._kv
        pages = kv.pages if self._pages_are_given else min(kv.pages, kv.pages_for(kv.max_tokens))
        return self.total - (self.options["pages"] - pages) * self._page_bytes

    def fit(self, total_bytes: int) -> int:
        """Choose the number of KV pages, as many as are of use and fit.

        Args:
            total_bytes: memory that the runtime may take.

        Returns:
            The number of pages, which `options` and `planned` have from now on.

        Raises:
            MemoryBudgetError: it does not fit with the pages asked for, or with those of one request; the message says
                by how much, and which option frees how much.
        """
        if self.least > total_bytes:
            raise MemoryBudgetError(
                f"the runtime needs at least {_size(self.least)} of memory, and may take {_size(total_bytes)}: "
                f"{_size(self.least - total_bytes)} too much. {self._remedies()}"
            )
        without_pages = self.total - self.options["pages"] * self._page_bytes
        pages = min(self._kv.pages, (total_bytes - without_pages) // self._page_bytes)
        self.planned["KV cache"] += (pages - self.options["pages"]) * self._page_bytes
        self.options["pages"] = pages
        return pages

    def measure(self, runtime: Runtime) -> None:
        """Fill in what a live runtime takes, best after its warm-up; the head-room is what is free then."""
        self.measured = _tensor_bytes(runtime)
        sets = [part.graphs for part in (runtime.frame, runtime.prefill, runtime.mixed)]
        sets += [] if runtime.feed is None else [runtime.feed]
        self.measured["graph pools"] = sum(part.bytes for part in sets)
        device = runtime.model.device
        self.measured["head-room"] = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

    def table(self) -> "Table":
        """Parts, bytes planned and measured, and the options that make a part smaller, for `rich` to print."""
        from rich.table import Table

        table = Table("part", title=f"Memory with {self.options['pages']} KV pages")
        for column in ("planned", "measured")[: 1 + bool(self.measured)]:
            table.add_column(column, justify="right")
        table.add_column("smaller with")
        columns = [self.planned, self.measured] if self.measured else [self.planned]
        for part, knobs in PARTS.items():
            table.add_row(part, *[_size(column[part]) for column in columns], knobs)
        table.add_section()
        table.add_row("total", *[_size(sum(column.values())) for column in columns], "")
        return table

    @property
    def _page_bytes(self) -> int:
        pages = self._kv.key_pages
        return 2 * pages[:, 0].numel() * pages.itemsize

    def _remedies(self) -> str:
        """Options with smaller values, and what each frees by itself."""
        halved = {name: self.options[name] for name in ("rows", "max_tokens", "max_frames", "prefill_tokens")}
        halved["head_room"] = self._arguments["head_room"]
        if self._pages_are_given:
            halved["pages"] = self.options["pages"]
        changes = {f"{name} {value} -> {value // 2}": {name: value // 2} for name, value in halved.items() if value > 1}
        if self._arguments["dtype"] == torch.float32:
            changes["dtype bfloat16"] = {"dtype": torch.bfloat16}
        if self._feed is not None:
            changes["no codec"] = {"codec": None}
            frames = self._feed.chunk.frames
            if len(frames) > 1:
                changes[f"chunks of at most {frames[-2]} frames"] = {"chunks": frames[:-1]}
        freed = {text: self.least - self._with(change).least for text, change in changes.items()}
        order = sorted((text for text in freed if freed[text] > 0), key=freed.get, reverse=True)
        return ", ".join(f"{text} frees {_size(freed[text])}" for text in order)

    def _with(self, change: Mapping[str, Any]) -> "MemoryBudget":
        options = self.options if self._pages_are_given else self.options | {"pages": None}
        return MemoryBudget(**(self._arguments | options | change))


def _on_meta(
    config: ModelConfig,
    codec_config: CodecConfig | None,
    dtype: torch.dtype,
    codec_slots: int | None,
    options: Mapping[str, Any],
) -> Runtime:
    """The runtime without memory."""
    codec = None if codec_config is None else Codec.on_meta(codec_config, dtype)
    model = MossTTS.on_meta(config).to(dtype)
    if codec is None or codec_slots is None:
        return Runtime(model, codec, **options)
    options = dict(options)
    chunks = options.pop("chunks", CHUNKS)
    runtime = Runtime(model, **options)
    runtime.feed = AudioFeed(codec, streams=min(codec_slots, runtime.kv.rows), chunks=chunks)
    return runtime


def _tensor_bytes(runtime: Runtime) -> dict[str, int]:
    """Bytes of all of a runtime's tensors; one that several parts share counts in the first of them."""
    owners = [
        ("KV cache", [runtime.kv]),
        ("decode pool", [runtime.pool]),
        ("backbone weights", [runtime.model.transformer]),
        ("local weights and tables", [runtime.model, runtime.frame.decoder]),
    ]
    if runtime.feed is not None:
        chunk = runtime.feed.chunk
        owners += [("codec state", [chunk.slots]), ("graph buffers", [chunk.buffers]), ("codec weights", [chunk])]
    owners.append(("graph buffers", [runtime]))
    sizes, seen = dict.fromkeys(PARTS, 0), set()
    for part, roots in owners:
        for tensor in _tensors(roots, set()):
            storage = tensor.untyped_storage()
            if tensor.device == runtime.model.device and storage._cdata not in seen:
                seen.add(storage._cdata)
                sizes[part] += storage.nbytes()
    return sizes


def _tensors(roots: Iterable[Any], visited: set[int]) -> Iterator[torch.Tensor]:
    """All tensors within containers, modules and the project's own objects."""
    for root in roots:
        if isinstance(root, torch.Tensor):
            yield root
            continue
        is_ours = isinstance(root, nn.Module) or type(root).__module__.startswith("moss_")
        if isinstance(root, Mapping):
            parts = root.values()
        elif isinstance(root, (list, tuple)):
            parts = root
        elif is_ours and hasattr(root, "__dict__"):
            parts = vars(root).values()
        else:
            continue
        if id(root) not in visited:
            visited.add(id(root))
            yield from _tensors(parts, visited)


def _local_kernel_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """What `LocalFrameDecoder` makes of the weights, where it will be used."""
    size = (config.local.n_embd, config.local.n_inner, config.local.n_head, config.audio_vocab_size)
    fits = size in cuda_kernel.MODELS and config.n_vq == cuda_kernel.CODEBOOKS and dtype == torch.bfloat16
    if device.type != "cuda" or not fits or not _library.is_available():
        return 0
    library, model = cuda_kernel.library(), cuda_kernel.MODELS[size]
    packed = library.moss_local_frame_packed_bytes(model) + library.moss_local_frame_workspace_bytes(model)
    rope = config.n_vq * config.local.head_dim * torch.float32.itemsize
    stacked = config.n_vq * config.audio_vocab_size * config.local.n_embd * dtype.itemsize
    table = 3 * stacked * (config.n_vq - 1) // config.n_vq
    return packed + rope + stacked + table


def _pool_bytes(config: ModelConfig, runtime: Runtime, device: torch.device, graphs: bool) -> int:
    """An estimate of what captured graphs hold: the activations of the largest prefill pass alone and of the largest
    with frames, and the graphs."""
    backbone = config.backbone
    queries = backbone.num_attention_heads * backbone.head_dim
    qkv = queries + 2 * backbone.num_key_value_heads * backbone.head_dim
    width = 2 * backbone.hidden_size + 2 * queries + qkv + backbone.intermediate_size
    rows = 2 * runtime.prefill.max_tokens + runtime.frame.buckets[-1]
    activations = rows * width * runtime.model.dtype.itemsize
    return activations + GRAPH_BYTES * runtime.graph_count * (graphs and device.type == "cuda")


def _size(size: int) -> str:
    if 0 < size < 2**20 / 100:
        return f"{size} B"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"

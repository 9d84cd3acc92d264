"""The memory budget: what it says before anything exists is what then is allocated."""

import gc
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from moss_kernels.local_frame_decode import cuda_kernel
from moss_runtime.engine import Engine, EngineConfig, loading
from moss_runtime.errors import UserError
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.tts import MossTTS
from moss_runtime.state.budget import PARTS, MemoryBudget, MemoryBudgetError
from moss_runtime.state.codec_slots import CodecSlots
from moss_runtime.state.kv_cache import PagedKV

MANIFESTS = Path(__file__).parent / "manifests"
OPTIONS = {"rows": 5, "max_tokens": 150, "max_frames": 40}
EXACT = sorted(PARTS.keys() - {"graph pools", "head-room"})


@pytest.fixture
def small(golden) -> tuple[ModelConfig, CodecConfig]:
    names = golden("local_hd16").directory, golden("codec").directory
    return ModelConfig.from_directory(names[0]), CodecConfig.from_directory(names[1])


@pytest.fixture(scope="module")
def full_size() -> tuple[ModelConfig, CodecConfig]:
    codec = json.loads((MANIFESTS / "codec_config.json").read_text())
    return ModelConfig.from_directory(MANIFESTS / "local"), CodecConfig.from_dict(codec)


def full_budget(full_size, **changes) -> MemoryBudget:
    options = {"rows": 64, "max_tokens": 2048, "max_frames": 1024, "dtype": torch.bfloat16}
    return MemoryBudget(*full_size, **options | changes)


def storages() -> dict[int, int]:
    """Bytes of all storages that live Python tensors have, but for meta and sparse tensors (of other tests)."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors = [x for x in tensors if x.device.type != "meta" and x.layout == torch.strided]
    return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_codec", [True, False])
def test_plan_is_what_a_runtime_allocates(golden, small, with_codec, dtype):
    before = storages()
    budget = MemoryBudget(small[0], small[1] if with_codec else None, dtype=dtype, device="cpu", **OPTIONS)
    assert storages().keys() <= before.keys()
    model = MossTTS.from_pretrained(golden("local_hd16").directory, dtype=dtype)
    codec = Codec.from_pretrained(golden("codec").directory, dtype=dtype) if with_codec else None
    runtime = Runtime(model, codec, **OPTIONS)
    budget.measure(runtime)
    assert {part: budget.measured[part] for part in EXACT} == {part: budget.planned[part] for part in EXACT}
    after = storages()
    allocated = sum(size for key, size in after.items() if key not in before)
    assert sum(budget.measured[part] for part in EXACT) == allocated
    assert (budget.measured["codec state"] > 0) == (budget.measured["codec weights"] > 0) == with_codec
    assert budget.measured["KV cache"] == runtime.kv.size_in_bytes
    assert budget.measured["decode pool"] == runtime.pool.size_in_bytes


@pytest.mark.gpu
def test_plan_on_a_gpu(golden, small):
    budget = MemoryBudget(*small, dtype=torch.bfloat16, **OPTIONS)
    model = MossTTS.from_pretrained(golden("local_hd16").directory, dtype=torch.bfloat16, device="cuda")
    codec = Codec.from_pretrained(golden("codec").directory, dtype=torch.bfloat16, device="cuda")
    runtime = Runtime(model, codec, **OPTIONS)
    budget.measure(runtime)
    assert {part: budget.measured[part] for part in EXACT} == {part: budget.planned[part] for part in EXACT}
    gc.collect()  # what earlier tests leave behind must not be freed while the capture is measured
    runtime.warm_up()
    budget.measure(runtime)
    # What a codec of this size takes may fit into memory that the driver holds already.
    assert budget.measured["graph pools"] > runtime.feed.bytes >= 0
    assert 0 < budget.measured["head-room"] < torch.cuda.mem_get_info()[1]


def test_figures_of_the_released_model(full_size):
    planned = full_budget(full_size, device="cpu").planned
    linears = 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728)
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    assert planned["backbone weights"] == 2 * (linears + norms + 151_936 * 2560)
    layers = 2560 * 7680 + 7680 + 2560 * 2560 + 2560 + 2 * 2560 * 9728 + 9728 + 2560 + 6 * 2560
    assert planned["local weights and tables"] == 2 * (layers + 2 * 2560 + 12 * 1024 * 2560)
    assert planned["KV cache"] == (64 * 32 + 1) * 64 * 147_456 + 65 * 32 * 4


def test_local_kernel_counts_where_it_runs(full_size, moss_library):
    on_cpu, on_cuda, wide = (
        full_budget(full_size, **changes).planned["local weights and tables"]
        for changes in ({"device": "cpu"}, {}, {"dtype": torch.float32})
    )
    matrices = 2 * (2560 * 7680 + 2560 * 2560 + 2 * 2560 * 9728)
    table, stacked = 2 * 11 * 1024 * 7680, 2 * 12 * 1024 * 2560
    workspace = cuda_kernel.library().moss_local_frame_workspace_bytes(cuda_kernel.MODELS[2560, 9728, 32, 1024])
    rope = 12 * 80 * 4
    # The packed form repeats the matrices and, as heads, the embeddings.
    assert on_cuda - on_cpu == table + 2 * stacked + matrices + workspace + rope
    assert wide == 2 * on_cpu


def test_fit_takes_all_pages_that_are_of_use(full_size):
    budget = full_budget(full_size)
    total = budget.total
    assert budget.fit(2 * total) == budget.options["pages"] == 64 * 32
    assert budget.total == total
    page = 64 * 147_456
    assert budget.fit(total - 1) == 64 * 32 - 1
    assert budget.total == total - page
    assert budget.fit(total - 100 * page) == 64 * 32 - 100
    kv = {"rows": 64, "pages": 64 * 32 - 100, "max_tokens": 2048, "dtype": torch.bfloat16}
    assert budget.planned["KV cache"] == PagedKV.bytes(full_size[0].backbone, **kv)
    # Down to one request of full length, and up again.
    assert budget.fit(budget.least) == 32
    assert budget.total == budget.least
    assert budget.fit(total) == 64 * 32


def test_error_says_what_frees_how_much(full_size):
    budget = full_budget(full_size)
    with pytest.raises(MemoryBudgetError) as error:
        budget.fit(budget.least - 1)
    assert isinstance(error.value, UserError)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"the runtime needs at least {budget.least / 2**30:.2f} GiB of memory, and may take ")
    freed = {
        text: budget.least - full_budget(full_size, **changes).least
        for text, changes in {"rows 64 -> 32": {"rows": 32}, "max_tokens 2048 -> 1024": {"max_tokens": 1024}}.items()
    }
    freed["no codec"] = budget.least - full_budget((full_size[0], None)).least
    freed["head_room 1073741824 -> 536870912"] = 2**29
    for text, size in freed.items():
        size = f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
        assert f"{text} frees {size}" in message
    assert "chunks of at most 4 frames frees" in message
    assert message.index("no codec") < message.index("rows") < message.index("max_frames")
    assert "pages" not in message.split(". ", 1)[1]
    # What did not fit did not change anything.
    assert budget.options["pages"] == 64 * 32


def test_what_just_fits_fits_and_one_byte_less_does_not(small):
    budget = MemoryBudget(*small, dtype=torch.float32, device="cpu", **OPTIONS)
    assert budget.fit(budget.least) == 3 and budget.total == budget.least
    with pytest.raises(MemoryBudgetError, match=": 1 B too much"):
        budget.fit(budget.least - 1)


@pytest.mark.parametrize("slots", [1, 3])
def test_plan_of_an_engine_counts_its_own_codec_slots(golden, small, slots):
    config = EngineConfig.from_mode("streaming-balanced", codec_slots=slots, **OPTIONS)
    options = OPTIONS | {"chunks": config.chunk_lengths, "codec_slots": slots}
    planned = MemoryBudget(*small, dtype=torch.float32, device="cpu", **options).planned
    weights = (
        MossTTS.from_pretrained(golden("local_hd16").directory),
        Codec.from_pretrained(golden("codec").directory),
    )
    with Engine(config, *weights) as engine:
        chunk = engine.stage.chunk
        size = CodecSlots.size_in_bytes([stage.config for stage in chunk.stages], slots, torch.float32)
        assert planned["codec state"] == size
        without = MemoryBudget(small[0], None, dtype=torch.float32, device="cpu", **OPTIONS).planned
        assert planned["graph buffers"] - without["graph buffers"] >= chunk.buffers.size_in_bytes


def test_an_engine_with_few_codec_slots_fits_where_one_with_many_does_not(small, monkeypatch):
    few, many = (EngineConfig.from_mode("streaming-balanced", codec_slots=slots, **OPTIONS) for slots in (1, 5))
    options = OPTIONS | {"chunks": few.chunk_lengths, "codec_slots": 1, "dtype": torch.bfloat16}
    monkeypatch.setattr(loading, "free_memory", lambda _: MemoryBudget(*small, **options).least)
    device = torch.device("cuda")
    assert loading.fitted(few, *small, device, torch.bfloat16).pages == 3
    with pytest.raises(MemoryBudgetError):
        loading.fitted(many, *small, device, torch.bfloat16)


def test_pages_asked_for_are_not_reduced(small):
    budget = MemoryBudget(*small, dtype=torch.float32, device="cpu", pages=9, **OPTIONS)
    assert budget.least == budget.total
    assert budget.fit(budget.total) == 9
    with pytest.raises(MemoryBudgetError, match=r"pages 9 -> 4 frees 0\.\d\d MiB.*"):
        budget.fit(budget.total - 1)
    with pytest.raises(MemoryBudgetError, match="dtype bfloat16 frees"):
        budget.fit(0)


def test_table(small):
    budget = MemoryBudget(*small, dtype=torch.float32, device="cpu", **OPTIONS)
    lines = printed(budget)
    assert "15 KV pages" in lines[0]
    assert all(any(part in line for line in lines) for part in [*PARTS, "total"])
    total = next(line for line in lines if "total" in line)
    assert f"{budget.total / 2**30:.2f} GiB" in total and total.count("iB") == 1
    budget.measured = dict(budget.planned)
    total = next(line for line in printed(budget) if "total" in line)
    assert total.count("iB") == 2


def printed(budget: MemoryBudget) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    console.print(budget.table())
    return console.file.getvalue().splitlines()

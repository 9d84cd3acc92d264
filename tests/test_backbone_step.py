"""BackboneStep against the eager backbone: ragged rows, paused rows and padding over pages full of NaN."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.baselines_backbone import eager_hidden
from moss_kernels import _launch
from moss_kernels.testing.backbone import FULL_BACKBONE, PagedInputs, backbone_weights
from moss_kernels.testing.compare import require_equal
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.model.backbone import Backbone
from moss_runtime.model.config import BackboneConfig

ROOT = Path(__file__).parents[1]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
PAGE_SIZE = 16
# Tokens held by each pool row before the first step; batch rows in another order, padding among them.
LENGTHS = [3, 31, 0, 16, 15]
NULL = len(LENGTHS)
ROWS = [4, NULL, 0, 1, NULL, 3, 2]


def make_backbone(sizes, *, dtype=torch.float32, device="cpu", layers=None) -> Backbone:
    config = BackboneConfig(**FULL_BACKBONE | sizes | ({"num_hidden_layers": layers} if layers else {}))
    with torch.device("meta"):
        backbone = Backbone(config)
    shapes = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    weights = backbone_weights(shapes, 0, device=device, dtype=dtype)
    backbone.load_state_dict(weights, assign=True)
    return backbone.requires_grad_(False).eval()


def prefilled(backbone: Backbone, prompts: list[torch.Tensor]) -> tuple[PagedInputs, list]:
    """Pages that hold the prompts [T, H] of the pool rows, NaN elsewhere; and eager caches that hold the same."""
    config, dtype = backbone.config, backbone.embed_tokens.weight.dtype
    kv = PagedInputs.make(
        [(len(prompt), True) for prompt in prompts],
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        max_tokens=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        dtype=dtype,
    )
    # Pool row n is prompt n, with room for a few more tokens.
    order = kv.row_map.long()
    kv.page_table[:-1], kv.positions[:-1] = kv.page_table[order], kv.positions[order]
    count = kv.key_pages.shape[1] - 1
    extra = [torch.full_like(pages[:, : len(prompts)], torch.nan) for pages in (kv.key_pages, kv.value_pages)]
    kv.key_pages = torch.cat((kv.key_pages[:, :-1], extra[0], kv.key_pages[:, -1:]), 1)
    kv.value_pages = torch.cat((kv.value_pages[:, :-1], extra[1], kv.value_pages[:, -1:]), 1)
    kv.page_table[kv.page_table == count] += len(prompts)
    caches = []
    for row, prompt in enumerate(prompts):
        cache = backbone.new_cache(1)
        backbone(prompt[None], cache)
        pages = -(-(len(prompt) + 1) // PAGE_SIZE)
        kv.page_table[row, pages] = count + row
        for position in range(len(prompt)):
            page, place = int(kv.page_table[row, position // PAGE_SIZE]), position % PAGE_SIZE
            kv.key_pages[:, page, :, place] = cache.keys[:, 0, :, position]
            kv.value_pages[:, page, :, place] = cache.values[:, 0, :, position]
        caches.append(cache)
    return kv, caches


def test_steps_follow_the_eager_backbone():
    backbone = make_backbone(TINY)
    prompts = [torch.randn(length, 64) for length in LENGTHS]
    kv, caches = prefilled(backbone, prompts)
    eager = make_backbone(TINY)
    step = BackboneStep(backbone, max_batch=len(ROWS) + 1)
    row_map = torch.tensor(ROWS, dtype=torch.int32)
    paused = [{1}, set(), {0, 4}, set(range(NULL))]
    for held_back in paused:
        active = torch.tensor([row != NULL and row not in held_back for row in ROWS])
        embeds = torch.randn(len(ROWS), 64)
        embeds[~active] = torch.nan
        before = kv.clone()
        hidden = step.step(embeds, kv, kv.positions, row_map, active)
        for batch_row in active.nonzero()[:, 0].tolist():
            expected = eager(embeds[batch_row][None, None], caches[ROWS[batch_row]])[0, 0]
            torch.testing.assert_close(hidden[batch_row], expected, rtol=1e-5, atol=1e-5)
        require_only_new_tokens(before, kv, row_map[active].long())
        kv.positions[row_map[active].long()] += 1


def require_only_new_tokens(before, kv, rows):
    """Each row's new token is there and finite; positions, the table and all other places keep their bits."""
    for name in ("page_table", "positions"):
        assert torch.equal(getattr(before, name), getattr(kv, name)), name
    places = kv.positions[rows].long()
    pages, places = kv.page_table[rows, places // PAGE_SIZE].long(), places % PAGE_SIZE
    for name in ("key_pages", "value_pages"):
        old, new = getattr(before, name), getattr(kv, name).clone()
        assert new[:, pages, :, places].isfinite().all()
        new[:, pages, :, places] = old[:, pages, :, places]
        assert torch.equal(old.view(torch.int32), new.view(torch.int32)), name


def test_the_module_computes_the_same_in_the_same_memory():
    backbone, embeds = make_backbone(TINY), torch.randn(2, 7, 64)
    names = list(backbone.state_dict())
    expected = backbone(embeds, backbone.new_cache(2))
    step = BackboneStep(backbone, max_batch=2)
    assert torch.equal(backbone(embeds, backbone.new_cache(2)), expected)
    assert list(backbone.state_dict()) == names
    for layer, packed in zip(backbone.layers, step.layers, strict=True):
        for linear, weight in (
            (layer.self_attn.k_proj, packed.qkv),
            (layer.self_attn.o_proj, packed.o),
            (layer.mlp.up_proj, packed.gate_up),
            (layer.mlp.down_proj, packed.down),
        ):
            assert linear.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_batches_that_do_not_fit_are_refused():
    step = BackboneStep(make_backbone(TINY), max_batch=3)
    kv = PagedInputs.make([(3, True)] * 4, kv_heads=2, head_dim=32, page_size=PAGE_SIZE, layers=3)
    with pytest.raises(ValueError, match="`embeds` must have at most 3 rows, got 4"):
        step.step(torch.zeros(4, 64), kv, kv.positions, kv.row_map, kv.active)
    with pytest.raises(ValueError, match="`max_batch` must be at least 1, got 0"):
        BackboneStep(make_backbone(TINY), max_batch=0)


GPU_LAYERS = 3


@pytest.fixture(scope="module")
def gpu():
    """Three layers at full width, their step, and pages and input of 128 rows."""
    backbone = make_backbone({}, dtype=torch.bfloat16, device="cuda", layers=GPU_LAYERS)
    rows = [(5 + 41 * n % 900, True) for n in range(128)]
    kv = PagedInputs.make(rows, kv_heads=8, head_dim=128, layers=GPU_LAYERS, dtype=torch.bfloat16, device="cuda")
    embeds = torch.randn(128, 2560, device="cuda").bfloat16()
    return backbone, BackboneStep(backbone, max_batch=128), kv, embeds


@pytest.mark.gpu
def test_bf16_errs_at_most_twice_as_much_as_eager(gpu):
    backbone, step, kv, embeds = gpu
    kv = kv.clone()
    hidden = step.step(embeds, kv, kv.positions, kv.row_map, kv.active)
    for row in (0, 1, 63, 127):
        exact, eager = (eager_hidden(backbone, kv, embeds, row, dtype) for dtype in (torch.float64, torch.bfloat16))
        rounding = (eager.double() - exact).square().mean().sqrt()
        assert (hidden[row].double() - exact).square().mean().sqrt() <= 2 * rounding


# Each kind of launch and each block of rows compiles kernels of its own, so these tests share few: the tests of the ops
# have the others.
@pytest.mark.gpu
@pytest.mark.parametrize(("batches", "dependent"), [((1, 2, 7, 33, 128), False), ((3, 16), True)])
def test_rows_do_not_depend_on_the_batch(gpu, batches, dependent, monkeypatch):
    _, step, kv, embeds = gpu
    monkeypatch.setattr(_launch, "enabled", False)
    together = kv.clone()
    expected = step.step(embeds, together, together.positions, together.row_map, together.active).clone()
    monkeypatch.setattr(_launch, "enabled", dependent)
    for batch in batches:
        index = torch.randperm(128)[:batch].tolist()
        part = kv.clone().take(index)
        hidden = step.step(embeds[index], part, part.positions, part.row_map, part.active)
        require_equal(f"hidden of {batch} rows", hidden, expected[index])
    if batch == 128:
        require_equal("key_pages", part.key_pages.nan_to_num(), together.key_pages.nan_to_num())
        require_equal("value_pages", part.value_pages.nan_to_num(), together.value_pages.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "dependent"), [(1, True), (16, True), (64, False), (128, False)])
def test_replay_equals_eager(gpu, batch, dependent, monkeypatch):
    monkeypatch.setattr(_launch, "enabled", dependent)
    _, step, kv, embeds = gpu
    kv = dataclasses.replace(kv.clone().take(list(range(batch))))
    kv.active[batch // 2] = batch == 1
    before = kv.clone()

    def run():
        return step.step(embeds[:batch], kv, kv.positions, kv.row_map, kv.active)

    expected = run().clone()
    after = kv.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = run()
    for _ in range(5):
        for name in ("key_pages", "value_pages"):
            getattr(kv, name).copy_(getattr(before, name))
        hidden.zero_()
        graph.replay()
        require_equal("hidden", hidden[kv.active], expected[kv.active])
        for name in ("key_pages", "value_pages"):
            require_equal(name, getattr(kv, name).nan_to_num(), getattr(after, name).nan_to_num())


def test_the_benchmark_checks_its_variants_without_a_gpu():
    command = [sys.executable, "-m", "bench.bench_backbone", "--smoke"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 24
    assert all(line.endswith(" ok") for line in lines)

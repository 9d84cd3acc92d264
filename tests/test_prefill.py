"""Prefill: what it leaves in the pages is what the eager backbone computes, however prompts are cut and grouped."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.graphs.backbone_step import BackboneStep
from moss_runtime.graphs.prefill import PIECE, Prefill, cut
from moss_runtime.model import MossTTS
from moss_runtime.observe import FallbackReason
from moss_runtime.random_weights import random_model, random_prompts
from moss_runtime.state.decode_pool import DecodePool
from moss_runtime.state.kv_cache import PagedKV

GOLDEN = Path(__file__).parent / "golden"
SIZES = (34, 1, 3, 18, 17, 21, 2, 33, 5)
ROWS = len(SIZES)


@pytest.fixture(scope="module")
def model():
    return MossTTS.from_pretrained(GOLDEN / "local_hd16")


@pytest.fixture(scope="module")
def prompts(model):
    generator, made = torch.Generator().manual_seed(5), []
    for length in SIZES:
        rows = torch.randint(0, 64, (length, 13), generator=generator)
        rows[torch.rand(length, generator=generator) < 0.6, 1:] = 64
        made.append(rows)
    return made


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Keys [layers, KV heads, tokens, D], values, and the last row's embedding of each prompt."""
    results = []
    for prompt in prompts:
        cache = model.transformer.new_cache(1)
        embeds = model.embed(prompt)[None]
        if len(prompt) > 1:
            with torch.no_grad():
                model.transformer(embeds[:, :-1], cache)
        results.append((cache.keys[:, 0, :, : cache.length], cache.values[:, 0, :, : cache.length], embeds[0, -1]))
    return results


def make(model, page_size=4, **options):
    common = {"dtype": model.dtype, "device": model.device}
    pool = DecodePool(model.config, rows=ROWS, max_frames=4, **common)
    kv = PagedKV(
        model.config.backbone, rows=ROWS, pages=12 * ROWS, page_size=page_size, max_tokens=12 * page_size, **common
    )
    kv.key_pages[:, :-1], kv.value_pages[:, :-1] = torch.nan, torch.nan
    pool.staging[:-1] = torch.nan
    step = BackboneStep(model.transformer, max_batch=1)
    return Prefill(model, step, pool, kv, **{"piece": 16, "prompts": 4, "tokens": (16, 32), "max_tokens": 48} | options)


def run(prefill, prompts, rows):
    """Prefill prompts into rows; returns the shapes of the passes."""
    waiting = [cut(row, prompt, prefill.piece) for row, prompt in zip(rows, prompts, strict=True)]
    for row, prompt in zip(rows, prompts, strict=True):
        prefill.pool.acquire(row, SamplingParams(), seed=0, max_frames=1, position=len(prompt) - 1)
        prefill.kv.reserve(row, len(prompt) - 1)
    shapes, compute = [], prefill.graphs.compute
    prefill.graphs.compute = lambda *shape: (shapes.append(shape), compute(*shape))
    while waiting := [pieces for pieces in waiting if pieces]:
        done = {piece.row for piece in run_pass(prefill, [pieces[0] for pieces in waiting])}
        waiting = [pieces[1:] if pieces[0].row in done else pieces for pieces in waiting]
    return shapes


def run_pass(prefill, pieces):
    pieces = prefill.next_pass(pieces)
    prefill.run(pieces)
    return pieces


def stored(kv, row, tokens):
    pages = list(kv.pages_of(row))
    return [
        store[:, pages].transpose(2, 3).flatten(1, 2)[:, :tokens].transpose(1, 2)
        for store in (kv.key_pages, kv.value_pages)
    ]


def test_how_a_prompt_is_cut_depends_on_its_length_alone():
    prompt = torch.arange(1100)[:, None].expand(-1, 13)
    for length in (1, 2, 512, 513, 514, 1024, 1025, 1026, 1100):
        pieces = cut(3, prompt[:length])
        assert [piece.start for piece in pieces] == list(range(0, max(length - 1, 1), PIECE))
        assert np.array_equal(np.concatenate([piece.ids for piece in pieces]), prompt[: length - 1])
        assert all(piece.last[0] == length - 1 and piece.row == 3 for piece in pieces)


@pytest.mark.parametrize("order", [range(ROWS), (7, 2, 0), (1,), (8, 3, 4, 6, 1)])
def test_keys_values_and_staging_are_those_of_the_eager_backbone(model, prompts, expected, order):
    """Prompts of 0 to 33 tokens in pieces of at most 16, over pages full of NaN."""
    prefill = make(model)
    run(prefill, [prompts[index] for index in order], range(len(order)))
    for row, index in enumerate(order):
        keys, values, last = expected[index]
        got = stored(prefill.kv, row, keys.shape[2])
        torch.testing.assert_close(got, [keys, values], rtol=0, atol=1e-5)
        assert torch.equal(prefill.pool.staging[row], last)
    assert prefill.graphs.fallbacks.keys() == {FallbackReason.DEVICE}


def test_nothing_else_is_written(model, prompts):
    prefill = make(model)
    pool, kv = prefill.pool, prefill.kv
    kv.key_pages[:, :-1], kv.value_pages[:, :-1], pool.staging[:-1] = 1.0, 2.0, 3.0
    run(prefill, prompts[:1] + prompts[3:4], [0, 1])
    tokens = {0: 33, 1: 17}
    for row, count in tokens.items():
        for part in stored(kv, row, 36 if row == 0 else 20):
            part[:, :, :count] = torch.nan
    for store, fill in ((kv.key_pages, 1.0), (kv.value_pages, 2.0)):
        held = [page for row in tokens for page in kv.pages_of(row)]
        free = [page for page in range(kv.pages) if page not in held]
        assert (store[:, free] == fill).all() and not store[:, -1].any()
        assert (store[:, kv.pages_of(0)[-1], :, 3] == fill).all()
    assert (pool.staging[2:-1] == 3).all() and not pool.staging[-1].any()


def test_warming_up_and_capturing_write_nothing(model):
    """A capture runs every shape on what the inputs hold; no shape's null rows may look like tokens of another's."""
    prefill = make(model)
    pool, kv = prefill.pool, prefill.kv
    before = [tensor.clone() for tensor in (kv.key_pages, kv.value_pages, pool.staging)]
    prefill.warm_up()
    for shape in prefill.graphs.shapes:
        prefill.compute(*shape)
    for tensor, held in zip((kv.key_pages, kv.value_pages, pool.staging), before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), held.nan_to_num(7))


def test_passes_hold_as_many_prompts_as_fit(model, prompts):
    """Pieces of 16+16+1, 0, 2, 16+1, 16, 16+4, 1, 16+16, 4 tokens; at most three tiles and four prompts a pass."""
    shapes = run(make(model), prompts, range(ROWS))
    assert shapes == [(48,), (48,), (48,), (48,), (16,)]


def test_bfloat16_keys_do_not_depend_on_the_pass():
    """The same in the dtype of the GPU, and the small dimensions of the frame kernel."""
    model = random_model("tiny", device="cpu", dtype=torch.bfloat16)
    prompts = random_prompts(model, [9, 8, 7, 6])
    results = []
    for rows in ([0], [1, 0], [2, 3, 1, 0]):
        prefill = make(model)
        prefill.warm_up()
        run(prefill, [prompts[row] for row in rows], rows)
        results.append(torch.stack(stored(prefill.kv, 0, 8)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.gpu
def test_keys_on_the_gpu_do_not_depend_on_the_pass():
    """Full dimensions; so few tokens that linears into the residual stream are cut, and so many that they are not."""
    model = random_model("full", device="cuda", dtype=torch.bfloat16, layers=3)
    prompts = random_prompts(model, [151, 150, 140, 130, 151, 121, 133, 151])
    results = []
    for count in (1, 2, 4, 8):
        prefill = make(model, page_size=64, piece=512, prompts=8, tokens=(160, 320, 640), max_tokens=1280, graphs=False)
        run(prefill, prompts[:count], range(count))
        results.append(torch.stack(stored(prefill.kv, 0, 150)))
    assert results[0].isfinite().all() and all(torch.equal(result, results[0]) for result in results)

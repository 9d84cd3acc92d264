"""Backbone: golden parity, and independence of padding and of how the columns are cut into steps."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moss_runtime.model import MossTTS

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(params=["local_hd16", "local_hd80"])
def case(request) -> tuple[MossTTS, dict[str, torch.Tensor]]:
    directory = GOLDEN / request.param
    return MossTTS.from_pretrained(directory), load_file(directory / "expected.safetensors")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()


def run(model: MossTTS, embeds: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model.transformer(embeds, model.transformer.new_cache(len(embeds)), mask)


def test_golden(case):
    model, expected = case
    embeds = model.embed(expected["prompt.input_ids"])
    assert torch.equal(embeds, expected["prompt.embeds"])
    assert relative_error(run(model, embeds), expected["prompt.hidden"]) < 1e-4


@pytest.mark.parametrize("cuts", [[1] * 17, [16, 1], [5, 1, 1, 7, 3]])
def test_cut_into_steps(case, cuts):
    model, expected = case
    cache = model.transformer.new_cache(2)
    parts = [model.transformer(part, cache) for part in expected["prompt.embeds"].split(cuts, dim=1)]
    assert relative_error(torch.cat(parts, 1), expected["prompt.hidden"]) < 1e-4


@pytest.mark.parametrize("pad", [1, 4])
def test_left_padding_is_never_seen(case, pad):
    model, expected = case
    embeds = expected["prompt.embeds"]
    garbage = 1e3 * torch.randn(2, pad, embeds.shape[2], generator=torch.Generator().manual_seed(0))
    padded = torch.cat((torch.cat((garbage, embeds), 1)[:1], torch.cat((embeds, garbage), 1)[1:]))
    mask = torch.ones(2, 17 + pad, dtype=torch.bool)
    mask[0, :pad] = False
    cache = model.transformer.new_cache(2)
    prefill = model.transformer(padded[:, :15], cache, mask[:, :15])
    hidden = torch.cat((prefill, model.transformer(padded[:, 15:], cache, mask[:, 15:])), 1)
    assert relative_error(hidden[0, pad:], expected["prompt.hidden"][0]) < 1e-4
    assert relative_error(hidden[1, :17], expected["prompt.hidden"][1]) < 1e-4
    assert hidden.isfinite().all()


def test_reduced_precision_follows_float64(case):
    model, expected = case
    exact = run(model.double(), expected["prompt.embeds"].double())
    assert relative_error(expected["prompt.hidden"].double(), exact) < 1e-5
    # Some ten roundings of 2^-9 per layer, and the largest of them all counts.
    rounded = run(model.bfloat16(), expected["prompt.embeds"].bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert 0 < relative_error(rounded.double(), exact) < 12 * 2**-9

"""SamplingParams: what is accepted, and that what is not names itself."""

import dataclasses
import fractions
import json
import math
import re

import numpy
import pytest
import torch

from moss_kernels import SamplingParams, SamplingState


def test_defaults_are_those_of_the_released_model():
    assert dataclasses.astuple(SamplingParams()) == (1.7, 25, 0.8, 1.0, 1.0, 50, 1.0, None)


@pytest.mark.parametrize(
    "accepted",
    [
        {"temperature": 0},
        {"temperature": 1e-9},
        {"text_temperature": numpy.float32(0.5)},
        {"temperature": fractions.Fraction(1, 2)},
        {"top_p": 1},
        {"top_p": 1e-300},
        {"top_k": -1},
        {"top_k": 10**20},
        {"text_top_k": numpy.int64(3)},
        {"repetition_penalty": 0.5},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"seed": numpy.uint64(2**63 - 1)},
    ],
)
def test_accepts(accepted):
    """Numbers of any kind, which are plain ones from then on: states take them, and records of requests."""
    params = SamplingParams(**accepted)
    SamplingState.allocate(rows=1, codebooks=1, vocab=32).set_row(0, params, seed=params.seed or 0)
    ((name, value),) = accepted.items()
    assert json.loads(json.dumps(dataclasses.asdict(params)))[name] == value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "finite and >= 0"),
        ("temperature", math.nan, "finite and >= 0"),
        ("temperature", math.inf, "finite and >= 0"),
        ("text_temperature", 1e39, "finite and >= 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.0000001, r"in \(0, 1\]"),
        ("top_p", math.nan, r"in \(0, 1\]"),
        ("text_top_p", -1, r"in \(0, 1\]"),
        ("repetition_penalty", 0, "finite and > 0"),
        ("repetition_penalty", -1.0, "finite and > 0"),
        ("repetition_penalty", 1e-50, "finite and > 0"),
        ("repetition_penalty", math.inf, "finite and > 0"),
        ("seed", -1, r"in 0 \.\. 2\^63-1"),
        ("seed", 2**63, r"in 0 \.\. 2\^63-1"),
    ],
)
def test_refuses_ranges(name, value, expected):
    with pytest.raises(ValueError, match=f"`{name}` must be {expected}.*got {re.escape(str(value))}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1.0"),
        ("temperature", True),
        ("top_p", None),
        ("repetition_penalty", 1j),
        ("top_k", 25.0),
        ("text_top_k", False),
        ("top_k", None),
        ("seed", 1.0),
        ("seed", True),
    ],
)
def test_refuses_types(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be a"):
        SamplingParams(**{name: value})


def test_state_row_holds_the_parameters_and_starts_afresh():
    state = SamplingState.allocate(rows=3, codebooks=2, vocab=70, device="cpu")
    assert state.seen.shape == (4, 2, 3)
    state.frame[1] = 9
    state.seen[1] = -1
    params = SamplingParams(0.5, 10**20, 0.25, 1.5, 0.75, -4, 0.125, seed=3)
    state.set_row(1, params, seed=2**63 - 1)
    row = {field.name: getattr(state, field.name)[1] for field in dataclasses.fields(state)}
    assert not row.pop("seen").any()
    assert {name: value.item() for name, value in row.items()} == {
        "temperature": 0.5,
        "top_k": 2**31 - 1,
        "top_p": 0.25,
        "repetition_penalty": 1.5,
        "text_temperature": 0.75,
        "text_top_k": 0,
        "text_top_p": 0.125,
        "seed": 2**63 - 1,
        "frame": 0,
    }
    state.clear_row(1)
    for field in dataclasses.fields(state):
        assert not getattr(state, field.name).any()


def test_state_keeps_a_tiny_top_p_on():
    state = SamplingState.allocate(rows=1, codebooks=1, vocab=4, device="cpu")
    state.set_row(0, SamplingParams(top_p=1e-300), seed=0)
    assert 0 < state.top_p[0] < torch.tensor(1e-30)


@pytest.mark.parametrize("row", [-1, 3])
def test_state_refuses_the_null_row_and_rows_beyond(row):
    state = SamplingState.allocate(rows=3, codebooks=1, vocab=4, device="cpu")
    with pytest.raises(ValueError, match=rf"`row` must be in 0 \.\. 2, got {row}"):
        state.set_row(row, SamplingParams(), seed=0)

"""A request's draws do not depend on the batch around it, nor on how tensors lie in memory."""

import dataclasses

import pytest
import torch

from moss_kernels.testing.cases import PAD_ID, SampleCodebookInputs, sample_codebook_inputs
from moss_kernels.testing.compare import implementation, require_equal

VOCAB, BATCH = 64, 128
PLACES = [pytest.param(("reference", "cpu"), id="reference-cpu")] + [
    pytest.param((name, "cuda"), id=name, marks=pytest.mark.gpu) for name in ("reference", "triton", "cuda")
]


@pytest.fixture(params=PLACES)
def place(request):
    """An implementation and the device it runs on."""
    name, device = request.param
    return implementation("sample_codebook", name), device


@pytest.fixture
def draw(place):
    """Function (inputs, changes) -> (code, status, seen); the inputs stay as they are."""
    sampler, device = place

    def run(inputs: SampleCodebookInputs, **changes: object):
        copy = dataclasses.replace(inputs, **changes).to(device)
        code, status = copy.run(sampler)
        return code.cpu(), status.cpu(), copy.state.seen.cpu()

    return run


@pytest.fixture(scope="module")
def inputs() -> SampleCodebookInputs:
    return sample_codebook_inputs(BATCH, VOCAB, seed=1)


def test_batch_size(draw, inputs):
    code, status, _ = draw(inputs)
    for size in range(1, BATCH + 1):
        part = draw(inputs, logits=inputs.logits[:size], row_map=inputs.row_map[:size], active=inputs.active[:size])
        require_equal(f"code of a batch of {size}", part[0], code[:size])
        require_equal(f"status of a batch of {size}", part[1], status[:size])


def test_row_order(draw, inputs):
    code, status, seen = draw(inputs)
    order = torch.randperm(BATCH)
    moved = draw(inputs, logits=inputs.logits[order], row_map=inputs.row_map[order], active=inputs.active[order])
    require_equal("code", moved[0], code[order])
    require_equal("status", moved[1], status[order])
    require_equal("seen", moved[2], seen)


def test_padding_with_null_rows(draw, inputs):
    code, status, seen = draw(inputs)
    null_row = inputs.state.seed.shape[0] - 1
    padded = draw(
        inputs,
        logits=torch.cat([inputs.logits, torch.full((9, VOCAB), torch.nan)]),
        row_map=torch.cat([inputs.row_map, torch.full((9,), null_row, dtype=torch.int32)]),
        active=torch.cat([inputs.active, torch.zeros(9, dtype=torch.bool)]),
    )
    require_equal("code", padded[0], torch.cat([code, torch.full((9,), PAD_ID)]))
    require_equal("status", padded[1], torch.cat([status, torch.full((9,), 64, dtype=torch.int32)]))
    require_equal("seen", padded[2], seen)


def test_inactive_neighbours_keep_their_state(draw, inputs):
    code, status, seen = draw(inputs)
    active = inputs.active & (torch.arange(BATCH) % 3 > 0)
    some = draw(inputs, active=active)
    require_equal("code", some[0], torch.where(active, code, PAD_ID))
    require_equal("status", some[1], torch.where(active, status, 64))
    expected = inputs.state.seen.clone()
    drawn_rows = inputs.row_map[active].long()
    expected[drawn_rows] = seen[drawn_rows]
    require_equal("seen", some[2], expected)


def test_inactive_row_may_share_a_pool_row(draw, inputs):
    code, _, seen = draw(inputs)
    shared = torch.where(inputs.active, inputs.row_map, inputs.row_map[inputs.active][0])
    again = draw(inputs, row_map=shared)
    require_equal("code", again[0], code)
    require_equal("seen", again[2], seen)


@pytest.mark.parametrize(("width", "offset"), [(VOCAB + 13, 0), (VOCAB + 13, 5), (2 * VOCAB, VOCAB)])
def test_logits_in_a_wider_tensor(place, inputs, width, offset):
    sampler, device = place
    plain, viewed = inputs.to(device), inputs.to(device)
    code, status = plain.run(sampler)
    viewed.logits = torch.full((BATCH, width), 1e9, device=device)[:, offset : offset + VOCAB]
    viewed.logits.copy_(plain.logits)
    viewed_code, viewed_status = viewed.run(sampler)
    require_equal("code", viewed_code, code)
    require_equal("status", viewed_status, status)


def test_dtype_of_the_logits(draw, inputs):
    # Values that all three formats hold.
    logits = (torch.randn(BATCH, VOCAB) * 16).round() / 8
    codes = [draw(inputs, logits=logits.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for code, status, seen in codes[1:]:
        require_equal("code", code, codes[0][0])
        require_equal("status", status, codes[0][1])
        require_equal("seen", seen, codes[0][2])


def test_code_in_a_column_of_a_table(place, inputs):
    sampler, device = place
    plain, strided = inputs.to(device), inputs.to(device)
    code, status = plain.run(sampler)
    table = torch.full((BATCH, 12), -3, dtype=torch.int64, device=device)
    sampler(*strided.arguments(table[:, 7], torch.full_like(status, 64)))
    require_equal("column", table[:, 7], code)
    assert (table[:, :7] == -3).all() and (table[:, 8:] == -3).all()


def test_same_seed_and_frame_repeat_and_the_next_frame_differs(draw, inputs):
    state = dataclasses.replace(inputs.state)
    state.temperature, state.top_p = torch.full_like(state.temperature, 5.0), torch.ones_like(state.top_p)
    state.top_k = torch.zeros_like(state.top_k)
    fair = dataclasses.replace(inputs, logits=torch.zeros(BATCH, VOCAB), state=state, active=inputs.active | True)
    first, again = draw(fair)[0], draw(fair)[0]
    require_equal("code", again, first)
    later = draw(fair, state=dataclasses.replace(state, frame=state.frame + 1))[0]
    other = draw(fair, codebook=0)[0]
    for changed in (later, other):
        assert (changed != first).float().mean() > 0.8

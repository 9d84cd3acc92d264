"""Who holds which codec slot."""

import pytest
import torch

from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.state.codec_slots import CodecSlots

STAGES = [TransformerConfig(4, 4, 8, 2, 3, 8, 5, 1e4), TransformerConfig(4, 4, 12, 2, 1, 8, 7, 1e4)]


@pytest.fixture
def slots():
    return CodecSlots(STAGES, 2, dtype=torch.bfloat16, device="cpu")


def test_size_is_known_before_allocation(slots):
    tensors = [slots.offsets] + [part for rings in slots.stages for part in (rings.keys, rings.values)]
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert CodecSlots.size_in_bytes(STAGES, 2, torch.bfloat16) == allocated


def test_layers_share_one_offset_and_no_storage(slots):
    assert slots.stages[0].keys.shape == (3, 3, 2, 5, 4)
    assert slots.stages[0].offset.shape == (3,)
    parts = [part for rings in slots.stages for part in (rings.keys, rings.values)]
    for number, part in enumerate(parts, 1):
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(parts, 1))


def test_leases_are_distinct_and_run_out(slots):
    assert {slots.lease().slot, slots.lease().slot} == {0, 1}
    with pytest.raises(RuntimeError, match="all 2 codec slots are leased"):
        slots.lease()


def test_stale_lease_cannot_reach_a_reused_slot(slots):
    old, other = slots.lease(), slots.lease()
    slots.release(old)
    new = slots.lease()
    assert new.slot == old.slot
    assert slots.resolve([other, new]) == [other.slot, new.slot]
    with pytest.raises(ValueError, match=f"of codec slot {old.slot} was released"):
        slots.resolve([other, old])
    with pytest.raises(ValueError, match="was released"):
        slots.release(old)
    assert slots.free == 0


def test_released_lease_is_stale_at_once(slots):
    lease = slots.lease()
    slots.release(lease)
    with pytest.raises(ValueError, match="was released"):
        slots.resolve([lease])
    with pytest.raises(ValueError, match="was released"):
        slots.release(lease)
    assert slots.free == 2


def test_lease_starts_at_token_zero_and_keeps_the_ring(slots):
    lease = slots.lease()
    for rings in slots.stages:
        rings.offset[lease.slot] = 9
        rings.keys[:, lease.slot] = 1
    slots.release(lease)
    assert slots.lease().slot == lease.slot
    assert not slots.offsets.any()
    assert (slots.stages[0].keys[:, lease.slot] == 1).all()


@pytest.mark.parametrize("slot", [-1, 2, 3])
def test_reset_of_no_slot(slots, slot):
    with pytest.raises(ValueError, match=f"`slot` must be in 0..1, got {slot}"):
        slots.reset(slot)


def test_at_least_one_slot():
    with pytest.raises(ValueError, match="`slots` must be at least 1, got 0"):
        CodecSlots(STAGES, 0, dtype=torch.float32, device="cpu")

"""Host slots: one owner each."""

import pytest

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_slots import HostSlots
from vllm_hicache.tiers import SlotOwner


def _owners(slots: HostSlots) -> list[SlotOwner]:
    return [slots.owner(slot) for slot in range(slots.num_slots)]


def test_a_taken_slot_belongs_to_an_operation_and_a_published_one_to_the_index():
    slots = HostSlots(3)
    assert slots.take(2) == [0, 1]
    slots.give_to_index(0)
    assert _owners(slots) == [SlotOwner.INDEX, SlotOwner.OPERATION, SlotOwner.FREE]
    assert [slots.count(owner) for owner in SlotOwner] == [1, 1, 1]
    assert (slots.num_free, slots.num_used) == (1, 2)


def test_taking_more_than_is_free_takes_what_is_free():
    slots = HostSlots(2)
    assert slots.take(5) == [0, 1]
    assert slots.take(1) == []


def test_a_released_slot_can_be_taken_again_from_either_owner():
    slots = HostSlots(2)
    slots.take(2)
    slots.give_to_index(0)
    slots.release(0)
    slots.release(1)
    assert sorted(slots.take(2)) == [0, 1]


def test_a_free_slot_is_not_released_again():
    slots = HostSlots(1)
    with pytest.raises(InvariantBroken, match="slot 0 belongs to FREE"):
        slots.release(0)


def test_a_slot_is_published_once():
    slots = HostSlots(1)
    slots.take(1)
    slots.give_to_index(0)
    with pytest.raises(InvariantBroken, match="slot 0 belongs to INDEX, expected OPERATION"):
        slots.give_to_index(0)


def test_a_free_slot_is_not_published():
    with pytest.raises(InvariantBroken, match="slot 0 belongs to FREE, expected OPERATION"):
        HostSlots(1).give_to_index(0)


def test_slots_that_are_not_ready_are_not_handed_out():
    slots = HostSlots(6, 2)
    assert (slots.num_free, slots.num_used, slots.count(SlotOwner.FREE)) == (2, 0, 6)
    assert slots.take(5) == [0, 1]
    slots.make_ready(4)
    assert (slots.num_free, slots.num_used) == (2, 2)
    slots.release(0)
    assert slots.take(2) == [0, 2]  # what was used before is used first
    slots.make_ready(4)
    slots.make_ready(6)
    assert slots.take(5) == [3, 4, 5]
    assert slots.num_used == slots.num_slots == 6


@pytest.mark.parametrize("number", [1, 7])
def test_slots_get_ready_once_and_no_more_than_there_are(number):
    slots = HostSlots(6, 2)
    with pytest.raises(InvariantBroken, match=f"{number} host slots are ready, after 2 of 6"):
        slots.make_ready(number)

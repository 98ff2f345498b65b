"""Every way a host slot changes hands."""

import pytest

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_tier import HostTier
from vllm_hicache.tiers import SlotOwner


def _tier(num_slots: int = 4, chain: str = "") -> HostTier:
    """A tier with one page a letter, each under the one before."""
    tier = HostTier(num_slots, "lru")
    for i, letter in enumerate(chain):
        parent = chain[i - 1].encode() if i else None
        assert tier.publish(letter.encode(), parent, tier.allocate(1)[0]) is not None
    return tier


def test_a_published_slot_passes_from_the_operation_to_the_index():
    tier = _tier()
    (slot,) = tier.allocate(1)
    assert tier.slots.owner(slot) is SlotOwner.OPERATION
    page = tier.publish(b"a", None, slot)
    assert page.slot == slot
    assert tier.slots.owner(slot) is SlotOwner.INDEX


def test_a_page_whose_parent_has_left_gives_its_slot_back():
    tier = _tier()
    (slot,) = tier.allocate(1)
    assert tier.publish(b"b", b"a", slot) is None
    assert tier.slots.owner(slot) is SlotOwner.FREE


def test_a_page_that_came_twice_gives_the_second_slot_back():
    tier = _tier(chain="a")
    (slot,) = tier.allocate(1)
    assert tier.publish(b"a", None, slot) is None
    assert tier.slots.owner(slot) is SlotOwner.FREE
    assert tier.index.get(b"a").slot != slot


def test_an_operation_frees_only_slots_of_its_own():
    tier = _tier(chain="a")
    with pytest.raises(InvariantBroken, match="does not own it"):
        tier.free([tier.index.get(b"a").slot])


def test_a_full_host_evicts_leaf_first():
    tier = _tier(num_slots=3, chain="abc")
    assert len(tier.allocate(2)) == 2
    assert [page.page_hash for page in tier.index.pages()] == [b"a"]


def test_a_host_full_of_pinned_pages_gives_less_than_was_asked():
    tier = _tier(num_slots=3, chain="abc")
    tier.pin([tier.index.get(b"b")])
    assert len(tier.allocate(3)) == 1  # only c may leave: b is pinned and a is its parent
    assert tier.index.match([b"a", b"b", b"c"]) == 2


def test_an_unpinned_leaf_can_be_evicted_again():
    tier = _tier(num_slots=2, chain="ab")
    leaf = tier.index.get(b"b")
    tier.pin([leaf])
    assert tier.allocate(1) == []
    tier.unpin([leaf])
    assert len(tier.allocate(1)) == 1


def test_a_page_is_not_unpinned_twice():
    tier = _tier(chain="a")
    page = tier.index.get(b"a")
    tier.pin([page])
    tier.unpin([page])
    with pytest.raises(InvariantBroken, match="unpinned without a pin"):
        tier.unpin([page])


def test_clear_frees_unpinned_slots_at_once_and_pinned_ones_with_their_last_pin():
    tier = _tier(chain="abc")
    page = tier.index.get(b"b")
    tier.pin([page])
    tier.pin([page])
    assert tier.clear() == 3
    assert tier.slots.num_used == 1
    tier.unpin([page])
    assert tier.slots.owner(page.slot) is SlotOwner.INDEX
    tier.unpin([page])
    assert tier.slots.num_used == 0
    assert tier.num_pinned == 0


def test_a_cleared_host_is_filled_anew_and_evicts_only_new_pages():
    tier = _tier(num_slots=2, chain="ab")
    tier.clear()
    for page_hash in (b"x", b"y"):
        tier.publish(page_hash, None, tier.allocate(1)[0])
    tier.allocate(1)
    assert [page.page_hash for page in tier.index.pages()] == [b"y"]


def test_discard_removes_a_page_and_all_below_it():
    gone: list[bytes] = []
    tier = HostTier(8, "lru", on_evict=lambda page: gone.append(page.page_hash))
    for page_hash, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"b"), (b"e", b"a")):
        tier.publish(page_hash, parent, tier.allocate(1)[0])
    assert tier.discard(tier.index.get(b"b")) == 3
    assert sorted(page.page_hash for page in tier.index.pages()) == [b"a", b"e"]
    assert tier.slots.num_used == 2
    assert sorted(gone) == [b"b", b"c", b"d"]


def test_a_parent_whose_children_were_discarded_can_be_evicted():
    tier = _tier(num_slots=2, chain="ab")
    tier.discard(tier.index.get(b"b"))
    assert len(tier.allocate(2)) == 2
    assert len(tier.index) == 0


def test_a_discarded_page_keeps_its_slot_while_it_is_pinned():
    tier = _tier(chain="ab")
    page = tier.index.get(b"b")
    tier.pin([page])
    tier.discard(page)
    assert tier.slots.owner(page.slot) is SlotOwner.INDEX
    tier.unpin([page])
    assert tier.slots.owner(page.slot) is SlotOwner.FREE


def test_a_deep_chain_is_discarded_in_one_pass():
    tier = HostTier(3000, "lru")
    for i in range(3000):
        parent = (i - 1).to_bytes(2, "big") if i else None
        tier.publish(i.to_bytes(2, "big"), parent, tier.allocate(1)[0])
    assert tier.discard(tier.index.get((1).to_bytes(2, "big"))) == 2999
    assert len(tier.index) == 1


def _growing_tier(num_ready: int, num_slots: int) -> HostTier:
    """A tier that is full as far as it is ready; page n is the child of none."""
    tier = HostTier(num_slots, "lru", num_ready=num_ready)
    for slot in tier.allocate(num_ready):
        assert tier.publish(bytes([slot]), None, slot) is not None
    return tier


def test_no_page_is_evicted_for_want_of_slots_that_are_about_to_come():
    tier = _growing_tier(4, 10)
    assert tier.allocate(3) == []
    assert (len(tier.index), tier.has_spared) == (4, False)
    tier.make_ready(7, 10)
    assert tier.allocate(3) == [4, 5, 6]
    assert len(tier.index) == 4


def test_who_gets_a_part_of_the_slots_waits_for_the_rest():
    tier = _growing_tier(4, 10)
    tier.make_ready(6, 10)
    assert tier.allocate(4) == [4, 5]
    assert len(tier.index) == 4


def test_slots_that_come_are_waited_for_by_no_more_pages_than_fit():
    """A worker that never gets on would otherwise freeze what host holds."""
    tier = _growing_tier(4, 10)
    assert tier.allocate(7) == [0, 1, 2, 3]  # six come, that is less than these need
    tier.free([0, 1, 2, 3])
    tier = _growing_tier(4, 10)
    assert (tier.allocate(3), tier.allocate(3)) == ([], [])
    assert tier.allocate(1) == [0]
    tier.make_ready(5, 10)
    assert tier.allocate(2) == [4]
    assert len(tier.index) == 3


def test_a_tier_that_stays_short_evicts_and_protects_by_what_it_has():
    tier = _growing_tier(5, 20)
    assert (tier.is_growing, tier.max_protected) == (True, 4)
    tier.make_ready(10, 10)
    assert (tier.is_growing, tier.max_protected) == (False, 8)
    for slot in tier.allocate(5):
        tier.publish(bytes([slot]), None, slot)
    assert len(tier.allocate(2)) == 2
    assert len(tier.index) == 8

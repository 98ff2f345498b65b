"""After every single operation: ancestors of a page are in host, a leaf has no children, no pin
is negative, and each slot has the owner that the pages say.
"""

from collections import Counter
from random import Random

import pytest

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.eviction import ORDERS
from vllm_hicache.host_tier import HostTier
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.tiers import SlotOwner

NUM_SLOTS = 24


class _Host:
    """A host tier under random operations, and what must hold of it by the definition."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = Random(seed)
        self.left: list[HostPage] = []
        self.tier = HostTier(NUM_SLOTS, policy, on_evict=self._note_left)
        self.owned: list[int] = []
        self.pinned: list[HostPage] = []
        self.counts: Counter[str] = Counter()
        self._number = 0

    def _note_left(self, page: HostPage) -> None:
        self.left.append(page)

    def run(self) -> Counter[str]:
        actions = [self.publish] * 4 + [self.take, self.free, self.touch, self.protect]
        actions += [self.pin, self.pin, self.unpin, self.discard, self.clear]
        for _ in range(250):
            action = self.rng.choice(actions)
            self.left = []
            action()
            self.counts[action.__name__] += 1
            self.check()
            if action in (self.publish, self.take):
                self.counts["evicted"] += len(self.left)
                for page in self.left:
                    assert page.pins == page.num_children == 0
        return self.counts

    # Operations --------------------------------------------------------------------------------

    def publish(self) -> None:
        """A page under a page of host, under one that has left, or a second time."""
        slots = self.tier.allocate(1)
        if not slots:
            return
        pages = self.tier.index.pages()
        parents = [None, *(page.page_hash for page in pages), b"has left"]
        parent, page_hash = self.rng.choice(parents), self._name()
        if pages and self.rng.random() < 0.1:
            page_hash = self.rng.choice(pages).page_hash
        page = self.tier.publish(page_hash, parent, slots[0])
        self.counts["refused at the door"] += page is None

    def take(self) -> None:
        self.owned += self.tier.allocate(self.rng.randint(1, 3))

    def free(self) -> None:
        count = self.rng.randint(0, len(self.owned))
        self.tier.free(self.owned[:count])
        del self.owned[:count]

    def touch(self) -> None:
        if len(self.tier.index):
            self.tier.touch(self.rng.choice(self.tier.index.pages()), self.rng.randrange(3))

    def protect(self) -> None:
        if len(self.tier.index):
            self.tier.protect(self._chain(self.rng.choice(self.tier.index.pages())))

    def pin(self) -> None:
        if len(self.tier.index) and len(self.pinned) < 6:
            page = self.rng.choice(self.tier.index.pages())
            self.tier.pin([page])
            self.pinned.append(page)

    def unpin(self) -> None:
        if self.pinned:
            self.tier.unpin([self.pinned.pop(self.rng.randrange(len(self.pinned)))])

    def discard(self) -> None:
        if len(self.tier.index) and self.rng.random() < 0.3:
            self.tier.discard(self.rng.choice(self.tier.index.pages()))

    def clear(self) -> None:
        if self.rng.random() < 0.05:
            self.tier.clear()

    def _name(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(4, "big")

    def _chain(self, page: HostPage) -> list[HostPage]:
        chain = [page]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        return chain[::-1]

    # What must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        tier, pages = self.tier, self.tier.index.pages()
        children = Counter(page.parent for page in pages if page.parent is not None)
        present = set(pages)
        pins = Counter(self.pinned)
        for page in pages:
            assert page.parent is None or page.parent in present
            assert page.num_children == children[page]
            assert page.is_evictable == (not page.pins and not page.num_children)
            assert page.pins == pins[page] >= 0
        gone = {page for page in pins if page not in present}
        owners = dict.fromkeys(self.owned, SlotOwner.OPERATION)
        owners |= {page.slot: SlotOwner.INDEX for page in (*pages, *gone)}
        assert len(owners) == len(self.owned) + len(pages) + len(gone)
        for slot in range(NUM_SLOTS):
            assert tier.slots.owner(slot) is owners.get(slot, SlotOwner.FREE)
        assert tier.num_pinned == len(pins)
        assert set(tier.protected_pages()) <= present
        assert tier.num_protected <= tier.max_protected


@pytest.mark.parametrize("policy", ORDERS)
def test_the_rules_hold_after_every_random_operation(policy):
    total: Counter[str] = Counter()
    for seed in range(12):
        total += _Host(policy, seed).run()
    assert total["evicted"] > 200
    assert total["refused at the door"] > 50
    assert min(total[name] for name in ("clear", "discard", "pin", "unpin", "protect")) > 50


def test_a_page_that_is_unpinned_too_often_stops_the_engine():
    tier = HostTier(1, "lru")
    page = tier.publish(b"a", None, tier.allocate(1)[0])
    tier.pin([page])
    tier.unpin([page])
    with pytest.raises(InvariantBroken, match="without a pin"):
        tier.unpin([page])
    assert page.pins == 0

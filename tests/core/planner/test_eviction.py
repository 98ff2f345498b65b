"""Victims of all policies against a brute-force choice over random forests."""

from random import Random

import pytest

from vllm_hicache.eviction import ORDERS, PROTECTED_USES, EvictionQueue
from vllm_hicache.host_tier import HostTier
from vllm_hicache.prefix_index import HostPage


class _Forest:
    """A host tier with random chains, and what a plain search says of it."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = Random(seed)
        self.policy = policy
        self.evicted: list[bytes] = []
        self.tier = HostTier(24, policy, on_evict=lambda page: self.evicted.append(page.page_hash))
        self.pinned: list[HostPage] = []
        self._num_pages = 0

    def expected_victim(self) -> bytes | None:
        """The evictable page with the smallest key, found by looking at all of them."""
        leaves = [page for page in self.tier.index.pages() if page.is_evictable]
        if not leaves:
            return None
        return min(leaves, key=ORDERS[self.policy]).page_hash

    def add(self) -> None:
        """A page under a random parent; evicts the expected victim where no slot is free."""
        parents = [None, *self.tier.index.pages()]
        parent = self.rng.choice(parents)
        if parent is not None:
            self.tier.pin([parent])
        expected = None if self.tier.slots.num_free else self.expected_victim()
        before = len(self.evicted)
        slots = self.tier.allocate(1)
        assert self.evicted[before:] == ([expected] if expected is not None else [])
        if slots:
            self._num_pages += 1
            page_hash = self._num_pages.to_bytes(4, "big")
            page = self.tier.publish(page_hash, parent and parent.page_hash, slots[0])
            page.priority = self.rng.randrange(3)
        if parent is not None:
            self.tier.unpin([parent])

    def touch(self) -> None:
        pages = self.tier.index.pages()
        if pages:
            self.tier.touch(self.rng.choice(pages))

    def pin(self) -> None:
        pages = self.tier.index.pages()
        if pages and len(self.pinned) < 4:
            self.pinned.append(self.rng.choice(pages))
            self.tier.pin(self.pinned[-1:])

    def unpin(self) -> None:
        if self.pinned:
            self.tier.unpin([self.pinned.pop(self.rng.randrange(len(self.pinned)))])

    def discard(self) -> None:
        pages = self.tier.index.pages()
        if pages and self.rng.random() < 0.1:
            self.tier.discard(self.rng.choice(pages))


@pytest.mark.parametrize("policy", ORDERS)
def test_the_victim_is_always_the_evictable_page_with_the_smallest_key(policy):
    num_evictions = 0
    for seed in range(15):
        forest = _Forest(policy, seed)
        actions = [forest.add] * 3 + [forest.touch, forest.pin, forest.unpin, forest.discard]
        for _ in range(150):
            forest.rng.choice(actions)()
        num_evictions += len(forest.evicted)
    assert num_evictions > 300


def _tier_with_pages(policy: str, count: int) -> tuple[HostTier, list[HostPage], list[bytes]]:
    evicted: list[bytes] = []
    tier = HostTier(count, policy, on_evict=lambda page: evicted.append(page.page_hash))
    pages = [tier.publish(bytes([i]), None, tier.allocate(1)[0]) for i in range(count)]
    return tier, pages, evicted


def test_slru_protects_pages_that_were_used_again_from_newer_ones():
    tier, pages, evicted = _tier_with_pages("slru", 3)
    for _ in range(PROTECTED_USES - 1):
        tier.touch(pages[0])
    tier.allocate(2)
    assert evicted == [bytes([1]), bytes([2])]


def test_lfu_keeps_what_was_used_most():
    tier, pages, evicted = _tier_with_pages("lfu", 3)
    for page, uses in zip(pages, (3, 1, 2), strict=True):
        for _ in range(uses):
            tier.touch(page)
    tier.allocate(3)
    assert evicted == [bytes([1]), bytes([2]), bytes([0])]


def test_priority_comes_before_age():
    tier, pages, evicted = _tier_with_pages("priority", 3)
    pages[0].priority = 1
    tier.touch(pages[2])
    tier.touch(pages[1])
    tier.pin(pages)
    tier.unpin(pages)
    tier.allocate(3)
    assert evicted[-1] == bytes([0])


def test_a_parent_is_as_recent_as_the_last_child_that_left():
    evicted: list[bytes] = []
    tier = HostTier(3, "lru", on_evict=lambda page: evicted.append(page.page_hash))
    for page_hash, parent in ((b"a", None), (b"b", b"a"), (b"x", None)):
        tier.publish(page_hash, parent, tier.allocate(1)[0])
    tier.touch(tier.index.get(b"b"))
    tier.free(tier.allocate(1))
    assert evicted == [b"x"]  # older than b, although a itself is older still
    tier.publish(b"y", None, tier.allocate(1)[0])
    tier.touch(tier.index.get(b"b"))
    tier.free(tier.allocate(2))
    assert evicted == [b"x", b"y", b"b"]


def test_a_page_has_one_entry_however_often_it_is_offered():
    queue = EvictionQueue("lru")
    page = HostPage(b"a", None, 0)
    for _ in range(5):
        queue.offer(page)
    assert len(queue) == 1
    assert queue.pop() is page
    assert queue.pop() is None


def test_pinning_and_unpinning_does_not_grow_the_queue():
    tier = HostTier(2, "lru")
    page = tier.publish(b"a", None, tier.allocate(1)[0])
    for _ in range(100):
        tier.pin([page])
        tier.unpin([page])
    assert tier.num_queued == 1

"""Admission to a full host: a scan does not displace what several requests use."""

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from planner_rig import Rig

from vllm_hicache.eviction import ORDERS
from vllm_hicache.host_tier import PROTECTED_SHARE, HostTier
from vllm_hicache.page_uses import POOLS_REMEMBERED, PageUses

if TYPE_CHECKING:
    from vllm_hicache.prefix_index import HostPage

NUM_SLOTS = 200
PAGES = 5
"""Pages of a prompt of the hot set."""


class _Clients:
    """Requests that save and reuse whole prompts through a real planner, one after the other."""

    def __init__(self, **options) -> None:
        self.rig = Rig(num_slots=NUM_SLOTS, page=4, block=4, **options)
        self._number = 0

    def ask(self, first_token: int, num_pages: int) -> int:
        """A prompt of so many pages of its own; returns how many of them were in host."""
        rig = self.rig
        self._number += 1
        state = rig.request(
            f"r{self._number}", [first_token] * 4 * num_pages, may_load=False, why_not="not_wanted"
        )
        hits = rig.in_host(state)
        rig.compute(state, 4 * num_pages)
        rig.plan()
        rig.finish_saves()
        rig.planner.finish(state, rig.now)
        return hits

    def hit_rate(self, prompts: range) -> float:
        hits = [self.ask(prompt, PAGES) for prompt in prompts]
        return sum(hits) / (PAGES * len(hits))

    def scan(self, num_pages: int, length: int = 20) -> None:
        """Documents that nobody asks for again."""
        for i in range(num_pages // length):
            self.ask(100_000 + i, length)


def _hot(share: float) -> range:
    return range(int(NUM_SLOTS * share / PAGES))


def _loss(share: float, **options) -> float:
    clients = _Clients(**options)
    for _ in range(3):
        before = clients.hit_rate(_hot(share))
    assert before == 1.0
    clients.scan(4 * NUM_SLOTS)
    return before - clients.hit_rate(_hot(share))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru"])
def test_a_scan_of_four_pools_costs_the_hot_set_at_most_five_points(share, eviction):
    assert _loss(share, eviction=eviction) <= 0.05


def test_the_default_settings_withstand_a_scan():
    assert _loss(0.75) <= 0.05


def test_without_admission_a_scan_takes_everything():
    assert _loss(0.5, admission="always") == 1.0


def test_a_scan_of_one_long_document_costs_nothing_either():
    clients = _Clients()
    for _ in range(3):
        clients.hit_rate(_hot(0.5))
    clients.ask(100_000, 4 * NUM_SLOTS)
    assert clients.hit_rate(_hot(0.5)) == 1.0
    assert clients.rig.total("save_skipped_tokens/not_admitted") > 0
    clients.rig.audit()


def test_what_is_saved_of_a_document_is_its_beginning():
    clients = _Clients()
    for _ in range(3):
        clients.hit_rate(_hot(0.5))
    clients.ask(100_000, 4 * NUM_SLOTS)
    state = clients.rig.request("look", [100_000] * 4 * 4 * NUM_SLOTS)
    pages = clients.rig.planner.host.index.pages()
    assert (
        clients.rig.in_host(state)
        == sum(page.page_hash in set(state.tokens.page_hashes(4 * NUM_SLOTS)) for page in pages)
        > 0
    )


def test_a_new_hot_set_replaces_one_that_is_not_used_any_more():
    clients = _Clients()
    for _ in range(3):
        clients.hit_rate(_hot(0.8))
    new = range(1000, 1000 + len(_hot(0.6)))
    rates = [clients.hit_rate(new) for _ in range(5)]
    assert rates[-1] == 1.0


def test_a_working_set_that_is_used_once_a_round_is_kept_as_by_plain_recency():
    rates = {}
    for admission in ("probation", "always"):
        clients, rng = _Clients(admission=admission), Random(7)
        turns: Counter[int] = Counter()
        hits = total = 0
        for _ in range(600):
            conversation = rng.randrange(25) + 25 * (len(turns) // 50)
            turns[conversation] += 1
            pages = min(2 * turns[conversation], 12)
            hits += clients.ask(conversation, pages)
            total += pages
        rates[admission] = hits / total
    assert rates["probation"] > rates["always"] - 0.02


def test_the_same_requests_leave_the_same_pages():
    def pages() -> list[bytes]:
        clients = _Clients()
        for _ in range(2):
            clients.hit_rate(_hot(0.9))
        clients.scan(2 * NUM_SLOTS)
        return [page.page_hash for page in clients.rig.planner.host.index.pages()]

    assert pages() == pages()


def test_a_fetch_from_storage_may_take_any_place():
    tier = HostTier(10, "lru")
    pages = [tier.publish(bytes([i]), None, tier.allocate(1)[0]) for i in range(10)]
    tier.protect(pages)
    assert len(tier.allocate(10)) == 10


def test_priorities_decide_alone_where_they_are_the_policy():
    tier = HostTier(2, "priority")
    high, low = [tier.publish(name, None, tier.allocate(1)[0]) for name in (b"h", b"l")]
    high.priority = 5
    tier.protect([low])
    assert tier.num_protected == 1
    assert len(tier.allocate(1, 0)) == 1
    assert tier.index.get(b"l") is None


def test_protection_is_bounded_and_lost_by_the_page_that_was_used_longest_ago():
    tier = HostTier(10, "lru")
    pages = [tier.publish(bytes([i]), None, tier.allocate(1)[0]) for i in range(10)]
    for page in pages:
        tier.protect([page])
    assert tier.protected_pages() == pages[2:]
    assert tier.num_protected == int(10 * PROTECTED_SHARE)
    tier.protect(pages[2:3])
    tier.protect(pages[:1])
    assert tier.protected_pages() == [*pages[4:], pages[2], pages[0]]


def test_the_end_of_a_chain_loses_its_protection_before_its_beginning():
    tier = HostTier(5, "lru")
    chain: list[HostPage] = []
    for i in range(5):
        parent = chain[-1].page_hash if chain else None
        chain.append(tier.publish(bytes([i]), parent, tier.allocate(1)[0]))
    tier.protect(chain)
    assert set(tier.protected_pages()) == set(chain[:4])
    assert len(tier.allocate(2, 0)) == 1
    assert tier.has_spared


def test_a_burst_of_requests_for_one_prefix_protects_it_once_and_keeps_it():
    clients = _Clients()
    clients.ask(1, 20)
    for _ in range(3):
        clients.ask(1, 20)
    clock = clients.rig.planner.host._protections
    for _ in range(50):
        clients.ask(1, 20)
    assert clients.rig.planner.host._protections == clock
    for i in range(20):  # others are protected; the prefix goes on being used
        for _ in range(2):
            clients.ask(1000 + i, 10)
        assert clients.ask(1, 20) == 20
    assert clients.rig.planner.host._protections > clock + 200


class _Forest:
    """A host tier with random chains, protections and pins, and what a plain search says."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = Random(seed)
        self.policy = policy
        self.evicted: list[bytes] = []
        self.tier = HostTier(24, policy, on_evict=lambda page: self.evicted.append(page.page_hash))
        self.tier.max_protected = self.rng.choice((4, 19, 24))
        self.pinned: list[HostPage] = []
        self.num_pages = 0

    def add(self) -> None:
        proven = self.rng.choice((None, 0, 1))
        leaves = [page for page in self.tier.index.pages() if page.is_evictable]
        victim = min(leaves, key=ORDERS[self.policy], default=None)
        spares = proven == 0 and self.policy != "priority"
        if self.tier.slots.num_free or (spares and victim is not None and victim.is_protected):
            victim = None
        before = len(self.evicted)
        slots = self.tier.allocate(1, proven)
        assert self.evicted[before:] == ([victim.page_hash] if victim is not None else [])
        if slots:
            self.num_pages += 1
            parent = self.rng.choice([None, *self.tier.index.pages()])
            name = self.num_pages.to_bytes(4, "big")
            self.tier.publish(name, parent and parent.page_hash, slots[0])

    def protect(self) -> None:
        pages = self.tier.index.pages()
        pages = [page for page in pages if not page.is_protected] or pages
        page = self.rng.choice(pages) if pages else None
        chain: list[HostPage] = []
        while page is not None:
            chain.append(page)
            page = page.parent
        self.tier.protect(chain[::-1])

    def pin(self) -> None:
        pages = self.tier.index.pages()
        if pages and len(self.pinned) < 4:
            self.pinned.append(self.rng.choice(pages))
            self.tier.pin(self.pinned[-1:])
        elif self.pinned:
            self.tier.unpin([self.pinned.pop(0)])

    def touch(self) -> None:
        pages = self.tier.index.pages()
        if pages:
            self.tier.touch(self.rng.choice(pages), self.rng.randrange(3))

    def discard(self) -> None:
        pages = self.tier.index.pages()
        if pages and self.rng.random() < 0.1:
            self.tier.discard(self.rng.choice(pages))


@pytest.mark.parametrize("policy", ORDERS)
def test_the_victim_is_the_smallest_key_also_when_pages_gain_and_lose_protection(policy):
    num_evicted = num_spared = 0
    for seed in range(15):
        forest = _Forest(policy, seed)
        actions = [forest.add, forest.add, forest.touch, forest.protect, forest.pin, forest.discard]
        for _ in range(400):
            forest.rng.choice(actions)()
            num_spared += forest.tier.has_spared
            protected = {p for p in forest.tier.index.pages() if p.is_protected}
            assert set(forest.tier.protected_pages()) == protected
        num_evicted += len(forest.evicted)
    assert num_evicted > 300
    assert policy == "priority" or num_spared > 50


def test_uses_of_many_more_pages_than_remembered_stay_bounded():
    uses = PageUses(100)
    for i in range(10_000):
        uses.note([i.to_bytes(4, "big")])
    assert len(uses) == 100
    assert POOLS_REMEMBERED >= 4  # a scan of four pools does not make the hot set unknown

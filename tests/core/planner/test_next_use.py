"""The eviction policy `next_use`: hit rates beside those of `lru`, and its order by definition."""

from collections.abc import Iterable, Iterator
from random import Random

import pytest

from vllm_hicache.host_tier import HostTier
from vllm_hicache.next_use_queue import COMPACT_FROM
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.reuse_times import OVERDUE

Turn = tuple[str, list[bytes]]
"""Request and the pages of its prompt."""


class _Pages:
    """Pages that nobody had before, and conversations made of them."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = Random(seed)
        self._number = 0

    def new(self, count: int) -> list[bytes]:
        self._number += count
        return [i.to_bytes(4, "big") for i in range(self._number - count, self._number)]

    def in_turns(self, num_conversations: int, num_rounds: int, grow: int) -> Iterator[Turn]:
        """Conversations that take turns, each ``grow`` pages longer than before."""
        talks: list[list[bytes]] = [[] for _ in range(num_conversations)]
        for number in range(num_rounds):
            for i, talk in enumerate(talks):
                talk += self.new(grow)
                yield f"{i}-{number}", list(talk)

    def at_random(self, num_conversations: int, num_turns: int, length: int) -> Iterator[Turn]:
        """Conversations of one length in no order at all."""
        talks = [self.new(length) for _ in range(num_conversations)]
        for number in range(num_turns):
            yield str(number), self.rng.choice(talks)


def _serve(tier: HostTier, request: str, prompt: list[bytes]) -> int:
    """One request as saves treat it; returns the pages that host had."""
    found = tier.index.match(prompt, len(prompt))
    if found:
        tier.touch(tier.index.get(prompt[found - 1]), user=request)
    rest, parent = prompt[found:], prompt[found - 1] if found else None
    if not rest:
        return found
    anchor = [tier.index.get(parent)] if parent is not None else []
    gap = tier.expected_gap(rest[0], parent)
    tier.pin(anchor)
    slots = tier.allocate(len(rest), use_gap=gap)
    tier.unpin(anchor)
    tier.note_refused(rest[len(slots) :])
    for page_hash, slot in zip(rest, slots, strict=False):
        tier.publish(page_hash, parent, slot, user=request)
        parent = page_hash
    return found


def _hit_rate(policy: str, num_slots: int, turns: Iterable[Turn]) -> float:
    tier = HostTier(num_slots, policy)
    found = asked = 0
    for request, prompt in turns:
        found += _serve(tier, request, prompt)
        asked += len(prompt)
    return found / asked


def test_conversations_that_take_turns_keep_what_fits_where_lru_loses_nearly_all():
    """30 conversations end with 24 pages each: 720, of which 480 fit."""
    rates = {
        policy: _hit_rate(policy, 480, _Pages().in_turns(30, num_rounds=12, grow=2))
        for policy in ("lru", "next_use")
    }
    best = _hit_rate("lru", 720, _Pages().in_turns(30, num_rounds=12, grow=2))
    assert best == pytest.approx(66 / 78)
    assert rates["lru"] < 0.5
    assert rates["next_use"] > 0.72


def test_a_set_much_larger_than_host_keeps_nearly_the_share_that_fits():
    prompts = [prompt for _, prompt in _Pages().in_turns(40, num_rounds=1, grow=10)]
    turns = [(f"{i}-{n}", prompt) for n in range(20) for i, prompt in enumerate(prompts)]
    assert _hit_rate("lru", 200, turns) == 0
    assert _hit_rate("next_use", 200, turns) > 0.4  # half of it fits


def test_where_conversations_come_in_no_order_little_is_lost():
    turns = list(_Pages().at_random(40, 2000, length=10))
    lru, next_use = (_hit_rate(policy, 240, turns) for policy in ("lru", "next_use"))
    assert 0.5 < lru < 0.65
    assert next_use > 0.9 * lru


@pytest.mark.parametrize("num_rounds", [2, 3, 5])
def test_a_scan_of_four_pools_leaves_the_hot_set(num_rounds):
    pages, tier = _Pages(), HostTier(100, "next_use")
    hot = [pages.new(10) for _ in range(7)]
    for number in range(num_rounds):
        for i, prompt in enumerate(hot):
            _serve(tier, f"{i}-{number}", prompt)
    for number in range(40):
        _serve(tier, f"scan-{number}", pages.new(10))
    assert sum(_serve(tier, f"{i}-after", prompt) for i, prompt in enumerate(hot)) == 70


def test_conversations_that_have_ended_make_room_for_new_ones_within_some_rounds():
    pages, tier = _Pages(), HostTier(100, "next_use")
    for request, prompt in pages.in_turns(10, num_rounds=5, grow=2):
        _serve(tier, f"old-{request}", prompt)
    new = [pages.new(10) for _ in range(10)]
    found = [
        sum(_serve(tier, f"{i}-{number}", prompt) for i, prompt in enumerate(new))
        for number in range(6)
    ]
    assert found[0] == 0
    assert found[-1] >= 90


def test_gaps_that_were_short_by_chance_cost_a_conversation_nothing_while_older_pages_lie_idle():
    """As when a device still holds all of two turns, and then does not."""
    pages, tier = _Pages(), HostTier(160, "next_use")
    for number in range(10):
        _serve(tier, f"before-{number}", pages.new(10))
    talks = [pages.new(5) for _ in range(8)]
    for i, talk in enumerate(talks):  # each turn right after the one before
        _serve(tier, f"{i}-0", talk)
        talk += pages.new(2)
        assert _serve(tier, f"{i}-1", talk) == 5
    for number in range(2, 6):
        for i, talk in enumerate(talks):
            assert _serve(tier, f"{i}-{number}", talk) == len(talk)
            talk += pages.new(2)
            _serve(tier, f"{i}-{number}-answer", talk)


def test_what_was_not_saved_is_saved_when_it_comes_back_sooner_than_others():
    pages, tier = _Pages(), HostTier(40, "next_use")
    slow = [pages.new(10) for _ in range(4)]
    quick = pages.new(10)
    for number in range(4):
        for i, prompt in enumerate(slow):
            _serve(tier, f"{i}-{number}", prompt)
    assert [_serve(tier, f"quick-{n}", quick) for n in range(3)] == [0, 0, 10]


def test_one_request_that_looks_twice_is_one_use():
    tier = HostTier(4, "next_use")
    page = tier.publish(b"a", None, tier.allocate(1)[0], user="first")
    for _ in range(3):
        tier.touch(page, user="first")
    assert (page.num_uses, page.use_gap) == (1, 0)
    for user in ("second", "second"):
        tier.touch(page, user=user)
    assert page.num_uses == 2
    assert page.use_gap > 0


def test_a_page_that_is_used_again_and_again_leaves_no_trail_in_the_queue():
    tier = HostTier(4, "next_use")
    page = tier.publish(b"a", None, tier.allocate(1)[0])
    for _ in range(1000):
        tier.touch(page)
    assert tier.num_queued == 1
    assert tier._queue.num_entries <= COMPACT_FROM + 4


# The order, by its definition ---------------------------------------------------------------------


def _is_overdue(tier: HostTier, page: HostPage) -> bool:
    allowed = max(OVERDUE * page.reuse_gap, page.use_gap)
    return bool(page.use_gap) and page.reuses_then + allowed < tier._times.reuses


def _key(tier: HostTier, page: HostPage) -> tuple[int, int]:
    if not page.use_gap or _is_overdue(tier, page):
        return 0, page.last_use
    return 1, -(page.used_at + page.use_gap)


@pytest.mark.parametrize("seed", range(20))
def test_the_victim_is_always_the_one_that_the_definition_names(seed):
    rng, pages = Random(seed), _Pages(seed)
    keys: list[tuple[int, int]] = []
    kinds = set()

    def note(page: HostPage) -> None:
        keys.append(_key(tier, page))
        kinds.add((keys[-1][0], _is_overdue(tier, page)))

    tier = HostTier(24, "next_use", on_evict=note)
    pinned: list[HostPage] = []
    for number in range(400):
        host = tier.index.pages()
        action = rng.choice(("add", "add", "add", "touch", "touch", "pin", "unpin"))
        if action == "touch" and host:
            tier.touch(rng.choice(host), user=f"{number}")
        elif action == "pin" and host and len(pinned) < 4:
            pinned.append(rng.choice(host))
            tier.pin(pinned[-1:])
        elif action == "unpin" and pinned:
            tier.unpin([pinned.pop(rng.randrange(len(pinned)))])
        elif action == "add":
            parent = rng.choice([None, *host])
            tier.pin([parent] if parent is not None else [])
            keys.clear()
            leaves = [_key(tier, page) for page in tier.index.pages() if page.is_evictable]
            slots = tier.allocate(1)
            if keys:
                assert keys == [min(leaves)]
            tier.unpin([parent] if parent is not None else [])
            if slots:
                parent_hash = parent.page_hash if parent is not None else None
                tier.publish(pages.new(1)[0], parent_hash, slots[0], user=f"{number}")
    assert kinds >= {(0, False), (0, True)}

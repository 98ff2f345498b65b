"""Requests that wait for a retry, in a planner whose partners say what a test tells them."""

from planner_rig import Rig

from vllm_hicache.storage_messages import Exists, Fetch

PROMPT = list(range(100, 125))  # six whole pages of four tokens, and one token


def retry_rig(num_slots: int = 40, **fetch) -> Rig:
    return Rig(has_storage=True, num_slots=num_slots, fetch=fetch)


def missed(rig: Rig, name: str = "a"):
    """A request that waits, and storage had nothing for it."""
    state = rig.request(name, PROMPT)
    assert rig.answer_query(0) is None
    return state


def short(rig: Rig, num_pages: int = 2, **fields):
    """A request that waits, and storage had so many of its six pages."""
    state = rig.request("a", PROMPT, **fields)
    rig.end_fetch(rig.answer_query(num_pages).op, num_pages)
    return state


def asked_at(rig: Rig, now: float) -> int:
    """How often storage has been asked when a step has been planned at this time."""
    rig.now = now
    rig.plan()
    return rig.channels.count(Exists)


def retry_finds(rig: Rig, num_pages: int, now: float = 1.0) -> Fetch:
    before = rig.channels.count(Exists)
    assert asked_at(rig, now) == before + 1
    fetch = rig.answer_query(num_pages)
    assert fetch is not None
    return fetch


def empty_host(rig: Rig) -> None:
    """Other requests need all of host but what is pinned."""
    host = rig.planner.host
    host.free(host.allocate(host.slots.num_slots))
    rig.audit()


def ends_clean(rig: Rig, *states) -> None:
    for state in states:
        rig.planner.finish(state, rig.now)
    assert rig.planner.prefetcher.num_occupied == 0
    assert rig.planner.host.num_pinned == 0
    rig.audit(is_idle=True)


def all_in_host(rig: Rig, num_tokens: int = 24):
    """A request that waits, and so many of its tokens are in host."""
    rig.fill_host(PROMPT[:num_tokens])
    rig.end_persists()
    return rig.request("a", PROMPT)

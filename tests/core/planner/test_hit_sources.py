"""Where the tokens of one request came from: device, host and storage add up to what was cached."""

from random import Random

import pytest
from planner_rig import Rig

from vllm_hicache.storage_messages import FetchReleased, FetchSettled

PAGE = 4
TOKENS = list(range(100, 200))
NUM_PAGES = 8


def _rig(**options: object) -> Rig:
    return Rig(has_storage=True, shares_device_pages=False, **options)


def _lookup_of(rig: Rig, num_host: int, num_fetched: int):
    """A request of eight pages: so many in host before, so many more come from storage."""
    if num_host:
        rig.fill_host(TOKENS[: num_host * PAGE], name="host")
        rig.end_persists()
    state = rig.request("a", TOKENS[: NUM_PAGES * PAGE + 1])
    fetch = rig.answer_query(NUM_PAGES - num_host)
    if fetch is not None:
        rig.say(FetchSettled(fetch.op, num_fetched, "corrupt"))
        rig.say(FetchReleased(fetch.op))
    return state


def _load(rig: Rig, state, num_local: int) -> tuple[int, int]:
    """(host, storage) tokens of its load, once it has landed."""
    load = rig.begin_load(state, num_local * PAGE)
    rig.plan()
    rig.finish_loads()
    assert rig.total("served_tokens/storage") == load.num_storage_tokens
    assert rig.total("served_tokens/host") == load.num_tokens - load.num_storage_tokens
    return load.num_tokens - load.num_storage_tokens, load.num_storage_tokens


@pytest.mark.parametrize("num_local", range(8))
@pytest.mark.parametrize(("num_host", "num_fetched"), [(0, 8), (3, 5), (3, 2), (7, 1)])
def test_every_token_behind_the_local_hit_has_the_tier_that_brought_its_page(
    num_host, num_fetched, num_local
):
    rig = _rig()
    state = _lookup_of(rig, num_host, num_fetched)
    end = num_host + num_fetched
    if num_local >= end:
        assert rig.match(state, num_local * PAGE).num_tokens == 0
        return
    host, storage = _load(rig, state, num_local)
    assert host == max(0, num_host - num_local) * PAGE
    assert storage == (end - max(num_host, num_local)) * PAGE
    assert num_local * PAGE + host + storage == end * PAGE
    assert rig.total("local_tokens") == num_local * PAGE


@pytest.mark.parametrize("num_lost", range(1, 6))
def test_a_tail_from_storage_that_leaves_host_before_the_admission_counts_nowhere_as_cached(
    num_lost,
):
    """Three pages of host and five of storage; the last ones leave between lookup and load."""
    rig = _rig(fetch={"max_retries": 0})  # or storage would be asked again
    state = _lookup_of(rig, 3, 5)
    assert rig.match(state).num_tokens == 8 * PAGE
    rig.planner.host.discard(rig.page_of(state, NUM_PAGES - num_lost))
    host, storage = _load(rig, state, 0)
    assert (host, storage) == (3 * PAGE, (5 - num_lost) * PAGE)
    assert rig.total("unserved_tokens/evicted") == num_lost * PAGE
    assert rig.total("found_tokens/storage") == 5 * PAGE
    assert rig.total("found_tokens/host") == 3 * PAGE
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


def test_a_page_counts_as_from_storage_for_its_first_reader_and_as_from_host_for_the_next():
    rig = _rig()
    first = _lookup_of(rig, 3, 5)
    assert _load(rig, first, 0) == (3 * PAGE, 5 * PAGE)
    second = rig.request("b", TOKENS[: NUM_PAGES * PAGE + 1])
    load = rig.begin_load(second)
    assert (load.num_tokens, load.num_storage_tokens) == (8 * PAGE, 0)


def test_a_load_that_ends_inside_a_page_counts_the_part_that_is_loaded():
    rig = _rig(page=16, block=4)
    rig.request("a", TOKENS[:32])
    fetch = rig.answer_query(2)
    rig.end_fetch(fetch.op, 2)
    state = rig.request("b", TOKENS[:32])
    load = rig.begin_load(state, num_local=4)
    assert (load.first_token, load.last_token) == (4, 28)
    assert load.num_storage_tokens == 24


def test_sources_of_many_requests_add_up_to_what_was_loaded_for_them():
    rng = Random(3)
    rig = _rig(num_slots=48, fetch={"max_share": 1.0})
    loaded = stored = 0
    for number in range(200):
        ids = [rng.randrange(4), *TOKENS[: rng.choice((8, 16, 24, 32))]]
        state = rig.request(f"r{number}", ids)
        if state.fetch is not None:
            wanted = len(state.fetch.hashes)
            fetch = rig.answer_query(rng.randint(0, wanted))
            if fetch is not None:
                rig.end_fetch(fetch.op, rng.randint(0, wanted), reason="corrupt")
        num_local = rng.randrange(len(ids) // PAGE) * PAGE
        rig.match(state, num_local)
        rig.planner.host.free(rig.planner.host.allocate(rng.randrange(40)))
        match = rig.match(state, num_local)
        if match.num_tokens:
            blocks = rig.new_blocks(len(ids))
            load = rig.planner.begin_load(state, match.num_tokens, blocks, rig.now)
            assert 0 <= load.num_storage_tokens <= load.num_tokens == match.num_tokens
            loaded += load.num_tokens
            stored += load.num_storage_tokens
            rig.plan()
            rig.finish_loads()
        rig.compute(state, len(ids))
        rig.plan()
        rig.finish_saves()
        rig.planner.finish(state, rig.now)
        rig.end_persists()
    assert rig.total("served_tokens/storage") == stored > 200
    assert rig.total("served_tokens/host") == loaded - stored > 200
    rig.audit(is_idle=True)

"""How much of the host tier fetches may fill: all together, and those of one tenant."""

from planner_rig import Rig

from vllm_hicache.planner import NO_MATCH
from vllm_hicache.storage_messages import unpack_slots

PROMPT = list(range(100, 125))  # six whole pages of four tokens, and one token


def _rig(**fetch) -> Rig:
    return Rig(has_storage=True, num_slots=40, fetch=fetch)


def _ask(rig: Rig, name: str, tenant: str = ""):
    """A request with a prompt of its own; its fetch of six pages, as far as there is room."""
    state = rig.request(name, [len(name), ord(name[0]), *PROMPT[2:]], tenant=tenant)
    fetch = rig.answer_query(6)
    return state, fetch, len(unpack_slots(fetch.slots)) if fetch is not None else 0


def test_one_tenant_fills_no_more_than_its_part():
    rig = _rig()  # half of 40 pages in all, a quarter of them for one tenant
    assert [_ask(rig, name, "red")[2] for name in "abc"] == [6, 4, 0]
    assert rig.total("fetch_ended/tenant_limit") == 1


def test_a_tenant_at_its_limit_leaves_the_others_their_part():
    rig = _rig()
    for name in "ab":
        _ask(rig, name, "red")
    assert [_ask(rig, name, "blue")[2] for name in "cd"] == [6, 4]
    assert _ask(rig, "e", "green")[2] == 0
    assert rig.total("fetch_ended/host_full") == 1


def test_requests_without_a_tenant_share_only_the_whole():
    rig = _rig()
    assert [_ask(rig, name)[2] for name in "abcd"] == [6, 6, 6, 2]


def test_both_limits_are_options():
    rig = _rig(max_share=0.9, max_tenant_share=0.1)
    assert [_ask(rig, name, "red")[2] for name in "ab"] == [4, 0]
    assert [_ask(rig, name)[2] for name in "cdef"] == [6, 6, 6, 6]


def test_pages_that_storage_has_and_the_limit_refuses_have_their_reason():
    rig = _rig()
    for name in "ab":
        _ask(rig, name, "red")
    state, _, _ = _ask(rig, "c", "red")
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.total("found_tokens/storage") == 24
    assert rig.total("unserved_tokens/tenant_limit") == 24
    rig.planner.ledger.balance()


def test_pages_that_arrived_count_until_their_request_has_taken_them():
    rig = _rig()
    state, fetch, _ = _ask(rig, "a", "red")
    rig.end_fetch(fetch.op, 6)
    assert _ask(rig, "b", "red")[2] == 4
    rig.begin_load(state)
    assert _ask(rig, "c", "red")[2] == 6


def test_an_aborted_request_gives_its_room_back_when_no_worker_writes_any_more():
    rig = _rig()
    state, fetch, _ = _ask(rig, "a", "red")
    rig.planner.finish(state, rig.now)
    assert rig.planner.prefetcher.num_occupied == 6
    rig.end_fetch(fetch.op, 2, reason="cancelled")
    assert rig.planner.prefetcher.num_occupied == 0
    assert _ask(rig, "b", "red")[2] == 6


def test_a_fetch_that_ends_short_gives_its_room_back_with_its_request():
    rig = _rig()
    state, fetch, _ = _ask(rig, "a", "red")
    rig.end_fetch(fetch.op, 1, reason="corrupt")
    assert rig.planner.prefetcher.num_occupied == 6
    rig.planner.finish(state, rig.now)
    assert rig.planner.prefetcher.num_occupied == 0


def test_a_dead_storage_process_keeps_its_room_until_its_successor_says_hello():
    from vllm_hicache.storage_channel import ChannelDown, ChannelUp

    rig = _rig()
    state, _, _ = _ask(rig, "a", "red")
    rig.say(ChannelDown())
    rig.planner.finish(state, rig.now)
    assert rig.planner.prefetcher.num_occupied == 6
    rig.say(ChannelUp(2))
    assert rig.planner.prefetcher.num_occupied == 0
    rig.audit(is_idle=True)


def test_two_requests_for_one_prefix_count_once():
    rig = _rig()
    first, fetch, _ = _ask(rig, "a", "red")
    second = rig.request("again", first.tokens.ids, tenant="red")
    assert rig.planner.prefetcher.num_occupied == 6
    rig.end_fetch(fetch.op, 6)
    rig.planner.finish(first, rig.now)
    assert rig.planner.prefetcher.num_occupied == 6
    rig.planner.finish(second, rig.now)
    assert rig.planner.prefetcher.num_occupied == 0

"""Persists: what goes to storage, what stays pinned meanwhile, and what is tried again."""

import pytest
from planner_rig import NAMESPACE, Rig

from vllm_hicache.persists import (
    FULL_RETRY_S,
    MAX_PAGES_PER_PERSIST,
    PERSIST_TIMEOUT_FACTOR,
    RETRY_S,
)
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import (
    Exists,
    Persist,
    PersistDone,
    PersistReleased,
    StorageTimes,
    Switching,
    unpack_hashes,
    unpack_slots,
)

TOKENS = list(range(100, 140))


def _rig(**options) -> Rig:
    return Rig(has_storage=True, **options)


def _sent(rig: Rig) -> list[Persist]:
    return [message for message in rig.channels.sent[0] if isinstance(message, Persist)]


def test_a_page_goes_to_storage_as_soon_as_it_is_in_host():
    rig = _rig()
    state = rig.fill_host(TOKENS[:8])
    (persist,) = _sent(rig)
    assert unpack_hashes(persist.hashes) == state.tokens.page_hashes(2)
    assert unpack_slots(persist.slots) == [rig.page_of(state, i).slot for i in range(2)]
    assert persist.namespace == NAMESPACE


def test_pages_stay_pinned_until_the_last_worker_has_released_them():
    rig = _rig(num_workers=2, num_slots=2)
    state = rig.fill_host(TOKENS[:8])
    done, released = PersistDone(1, 2, 0, 0, "complete"), PersistReleased(1)
    for events in ([done, None], [released, done]):
        rig.say(*events)
        assert rig.planner.host.num_pinned == 2
    rig.say(None, released)
    assert rig.planner.host.num_pinned == 0
    assert all(rig.page_of(state, i).is_persisted for i in range(2))
    assert len(rig.planner.take_persisted()) == 2


@pytest.mark.parametrize("reason", ["backlog", "full", "deadline", "unavailable"])
def test_a_dropped_page_stays_unpersisted_and_is_counted(reason):
    rig = _rig(num_workers=2)
    state = rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 2, 0, 0, "complete"), PersistDone(1, 1, 0, 1, reason))
    rig.say(PersistReleased(1), PersistReleased(1))
    assert not rig.page_of(state, 0).is_persisted
    assert rig.total(f"persist_dropped_tokens/{reason}") == 4
    assert rig.planner.take_persisted() == []


def test_a_release_without_an_answer_stores_nothing():
    rig = _rig()
    state = rig.fill_host(TOKENS[:8])
    rig.say(PersistReleased(1))
    assert rig.planner.host.num_pinned == 0
    assert not rig.page_of(state, 0).is_persisted


def test_late_and_duplicate_answers_are_ignored_and_counted():
    rig = _rig(num_workers=2)
    rig.fill_host(TOKENS[:8])
    done = PersistDone(1, 2, 0, 0, "complete", num_bytes=2 << 20)
    rig.say(done)
    rig.say(done)
    assert rig.total("persisted_bytes") == 2 << 20
    rig.say(PersistReleased(1), done)
    rig.say(None, PersistReleased(1))
    rig.say(done)
    rig.say(PersistReleased(1))
    assert rig.total("ignored_reports") == 3


def test_an_answer_to_an_unknown_persist_is_ignored_and_counted():
    rig = _rig()
    rig.say(PersistDone(77, 1, 0, 0, "complete"))
    assert rig.total("ignored_reports") == 1


def test_unpersisted_pages_are_caught_up_when_the_chain_is_used_again():
    rig = _rig()
    rig.say(ChannelDown())
    rig.fill_host(TOKENS[:8])
    assert _sent(rig) == []
    assert rig.total("persist_dropped_tokens/unavailable") == 8
    rig.say(ChannelUp(2))
    rig.now += RETRY_S
    state = rig.request("again", TOKENS[:9])
    rig.compute(state, 9)
    (persist,) = _sent(rig)
    assert unpack_hashes(persist.hashes) == state.tokens.page_hashes(2)[:2]
    rig.compute(state, 9)
    assert len(_sent(rig)) == 1


def test_a_tier_that_drops_pages_is_not_offered_them_by_every_request():
    rig = _rig()
    rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 0, 0, 2, "full"))
    rig.say(PersistReleased(1))
    for number, now in enumerate((0.0, 1.0, RETRY_S - 0.1)):
        rig.now = now
        rig.compute(rig.request(f"early-{number}", TOKENS[:8]), 8)
        assert len(_sent(rig)) == 1
    rig.compute(rig.request("new", [*TOKENS[:8], 1, 2, 3, 4, 5]), 13)
    rig.plan()
    rig.finish_saves()
    assert len(unpack_hashes(_sent(rig)[-1].hashes)) == 1
    rig.now = RETRY_S
    rig.compute(rig.request("later", TOKENS[:8]), 8)
    assert len(unpack_hashes(_sent(rig)[-1].hashes)) == 2


def test_a_full_tier_is_offered_nothing_for_a_moment_and_then_new_pages():
    rig = _rig()
    rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 0, 0, 2, "full"))
    rig.say(PersistReleased(1))
    rig.now = FULL_RETRY_S - 0.1
    rig.fill_host([9, *TOKENS[:7]])
    assert len(_sent(rig)) == 1
    assert rig.total("persist_dropped_tokens/full") == 16
    rig.now = FULL_RETRY_S
    rig.fill_host([8, *TOKENS[:7]])
    assert len(_sent(rig)) == 2


def test_a_hole_above_a_stored_page_is_caught_up():
    num_pages = MAX_PAGES_PER_PERSIST + 2
    tokens = list(range(4 * num_pages + 1))
    rig = _rig(num_slots=32)
    rig.fill_host(tokens)
    first, second = _sent(rig)
    assert len(unpack_hashes(first.hashes)) == MAX_PAGES_PER_PERSIST
    rig.say(PersistDone(first.op, 0, 0, MAX_PAGES_PER_PERSIST, "full"))
    rig.say(PersistDone(second.op, 2, 0, 0, "complete"))
    for message in (first, second):
        rig.say(PersistReleased(message.op))
    rig.now += RETRY_S
    state = rig.request("again", tokens)
    rig.compute(state, len(tokens))
    assert unpack_hashes(_sent(rig)[-1].hashes) == unpack_hashes(first.hashes)


def test_a_page_on_its_way_to_storage_is_not_sent_again():
    rig = _rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("again", TOKENS[:9])
    rig.compute(state, 9)
    assert len(_sent(rig)) == 1


def test_a_process_that_is_lost_mid_persist_keeps_the_pins_until_its_successor_says_hello():
    rig = _rig(num_workers=2)
    state = rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 2, 0, 0, "complete"), ChannelDown())
    rig.say(PersistReleased(1))
    assert rig.planner.host.num_pinned == 2
    rig.say(None, ChannelUp(2))
    assert rig.planner.host.num_pinned == 0
    assert not rig.page_of(state, 0).is_persisted
    assert rig.total("storage_restarts") == 1


def test_what_a_process_confirmed_before_it_was_lost_is_stored():
    rig = _rig()
    state = rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 2, 0, 0, "complete"))
    rig.say(ChannelDown())
    rig.say(ChannelUp(2))
    assert rig.page_of(state, 0).is_persisted


def test_a_persist_that_no_worker_was_told_of_ends_at_once():
    rig = _rig()
    rig.channels.refusing = {0}
    state = rig.fill_host(TOKENS[:8])
    assert rig.planner.host.num_pinned == 0
    assert not rig.page_of(state, 0).is_persisted
    assert rig.total("persist_dropped_tokens/unavailable") == 8


def test_a_persist_that_one_worker_was_not_told_of_stores_nothing():
    rig = _rig(num_workers=2)
    rig.channels.refusing = {1}
    state = rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 2, 0, 0, "complete"))
    rig.say(PersistReleased(1))
    assert rig.planner.host.num_pinned == 0
    assert not rig.page_of(state, 0).is_persisted


def test_a_page_pinned_by_a_persist_gives_its_slot_back_after_a_reset():
    rig = _rig()
    rig.fill_host(TOKENS[:8])
    rig.planner.reset("hc1-other")
    rig.audit()
    assert rig.planner.host.slots.num_used == 2
    rig.end_persists()
    assert rig.planner.host.slots.num_used == 0
    assert rig.planner.take_persisted() == []


# Another storage --------------------------------------------------------------------------------


def _say_in_turn(rig: Rig, *events: object) -> None:
    """What the one worker's processes say, one after the other."""
    for event in events:
        rig.say(event)


def _stored(rig: Rig) -> None:
    rig.fill_host(TOKENS[:8])
    rig.say(PersistDone(1, 2, 0, 0, "complete"))
    rig.say(PersistReleased(1))


def _sent_again(rig: Rig) -> int:
    """Pages that go to storage when the prompt is used once more."""
    before = len(_sent(rig))
    rig.compute(rig.request("again", TOKENS[:9]), 9)
    return sum(len(unpack_hashes(persist.hashes)) for persist in _sent(rig)[before:])


def test_pages_of_host_are_offered_to_another_storage():
    rig = _rig()
    _stored(rig)
    _say_in_turn(rig, Switching(), ChannelDown(), ChannelUp(2, 2))
    assert rig.planner.num_storage_changes == 1
    assert rig.total("storage_restarts") == 0
    assert _sent_again(rig) == 2


def test_a_restart_with_the_same_storage_offers_nothing_again():
    rig = _rig()
    _stored(rig)
    _say_in_turn(rig, ChannelDown(), ChannelUp(2, 1))
    assert rig.planner.num_storage_changes == 0
    assert rig.total("storage_restarts") == 1
    assert _sent_again(rig) == 0


def test_nothing_is_sent_while_storage_is_detached_and_pins_are_released():
    rig = _rig()
    rig.fill_host(TOKENS[:8])
    assert rig.planner.host.num_pinned == 2
    _say_in_turn(rig, Switching(), ChannelDown(), ChannelUp(2, 0))
    assert rig.planner.host.num_pinned == 0
    assert not rig.link.is_up
    assert rig.link.is_reached
    assert _sent_again(rig) == 0
    _say_in_turn(rig, Switching(), ChannelDown(), ChannelUp(3, 2))
    assert rig.link.is_up
    assert rig.planner.num_storage_changes == 2


def test_a_persist_that_outlives_its_storage_marks_nothing_as_stored():
    rig = _rig(num_workers=2)
    state = rig.fill_host(TOKENS[:8])
    done = PersistDone(1, 2, 0, 0, "complete")
    rig.say(done, done)
    rig.say(PersistReleased(1), None)
    _say_in_turn(rig, Switching(), ChannelDown(), ChannelUp(2, 2))
    rig.say(None, PersistReleased(1))
    assert rig.planner.host.num_pinned == 0
    assert not rig.page_of(state, 0).is_persisted


def test_deadlines_are_those_of_the_storage_that_is_attached():
    rig = _rig()
    _say_in_turn(rig, ChannelDown(), ChannelUp(2, 2, StorageTimes(0.5, 20.0, 5.0)))
    rig.fill_host(TOKENS[:8])
    (persist,) = _sent(rig)
    assert persist.deadline_s == 20.0 * PERSIST_TIMEOUT_FACTOR
    rig.request("other", list(range(900, 940)))
    query = rig.channels.sent[0][-1]
    assert isinstance(query, Exists)
    assert query.deadline_s == 0.5

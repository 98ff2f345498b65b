"""Who owns a host page of a fetch, from the agreed question to the load: each hand-over by itself.

free -> operation        when every stage has answered the question, as many as all have
operation -> index       page by page, as far as the slowest stage has read
operation -> free        the unread rest, when the last stage has let go
operation -> free        at the index's door: the page is there already, or its parent has left
operation, nobody waits  an abort: what is agreed stays in the index, the rest as above
index -> load -> index   the fetch's pin ends after the load's begins
"""

from random import Random

import pytest
from interleavings import interleave, interleavings, tell
from planner_rig import Rig

from vllm_hicache.planner import ASK_AGAIN
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import (
    Cancel,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    unpack_slots,
)
from vllm_hicache.tiers import SlotOwner

PAGE, PAGES, STAGES = 4, 6, 3
PROMPT = list(range(100, 100 + PAGES * PAGE + 1))
FREE, OPERATION, INDEX = SlotOwner


def _rig(**options) -> Rig:
    return Rig(num_workers=STAGES, has_storage=True, **options)


def _reading(rig: Rig):
    """A request whose fetch of all its pages has begun on every stage."""
    state = rig.request("a", PROMPT)
    return state, rig.answer_query(*[PAGES] * STAGES)


def _owners(rig: Rig, fetch: Fetch) -> list[SlotOwner]:
    return [rig.planner.host.slots.owner(slot) for slot in unpack_slots(fetch.slots)]


def _answers(op: int, length: int, reason: str, rng: Random) -> list:
    """What one stage says that reads so many pages: progress now and then, the end, the release."""
    told = sorted(rng.sample(range(1, length + 1), rng.randint(0, length)))
    settled = FetchSettled(op, length, reason)
    return [*(FetchProgress(op, n) for n in told), settled, FetchReleased(op)]


class _Oracle:
    """Owners by the definition: minimum of what was told, and everybody's release."""

    def __init__(self) -> None:
        self.told = [0] * STAGES
        self.released: set[int] = set()

    def note(self, stage: int, event: object) -> None:
        self.told[stage] = getattr(event, "num_pages", self.told[stage])
        if isinstance(event, FetchReleased):
            self.released.add(stage)

    def owners(self) -> list[SlotOwner]:
        rest = FREE if len(self.released) == STAGES else OPERATION
        agreed = min(self.told)
        return [INDEX] * agreed + [rest] * (PAGES - agreed)


# Free -> operation -------------------------------------------------------------------------------


@interleavings
def test_no_page_is_taken_before_the_last_stage_has_answered_and_then_as_many_as_all_have(count):
    for seed in range(count):
        rng = Random(seed)
        rig = _rig()
        rig.request("a", PROMPT)
        op = rig.channels.last(Exists).op
        leading = [rng.randint(0, PAGES) for _ in range(STAGES)]
        answers = [[ExistsResult(op, n, ok=True)] for n in leading]
        for stage, event in interleave(rng, answers):
            assert rig.planner.host.slots.num_used == 0
            tell(rig, stage, event)
        assert rig.planner.host.slots.num_used == min(leading)
        assert rig.planner.prefetcher.num_slots == min(leading)


# Operation -> index, and operation -> free -------------------------------------------------------


@interleavings
def test_each_page_passes_to_the_index_with_the_slowest_stage_and_the_rest_is_freed_last(count):
    for seed in range(count):
        rng = Random(seed)
        rig = _rig()
        _, fetch = _reading(rig)
        oracle = _Oracle()
        lengths = [rng.choice((PAGES, rng.randint(0, PAGES))) for _ in range(STAGES)]
        reasons = ["complete" if n == PAGES else "corrupt" for n in lengths]
        queues = [_answers(fetch.op, n, r, rng) for n, r in zip(lengths, reasons, strict=True)]
        assert _owners(rig, fetch) == [OPERATION] * PAGES
        for stage, event in interleave(rng, queues):
            tell(rig, stage, event)
            oracle.note(stage, event)
            assert _owners(rig, fetch) == oracle.owners()
        assert rig.planner.prefetcher.num_slots == 0


def test_the_rest_stays_with_the_operation_of_a_dead_process_until_its_successor_says_hello():
    rig = _rig()
    _, fetch = _reading(rig)
    rig.say(*(FetchProgress(fetch.op, n) for n in (5, 2, 4)))
    rig.say(None, ChannelDown())
    for stage in (0, 2):
        tell(rig, stage, FetchSettled(fetch.op, PAGES, "complete"))
        tell(rig, stage, FetchReleased(fetch.op))
    assert _owners(rig, fetch) == [INDEX] * 2 + [OPERATION] * 4
    rig.say(None, ChannelUp(2))
    assert _owners(rig, fetch) == [INDEX] * 2 + [FREE] * 4


# Operation -> free at the index's door -----------------------------------------------------------


@interleavings
def test_a_page_that_was_saved_meanwhile_gives_its_second_slot_back_as_it_arrives(count):
    for seed in range(count):
        rng = Random(seed)
        rig = _rig(num_slots=32)
        state, fetch = _reading(rig)
        num_saved = rng.randint(1, PAGES)
        rig.fill_host(PROMPT[: num_saved * PAGE])
        kept = [rig.page_of(state, i).slot for i in range(num_saved)]
        oracle = _Oracle()
        queues = [_answers(fetch.op, PAGES, "complete", rng) for _ in range(STAGES)]
        for stage, event in interleave(rng, queues):
            tell(rig, stage, event)
            oracle.note(stage, event)
            agreed = min(oracle.told)
            arrived = [FREE] * min(num_saved, agreed) + [INDEX] * max(0, agreed - num_saved)
            assert _owners(rig, fetch)[:agreed] == arrived
        assert [rig.page_of(state, i).slot for i in range(num_saved)] == kept
        assert rig.planner.host.slots.num_used == PAGES


@interleavings
def test_pages_whose_parent_has_left_are_freed_as_they_arrive(count):
    for seed in range(count):
        rng = Random(seed)
        rig = _rig(num_slots=32)
        rig.fill_host(PROMPT[:PAGE])
        rig.end_persists()
        state = rig.request("a", PROMPT)
        fetch = rig.answer_query(*[PAGES - 1] * STAGES)
        before = rng.randint(0, 2)  # so many pages have arrived when their root leaves
        rig.say(*[FetchProgress(fetch.op, before)] * STAGES)
        rig.planner.host.discard(rig.page_of(state, 0))
        rest = [_answers(fetch.op, PAGES - 1, "complete", rng) for _ in range(STAGES)]
        for stage, event in interleave(rng, rest):
            tell(rig, stage, event)
            assert rig.in_host(state) == 0
        rig.planner.finish(state, rig.now)
        assert rig.planner.host.slots.num_used == 0
        rig.audit(is_idle=True)


# An abort in each state --------------------------------------------------------------------------


def _submitted(rig: Rig, rng: Random) -> list[list]:
    op = rig.channels.last(Exists).op
    return [[ExistsResult(op, PAGES, ok=True)] for _ in range(STAGES)]


def _queried(rig: Rig, rng: Random) -> list[list]:
    """Some stages have answered the question."""
    left = _submitted(rig, rng)
    for stage in rng.sample(range(STAGES), rng.randint(1, STAGES - 1)):
        tell(rig, stage, left[stage].pop())
    return left


def _allocated(rig: Rig, rng: Random) -> list[list]:
    fetch = rig.answer_query(*[PAGES] * STAGES)
    return [_answers(fetch.op, rng.randint(0, PAGES), "cancelled", rng) for _ in range(STAGES)]


def _read_in_part(rig: Rig, rng: Random) -> list[list]:
    left = _allocated(rig, rng)
    for stage, queue in enumerate(left):
        for _ in range(rng.randint(0, len(queue) - 2)):
            tell(rig, stage, queue.pop(0))
    return left


def _settled(rig: Rig, rng: Random) -> list[list]:
    """Every stage has given its last number, none has let go."""
    left = _allocated(rig, rng)
    for stage, queue in enumerate(left):
        while len(queue) > 1:
            tell(rig, stage, queue.pop(0))
    return left


def _grafted(rig: Rig, rng: Random) -> list[list]:
    left = _settled(rig, rng)
    for stage, queue in enumerate(left):
        tell(rig, stage, queue.pop())
    return [[] for _ in range(STAGES)]


ABORTED_WHILE = {
    "submitted": _submitted,
    "queried": _queried,
    "allocated": _allocated,
    "reading": _read_in_part,
    "settled": _settled,
    "grafted": _grafted,
}


@interleavings
@pytest.mark.parametrize("reach", ABORTED_WHILE)
def test_an_abort_leaves_agreed_pages_to_the_index_and_the_rest_to_the_operation(reach, count):
    for seed in range(count):
        rng = Random(seed)
        rig = _rig()
        state = rig.request("a", PROMPT)
        left = ABORTED_WHILE[reach](rig, rng)
        fetch = rig.channels.last(Fetch) if rig.channels.count(Fetch) else None
        in_host = rig.in_host(state)
        rig.planner.finish(state, rig.now)
        is_running = reach not in ("settled", "grafted")
        assert [rig.channels.count(Cancel, stage) for stage in range(STAGES)] == [is_running] * 3
        if is_running:
            op = fetch.op if fetch is not None else rig.channels.last(Exists).op
            assert all(rig.channels.last(Cancel, stage).op == op for stage in range(STAGES))
        assert rig.in_host(state) == in_host
        if any(left) and fetch is not None:
            assert _owners(rig, fetch) == [INDEX] * in_host + [OPERATION] * (PAGES - in_host)
        for stage, event in interleave(rng, left):
            tell(rig, stage, event)
        rig.audit(is_idle=True)
        assert rig.planner.host.num_pinned == 0
        assert rig.planner.prefetcher.num_slots == rig.planner.prefetcher.num_occupied == 0
        assert rig.planner.host.slots.num_used == len(rig.planner.host.index)
        assert rig.channels.count(Fetch) == (fetch is not None)


@pytest.mark.parametrize("reach", ABORTED_WHILE)
def test_after_an_abort_in_any_state_the_next_request_for_the_prefix_is_served(reach):
    rng = Random(1)
    rig = _rig()
    first = rig.request("a", PROMPT)
    left = ABORTED_WHILE[reach](rig, rng)
    rig.planner.finish(first, rig.now)
    for stage, event in interleave(rng, left):
        tell(rig, stage, event)
    state = rig.request("b", PROMPT)
    missing = PAGES - rig.in_host(state)
    if missing:
        assert rig.match(state) == ASK_AGAIN
        fetch = rig.answer_query(*[missing] * STAGES)
        rig.end_fetch(fetch.op, *[missing] * STAGES)
    assert rig.begin_load(state).num_tokens == PAGES * PAGE


# Index -> load -> index --------------------------------------------------------------------------


def test_a_page_is_pinned_by_its_fetch_then_by_its_load_and_then_may_be_evicted():
    rig = _rig(num_slots=PAGES, fetch={"max_share": 1.0})
    state, fetch = _reading(rig)
    rig.end_fetch(fetch.op, *[PAGES] * STAGES)
    pages = [rig.page_of(state, i) for i in range(PAGES)]
    assert [page.pins for page in pages] == [1] * PAGES
    assert rig.planner.host.allocate(1) == []
    load = rig.begin_load(state)
    assert rig.planner.prefetcher.pinned_pages() == []
    assert [page.pins for page in pages] == [1] * PAGES
    rig.plan()
    for stage in range(STAGES):
        assert rig.planner.host.allocate(1) == []
        rig.finish_loads(workers=[stage])
    assert load.is_ok
    assert [page.pins for page in pages] == [0] * PAGES
    assert len(rig.planner.host.allocate(PAGES)) == PAGES


def test_at_admission_no_page_is_without_a_pin_for_a_moment(monkeypatch):
    """Whatever is evicted between the two pins would be loaded with other bytes."""
    rig = _rig(num_slots=PAGES, fetch={"max_share": 1.0})
    state, fetch = _reading(rig)
    rig.end_fetch(fetch.op, *[PAGES] * STAGES)
    pages = [rig.page_of(state, i) for i in range(PAGES)]
    host = rig.planner.host
    lowest, unpin = [], host.unpin

    def unpin_and_look(released) -> None:
        unpin(released)
        lowest.append(min(page.pins for page in pages))

    monkeypatch.setattr(host, "unpin", unpin_and_look)
    rig.begin_load(state)
    assert lowest
    assert min(lowest) == 1


def test_tokens_that_vllm_did_not_want_leave_their_pages_to_others():
    rig = _rig(num_slots=PAGES, fetch={"max_share": 1.0})
    state, fetch = _reading(rig)
    rig.end_fetch(fetch.op, *[PAGES] * STAGES)
    rig.match(state, num_local=PAGES * PAGE)
    rig.planner.admit(state)
    assert rig.planner.host.num_pinned == 0
    assert rig.in_host(state) == PAGES
    assert len(rig.planner.host.allocate(PAGES)) == PAGES

"""Pages that lack pools: what is saved, found, fetched, stored, and completed later."""

import pytest
from planner_rig import Rig

from vllm_hicache.pools import HitRule, KVGroup, Pool
from vllm_hicache.storage_messages import ExistsResult, Fetch, Persist, PersistDone, PersistReleased

PAGE = 4
TOKENS = list(range(1, 65))
WINDOW = Pool("window", HitRule.WINDOW, (1,), reach=PAGE, bit=0)
STATE = Pool("state", HitRule.BOUNDARY, (2,), bit=1)
DRAFT = Pool("draft", HitRule.EVERY, (0,), bit=2, is_draft=True)
GROUPS = (KVGroup(2), KVGroup(4, bit=0), KVGroup(4, bit=1, is_state=True))
ALL = 0b111


def hybrid_rig(*pools: Pool, groups: tuple[KVGroup, ...] = GROUPS[:2], **options: object) -> Rig:
    return Rig(page=PAGE, block=4, pools=pools or (WINDOW,), groups=groups, **options)


def compute(rig: Rig, state, num_tokens: int, *others: list[int]) -> None:
    """The next step computes the request; ``others`` are the tables behind the first group's."""
    state.block_ids = list(range(100, 100 + num_tokens // 2))
    state.other_tables = others
    rig.planner.admit(state)
    rig.planner.collect_saves(state, num_tokens, rig.now)


def saved(rig: Rig, name: str, num_tokens: int, *others: list[int]):
    state = rig.request(name, TOKENS[:num_tokens], may_load=False, why_not="skip_reading")
    compute(rig, state, num_tokens, *others)
    plan = rig.plan()
    rig.finish_saves()
    rig.planner.finish(state, rig.now)
    return plan


def test_a_save_copies_every_group_and_leaves_out_what_left_the_window() -> None:
    rig = hybrid_rig()
    (op,) = saved(rig, "writer", 16, [0, 0, 7, 8]).saves
    full, window = op.all_copies
    assert full[:, 2].tolist() == list(range(100, 108))
    assert window.tolist() == [[2, 0, 7, 0], [3, 0, 8, 0]]
    pages = [rig.page_of(rig.request("reader", TOKENS[:17]), i) for i in range(4)]
    assert [page.parts for page in pages] == [0, 0, 1, 1]


def test_a_page_holds_its_blocks_of_all_groups_until_it_is_copied() -> None:
    rig = hybrid_rig()
    state = rig.request("writer", TOKENS[:16], may_load=False, why_not="skip_reading")
    compute(rig, state, 16, [0, 0, 7, 8])
    assert rig.blocks.num_held == 8 + 2
    rig.plan()
    rig.finish_saves()
    assert rig.blocks.num_held == 0


def test_a_hit_ends_where_the_window_is_whole() -> None:
    rig = hybrid_rig()
    saved(rig, "writer", 16, [0, 7, 0, 0])
    state = rig.request("reader", TOKENS[:20])
    assert rig.match(state).num_tokens == 8
    assert state.withheld_reason == "missing_pool"


def test_tokens_that_lack_a_pool_have_their_reason_in_the_ledger() -> None:
    rig = hybrid_rig()
    saved(rig, "writer", 16, [0, 7, 0, 0])
    state = rig.request("reader", TOKENS[:20])
    match = rig.match(state)
    rig.planner.begin_load(state, match.num_tokens, [1, 2, 3, 4], 0.0, ([0, 9],))
    rig.plan()
    rig.finish_loads()
    assert rig.total("unserved_tokens/missing_pool") == 8


def test_a_load_writes_to_blocks_inside_the_window_only() -> None:
    rig = hybrid_rig()
    saved(rig, "writer", 16, [5, 6, 7, 8])
    state = rig.request("reader", TOKENS[:20])
    match = rig.match(state)
    assert match.num_tokens == 16
    load = rig.planner.begin_load(state, 16, list(range(40, 48)), 0.0, ([0, 0, 0, 9],))
    (op,) = rig.plan().loads
    assert op.all_copies[0][:, 2].tolist() == list(range(40, 48))
    assert op.all_copies[1].tolist() == [[3, 0, 9, 0]]
    assert load.block_ids == {*range(40, 48), 9}


def test_a_load_into_a_block_that_host_lacks_fails_instead_of_leaving_garbage() -> None:
    rig = hybrid_rig()
    saved(rig, "writer", 16, [0, 0, 7, 8])
    state = rig.request("reader", TOKENS[:20])
    assert rig.match(state).num_tokens == 16
    rig.planner.begin_load(state, 16, list(range(40, 48)), 0.0, ([0, 11, 0, 9],))
    rig.plan()
    rig.finish_loads()
    assert rig.plan().failed_requests == ("reader",)


def test_several_groups_never_load_inside_a_step() -> None:
    rig = hybrid_rig(sync_load_max_s=10.0)
    saved(rig, "writer", 16, [5, 6, 7, 8])
    rig.plan(is_busy=False)
    assert rig.match(rig.request("reader", TOKENS[:20])).is_async


def test_a_state_is_saved_where_it_is_and_loaded_to_the_block_that_ends_there() -> None:
    rig = hybrid_rig(STATE, groups=(GROUPS[0], GROUPS[2]))
    (op,) = saved(rig, "writer", 16, [0, 6, 0, 8]).saves
    assert op.all_copies[1].tolist() == [[1, 0, 6, 0], [3, 0, 8, 0]]
    state = rig.request("reader", TOKENS[:16])
    assert rig.match(state).num_tokens == 8
    rig.planner.begin_load(state, 8, [1, 2, 3, 4], 0.0, ([0, 21],))
    (load,) = rig.plan().loads
    assert load.all_copies[1].tolist() == [[1, 0, 21, 0]]


def test_parts_that_the_device_has_later_complete_pages_in_host() -> None:
    rig = hybrid_rig(STATE, groups=(GROUPS[0], GROUPS[2]), has_storage=True)
    saved(rig, "writer", 16, [0, 0, 0, 8])
    rig.end_persists()
    (op,) = saved(rig, "later", 16, [0, 6, 0, 9]).saves
    full, state = op.all_copies
    assert len(full) == 0
    assert state.tolist() == [[1, 0, 6, 0]]
    reader = rig.request("reader", TOKENS[:12])
    assert rig.page_of(reader, 1).parts == 2
    assert rig.match(reader).num_tokens == 8
    again = rig.channels.last(Persist)
    assert (len(again.slots) // 4, again.parts) == (1, b"\2")


def test_a_page_that_is_completed_is_pinned_and_completed_once() -> None:
    rig = hybrid_rig(STATE, groups=(GROUPS[0], GROUPS[2]))
    saved(rig, "writer", 8, [0, 0])
    for name in ("one", "two"):
        state = rig.request(name, TOKENS[:8], may_load=False, why_not="skip_reading")
        compute(rig, state, 8, [0, 6])
    assert len(rig.plan().saves) == 1
    assert rig.planner.host.num_pinned == 1
    rig.finish_saves()
    assert rig.planner.host.num_pinned == 0


def test_a_completion_that_fails_adds_nothing() -> None:
    rig = hybrid_rig(STATE, groups=(GROUPS[0], GROUPS[2]))
    saved(rig, "writer", 8, [0, 0])
    state = rig.request("later", TOKENS[:8], may_load=False, why_not="skip_reading")
    compute(rig, state, 8, [0, 6])
    (op,) = rig.plan().saves
    rig.finish_saves(failed=[op.op_id])
    assert rig.page_of(state, 1).parts == 0


def test_a_page_that_got_parts_while_it_was_persisted_is_persisted_again() -> None:
    rig = hybrid_rig(STATE, groups=(GROUPS[0], GROUPS[2]), has_storage=True)
    saved(rig, "writer", 8, [0, 0])
    first = rig.channels.last(Persist)
    saved(rig, "later", 8, [0, 6])
    rig.say(PersistDone(first.op, 2, 0, 0, "complete"))
    rig.say(PersistReleased(first.op))
    page = rig.page_of(rig.request("reader", TOKENS[:9]), 1)
    assert page.parts == 2
    assert not page.is_persisted


def answer(rig: Rig, *parts: int) -> Fetch | None:
    op = rig._queries()[-1]
    before = rig.channels.count(Fetch)
    rig.say(ExistsResult(op, len(parts), ok=True, parts=bytes(parts)))
    return rig.channels.last(Fetch) if rig.channels.count(Fetch) > before else None


def test_a_fetch_ends_at_the_longest_boundary_that_storage_can_serve() -> None:
    rig = hybrid_rig(has_storage=True)
    state = rig.request("reader", TOKENS[:20])
    fetch = answer(rig, 0, 1, 0, 0)
    assert (len(fetch.slots) // 4, fetch.parts) == (2, b"\0\1")
    rig.end_fetch(fetch.op, 2)
    assert rig.page_of(state, 1).parts == 1
    assert rig.match(state).num_tokens == 8
    rig.planner.begin_load(state, 8, [1, 2, 3, 4], 0.0, ([0, 9],))
    rig.plan()
    rig.finish_loads()
    assert rig.total("unserved_tokens/missing_pool") == 8


def test_pages_without_any_usable_boundary_are_not_fetched() -> None:
    rig = hybrid_rig(has_storage=True)
    state = rig.request("reader", TOKENS[:20])
    assert answer(rig, 1, 0, 0, 0) is not None  # the first page alone
    rig.planner.finish(state, rig.now)
    other = hybrid_rig(STATE, groups=(GROUPS[0], GROUPS[2]), has_storage=True)
    state = other.request("reader", TOKENS[:20])
    assert answer(other, 0, 0, 0, 0) is None
    assert other.total("fetch_ended/missing_pool") == 1
    assert other.match(state).num_tokens == 0


def test_parts_count_only_where_every_worker_has_them() -> None:
    rig = hybrid_rig(has_storage=True, num_workers=2)
    rig.request("reader", TOKENS[:20])
    op = rig._queries()[-1]
    rig.say(
        ExistsResult(op, 4, ok=True, parts=b"\1\1\1\1"),
        ExistsResult(op, 4, True, parts=b"\0\1\1\0"),
    )
    assert rig.channels.last(Fetch).parts == b"\0\1\1"


def test_the_window_before_a_fetch_may_lie_in_host() -> None:
    rig = hybrid_rig(Pool("window", HitRule.WINDOW, (1,), reach=2 * PAGE, bit=0), has_storage=True)
    saved(rig, "writer", 8, [5, 6])
    rig.request("reader", TOKENS[:20])
    assert answer(rig, 1, 0).parts == b"\1"


def test_pages_that_may_lack_everything_are_found_only_where_something_is_stored() -> None:
    rig = hybrid_rig(
        Pool("window", HitRule.WINDOW, (0,), reach=PAGE, bit=0),
        groups=GROUPS[1:2],
        has_storage=True,
    )
    state = rig.request("reader", TOKENS[:20])
    fetch = answer(rig, 0, 1, 0, 0)
    assert len(fetch.slots) // 4 == 2
    assert len(state.fetch.found) == 2
    other = rig.request("other", TOKENS[20:40])
    assert answer(rig, 0, 0, 0, 0) is None
    assert other.fetch.found == []
    assert rig.total("fetch_ended/missing") == 1


@pytest.mark.parametrize(
    ("miss", "speed", "num_tokens"),
    [
        ("cut", 1.0, 8),
        ("target_only", 1.0, 16),
        ("auto", 1e6, 8),
        ("auto", 1.0, 16),
        ("auto", 0, 8),
    ],
)
def test_pages_without_draft_state_are_used_as_the_option_says(
    miss: str, speed: float, num_tokens: int
) -> None:
    """``speed`` in tokens per second; 0 is not known."""
    rig = hybrid_rig(DRAFT, groups=(KVGroup(2),), has_storage=True, draft_miss=miss)
    if speed:
        for _ in range(40):
            rig.planner.costs.prefilled(1000, 1000 / speed)
    rig.planner.worth.is_on = False
    state = rig.request("reader", TOKENS[:20])
    fetch = answer(rig, 4, 4, 0, 0)
    rig.end_fetch(fetch.op, len(fetch.slots) // 4)
    assert rig.match(state).num_tokens == num_tokens


def test_zeros_in_the_place_of_draft_state_are_never_taken_for_it() -> None:
    """Neither in host nor in storage, and what was drafted on top of them is none either."""
    rig = hybrid_rig(
        DRAFT, groups=(KVGroup(2, marks=4),), has_storage=True, draft_miss="target_only"
    )
    state = rig.request("reader", TOKENS[:20])
    fetch = answer(rig, 4, 0)
    rig.end_fetch(fetch.op, 2)
    assert rig.match(state).num_tokens == 8
    rig.planner.begin_load(state, 8, [1, 2, 3, 4], 0.0)
    rig.plan()
    rig.finish_loads()
    compute(rig, state, 20)
    rig.plan()
    rig.finish_saves()
    assert [rig.page_of(state, i).parts for i in range(5)] == [4, 0, 0, 0, 0]
    follower = rig.request("follower", TOKENS[:20])  # has the zeros as a device hit
    compute(rig, follower, 20)
    assert rig.plan().saves == ()
    assert [rig.page_of(follower, i).parts for i in range(5)] == [4, 0, 0, 0, 0]
    other = rig.request("other", TOKENS[40:60], may_load=False, why_not="skip_reading")
    compute(rig, other, 20)
    rig.plan()
    rig.finish_saves()
    assert [rig.page_of(other, i).parts for i in range(5)] == [4] * 5


@pytest.mark.parametrize(("miss", "num_tokens"), [("cut", 8), ("target_only", 16)])
def test_a_draft_that_follows_a_window_is_needed_in_the_window_alone(
    miss: str, num_tokens: int
) -> None:
    draft = Pool("draft", HitRule.WINDOW, (0,), reach=PAGE, bit=1, is_draft=True)
    groups = (KVGroup(4, bit=0, marks=2),)
    window = Pool("window", HitRule.WINDOW, (0,), reach=PAGE, bit=0)
    rig = hybrid_rig(window, draft, groups=groups, has_storage=True, draft_miss=miss)
    state = rig.request("reader", TOKENS[:20])
    fetch = answer(rig, 1, 3, 1, 1)
    rig.end_fetch(fetch.op, len(fetch.slots) // 4)
    assert rig.match(state).num_tokens == num_tokens


def test_a_drafter_gets_its_last_block_computed_anew() -> None:
    rig = Rig(page=PAGE, block=4, num_unsure_tokens=4)
    rig.fill_host(TOKENS[:16])
    assert rig.match(rig.request("longer", TOKENS[:20])).num_tokens == 12
    assert rig.match(rig.request("as long", TOKENS[:16])).num_tokens == 8
    assert rig.match(rig.request("shorter", TOKENS[:12])).num_tokens == 4
    assert rig.match(rig.request("one block", TOKENS[:5])).num_tokens == 0


def test_a_request_needs_blocks_in_every_group_to_be_let_in_without_its_load() -> None:
    rig = hybrid_rig()
    for _ in range(40):
        rig.planner.costs.prefilled(1000, 1.0)
    saved(rig, "writer", 16, [5, 6, 7, 8])
    state = rig.request("reader", TOKENS[:17])
    rig.blocks.num_free = 9 + 5 - 1  # nine blocks of two tokens and five of four, but one
    for step in range(2000):
        rig.now = step / 1000
        match = rig.match(state)
    assert match.num_tokens == 16
    rig.blocks.num_free += 1
    assert rig.match(state).num_tokens == 16  # there is room at last
    rig.now += 100.0  # as long as computing takes, many times
    assert rig.match(state).num_tokens == 0

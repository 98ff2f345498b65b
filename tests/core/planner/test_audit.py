"""The audit finds every rule that is broken on purpose, and nothing in a sound planner."""

from collections.abc import Callable

import pytest
from planner_rig import Rig

from vllm_hicache.audit import audit, check
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.tiers import SlotOwner

TOKENS = list(range(100, 140))


def _busy_rig() -> Rig:
    """Something of everything: pages, a load, a save, a persist, a fetch that is awaited."""
    rig = Rig(has_storage=True, num_slots=32)
    rig.fill_host(TOKENS[:8])
    rig.begin_load(rig.request("loads", TOKENS[:9]))
    rig.plan()
    rig.compute(rig.request("saves", list(range(8)), may_load=False, why_not="skip_reading"), 8)
    rig.plan()
    rig.request("fetches", list(range(50, 67)))
    rig.answer_query(4)
    return rig


def _findings(rig: Rig, *, is_idle: bool = False) -> list[str]:
    return audit(rig.planner, is_idle=is_idle, num_held_blocks=rig.blocks.num_held)


def _first_page(rig: Rig):
    return next(page for page in rig.planner.host.index.pages() if page.parent is None)


def _leaf(rig: Rig):
    return next(page for page in rig.planner.host.index.pages() if page.parent is not None)


def test_a_sound_planner_has_no_findings():
    assert _findings(_busy_rig()) == []


def test_an_empty_planner_is_idle():
    assert _findings(Rig(has_storage=True), is_idle=True) == []


def _lose_a_slot(rig: Rig) -> None:
    rig.planner.host.allocate(1)


def _free_a_page_that_stays(rig: Rig) -> None:
    rig.planner.host.slots.release(_leaf(rig).slot)


def _publish_a_slot_of_a_save(rig: Rig) -> None:
    rig.planner.host.slots.give_to_index(rig.planner.saves.slots()[0])


def _share_a_slot(rig: Rig) -> None:
    _leaf(rig).slot = _first_page(rig).slot


def _lose_the_free_list(rig: Rig) -> None:
    rig.planner.host.slots._free.pop()


def _use_a_slot_without_memory(rig: Rig) -> None:
    rig.planner.host.slots.num_ready = 2


def _count_slots_that_do_not_exist(rig: Rig) -> None:
    rig.planner.host.slots.num_slots = 40


def _lose_a_parent(rig: Rig) -> None:
    del rig.planner.host.index._pages[_first_page(rig).page_hash]


def _mark_as_gone(rig: Rig) -> None:
    _leaf(rig).is_present = False


def _miscount_children(rig: Rig) -> None:
    _first_page(rig).num_children = 5


def _forget_to_offer(rig: Rig) -> None:
    rig.finish_loads()
    rig.end_persists()
    _leaf(rig).queued = 0


def _pin_once_too_often(rig: Rig) -> None:
    rig.planner.host.pin([_leaf(rig)])


def _unpin_once_too_often(rig: Rig) -> None:
    rig.planner.host.unpin([_leaf(rig)])


def _go_below_zero(rig: Rig) -> None:
    _leaf(rig).pins = -1


def _miscount_pinned(rig: Rig) -> None:
    rig.planner.host.num_pinned += 1


def _lose_a_block(rig: Rig) -> None:
    rig.blocks.hold([77])


def _load_into_a_block_that_is_saved(rig: Rig) -> None:
    load = rig.planner.loads.running()[0]
    load.block_ids = frozenset(rig.planner.saves.held_blocks())


def _load_twice_into_one_block(rig: Rig) -> None:
    load = rig.planner.loads.running()[0]
    rig.planner.loads._planned.append(load)


def _load_beyond_the_prompt(rig: Rig) -> None:
    rig.planner.loads.running()[0].last_token = 12


def _load_from_other_slots(rig: Rig) -> None:
    rig.planner.loads.running()[0].copies[0, 0] += 20


def _keep_a_landing_page(rig: Rig) -> None:
    landing = dict(rig.planner.loads._landing)
    rig.finish_loads()
    rig.planner.loads._landing.update(landing)


def _keep_a_page_in_flight(rig: Rig) -> None:
    in_flight = dict(rig.planner.saves._in_flight)
    rig.finish_saves()
    rig.planner.saves._in_flight.update(in_flight)


def _keep_a_link_to_a_fetch(rig: Rig) -> None:
    for fetch in rig.planner.prefetcher.linked_fetches():
        fetch.num_waiting = 0


def _miscount_slots_of_fetches(rig: Rig) -> None:
    rig.planner.prefetcher._num_slots -= 1


def _unbalance_the_ledger(rig: Rig) -> None:
    rig.planner.ledger._found += 1


BREAKS = {
    _lose_a_slot: "slots belong to OPERATION, accounted for",
    _free_a_page_that_stays: "of INDEX is recorded as FREE",
    _publish_a_slot_of_a_save: "of OPERATION is recorded as INDEX",
    _share_a_slot: "has 2 owners",
    _lose_the_free_list: "slots are recorded as free",
    _use_a_slot_without_memory: "is in use, but only 2 are ready",
    _count_slots_that_do_not_exist: "8 are not ready",
    _lose_a_parent: "is in host, its parent is not",
    _mark_as_gone: "is listed but not present",
    _miscount_children: "counts 5 children and has 1",
    _forget_to_offer: "could be evicted but is not queued",
    _pin_once_too_often: "has 3 pins, operations account for 2",
    _unpin_once_too_often: "has 1 pins, operations account for 2",
    _go_below_zero: "has -1 pins",
    _miscount_pinned: "pages count as pinned",
    _lose_a_block: "vLLM counts 3 references",
    _load_into_a_block_that_is_saved: "is saved while a load writes to it",
    _load_twice_into_one_block: "2 loads write to device block",
    _load_beyond_the_prompt: "a load of tokens [0, 12) for 9 tokens",
    _load_from_other_slots: "copies from other slots than it has pinned",
    _keep_a_landing_page: "1 loads that have ended still count as landing",
    _keep_a_page_in_flight: "2 pages count as being saved",
    _keep_a_link_to_a_fetch: "can still be joined",
    _miscount_slots_of_fetches: "fetches count 3 slots and own 4",
    _unbalance_the_ledger: "ledger: found",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__.strip("_"))
def test_a_broken_rule_is_found_and_named(break_it: Callable[[Rig], None]):
    rig = _busy_rig()
    break_it(rig)
    assert any(BREAKS[break_it] in finding for finding in _findings(rig)), _findings(rig)


def test_an_idle_engine_with_something_running_is_found():
    findings = _findings(_busy_rig(), is_idle=True)
    assert [finding for finding in findings if "idle" in finding] == [
        "1 running saves at idle",
        "1 running loads at idle",
        "2 held device blocks at idle",
        "1 open ledger entries at idle",
        "2 pages marked as being saved at idle",
        "2 pages marked as landing at idle",
        "1 awaited fetches at idle",
        "4 pages marked as being fetched at idle",
        "an idle engine is kept stepping",
    ]


def test_a_page_that_was_forgotten_while_pinned_still_has_its_slot():
    rig = _busy_rig()
    rig.planner.reset("hc1-other")
    assert _findings(rig) == []
    assert rig.planner.host.slots.count(SlotOwner.INDEX) == 2


def test_check_raises_with_everything_that_was_found():
    rig = _busy_rig()
    _lose_a_slot(rig)
    _lose_a_block(rig)
    with pytest.raises(InvariantBroken, match=r"accounted for 6.*; .*vLLM counts 3 references"):
        check(rig.planner, is_idle=False, num_held_blocks=rig.blocks.num_held)

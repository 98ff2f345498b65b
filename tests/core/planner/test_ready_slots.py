"""Host slots that get ready one by one, and those that never do."""

from planner_rig import Rig

from vllm_hicache.progress import WorkerProgress
from vllm_hicache.storage_messages import unpack_slots

TOKENS = list(range(100, 140))


def _slots(rig: Rig, *ready: int, refused: int = 0) -> None:
    for worker_id, number in enumerate(ready):
        progress = WorkerProgress(slots_ready=number, slots_refused=refused)
        rig.planner.join.update(worker_id, progress)
    rig.planner.settle_slots()
    rig.audit()


def test_saves_wait_for_slots_that_are_ready_on_all_workers():
    rig = Rig(num_workers=2, num_slots=8, num_ready_slots=2)
    state = rig.request("a", TOKENS[:20])
    rig.compute(state, 12)
    assert [len(op.copies) for op in rig.plan().saves] == [2]
    rig.finish_saves()
    assert rig.total("save_skipped_tokens/host_full") == 4
    _slots(rig, 8, 3)
    rig.compute(state, 16)  # what found no room before is saved with what follows
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 3
    _slots(rig, 8, 8)
    rig.compute(state, 20)
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 5
    assert rig.total("evicted_tokens") == 0


def test_gauges_say_how_many_slots_are_ready_and_who_stays_short():
    rig = Rig(num_workers=2, num_slots=8, num_ready_slots=2)
    _slots(rig)
    assert [rig.total(f"host_{what}") for what in ("slots_total", "slots_ready")] == [8, 2]
    _slots(rig, 8, 5, refused=3)
    assert [rig.total(f"host_{what}") for what in ("slots_total", "slots_ready")] == [8, 5]
    assert rig.total("host_pools_short") == 2


def test_shares_of_host_are_shares_of_what_is_ready():
    rig = Rig(num_slots=16, num_ready_slots=4, has_storage=True, fetch={"max_share": 0.5})
    rig.request("a", TOKENS[:33])
    fetch = rig.answer_query(8)
    assert len(unpack_slots(fetch.slots)) == 2
    kept = rig.request("b", list(range(17)), pin_s=9.0)
    rig.planner.pins.keep(kept, 0, 4, 0.0)
    assert rig.total("pin_refused_tokens") == 12

"""The simulator against a product that is broken on purpose: it must not look well."""

from typing import TYPE_CHECKING

import pytest

from vllm_hicache import progress
from vllm_hicache.persists import Persists
from vllm_hicache.saves import Saves
from vllm_hicache.simulate.faults import run_seed
from vllm_hicache.storage_link import WorldAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 100
SEEDS_PER_PUSH = 30
SEEDS_IN_FULL = 300
FULL_FIRST_SEED = 1_000_000


def consume_the_maximum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress, "min", max, raising=False)


def skip_an_empty_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    settle = WorldAnswer.settle

    def settle_unless_empty(self: WorldAnswer, worker_id: int, reason: str) -> bool:
        return bool(self.progress[worker_id]) and settle(self, worker_id, reason)

    patch.setattr(WorldAnswer, "settle", settle_unless_empty)


def free_blocks_before_the_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    take_planned = Saves.take_planned

    def take_and_release(self: Saves):
        ops = take_planned(self)
        for op in ops:
            save = self._running[op.op_id]
            self._blocks.release(save.block_ids)
            save.block_ids = ()
        return ops

    patch.setattr(Saves, "take_planned", take_and_release)


def publish_before_all_workers_have_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorldAnswer, "agreed", property(lambda self: max(self.progress)))


def reuse_a_slot_while_a_persist_reads_it(patch: pytest.MonkeyPatch) -> None:
    finish = Persists._finish

    def finish_when_settled(self: Persists, op: int, persist, now: float) -> None:
        persist.answer.released.update(range(persist.answer.world_size))
        finish(self, op, persist, now)

    patch.setattr(Persists, "_finish", finish_when_settled)


MUTATIONS = {
    consume_the_maximum: "Violation",
    skip_an_empty_acknowledgement: "no rest",
    free_blocks_before_the_acknowledgement: "may be reused",
    publish_before_all_workers_have_answered: "should hold",
    reuse_a_slot_while_a_persist_reads_it: "persist",
}
"""What is broken, and a word of what the simulator says then."""


def first_finding(first: int, num_seeds: int) -> str:
    for seed in range(first, first + num_seeds):
        failures = run_seed(seed, STEPS).failures
        if failures:
            return failures[0].what
    return "nothing was found"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_product_is_found_within_the_seeds_of_a_push(
    mutate: "Callable[[pytest.MonkeyPatch], None]", monkeypatch
):
    mutate(monkeypatch)
    assert MUTATIONS[mutate] in first_finding(0, SEEDS_PER_PUSH)


@pytest.mark.full
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_product_is_found_again_and_again(mutate, monkeypatch):
    mutate(monkeypatch)
    seeds = range(FULL_FIRST_SEED, FULL_FIRST_SEED + SEEDS_IN_FULL)
    found = [seed for seed in seeds if run_seed(seed, STEPS).failures]
    assert len(found) >= 3


def test_the_product_as_it_is_passes_the_same_seeds():
    assert first_finding(0, SEEDS_PER_PUSH) == "nothing was found"

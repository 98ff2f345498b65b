"""The simulator against a product that is broken on purpose: it must not look well."""

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from vllm_hicache import progress
from vllm_hicache.fetch_retries import FetchRetries
from vllm_hicache.host_tier import HostTier
from vllm_hicache.loads import Loads
from vllm_hicache.persists import Persists
from vllm_hicache.planner import Planner
from vllm_hicache.prefetch import Prefetcher
from vllm_hicache.prefix_index import PrefixIndex
from vllm_hicache.saves import Saves
from vllm_hicache.simulate.contents import Violation
from vllm_hicache.simulate.faults import run_seed
from vllm_hicache.simulate.script import StorageTrouble, draw_script
from vllm_hicache.simulate.story import Story
from vllm_hicache.storage_link import WorldAnswer
from vllm_hicache.unserved import Unserved

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 100
SEEDS_PER_PUSH = 400
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
    patch.setattr(Saves, "lose_block", lambda self, block_id: None)  # it would know them no more


def publish_before_all_workers_have_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorldAnswer, "agreed", property(lambda self: max(self.progress)))


def reuse_a_slot_while_a_persist_reads_it(patch: pytest.MonkeyPatch) -> None:
    finish = Persists._finish

    def finish_when_settled(self: Persists, op: int, persist, now: float) -> None:
        persist.answer.released.update(range(persist.answer.world_size))
        finish(self, op, persist, now)

    patch.setattr(Persists, "_finish", finish_when_settled)


def look_at_every_hash(patch: pytest.MonkeyPatch) -> None:
    def match(self: PrefixIndex, hashes, limit: int | None = None) -> int:
        number = 0
        while number < min(len(hashes), limit or len(hashes)) and hashes[number] in self:
            number += 1
        return number

    patch.setattr(PrefixIndex, "match", match)


def believe_that_everything_was_stored(patch: pytest.MonkeyPatch) -> None:
    finish = Persists._finish

    def finish_well(self: Persists, op: int, persist, now: float) -> None:
        persist.is_stored = True
        finish(self, op, persist, now)

    patch.setattr(Persists, "_finish", finish_well)


def believe_that_another_storage_has_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "forget_stored", lambda self: None)


def save_what_was_computed_before_a_reset(patch: pytest.MonkeyPatch) -> None:
    reset = Planner.reset
    patch.setattr(Planner, "reset", lambda self, name, requests=(): reset(self, name))


def use_loads_from_before_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loads, "forget", lambda self: self._landing.clear())


def number_saves_backwards(patch: pytest.MonkeyPatch) -> None:
    take_planned = Saves.take_planned
    patch.setattr(Saves, "take_planned", lambda self: take_planned(self)[::-1])


def forget_offers_that_were_not_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unserved, "note_refusal", lambda self, state: None)


def book_nothing_for_a_request_that_ends_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    book = Unserved.book

    def book_unless_ended(self: Unserved, state, num_loaded: int, ended: str = "") -> None:
        if not ended:
            book(self, state, num_loaded)

    patch.setattr(Unserved, "book", book_unless_ended)


def ask_again_for_whoever_stands_in_line(patch: pytest.MonkeyPatch) -> None:
    def ask_due(self: FetchRetries, namespace: str, now: float) -> None:
        while self._line and self._line[0][0] <= now:
            _, state = self._line.popleft()
            state.is_in_line = False
            self._ask_again(state, namespace, now)

    patch.setattr(FetchRetries, "ask_due", ask_due)


def leave_without_the_retry(patch: pytest.MonkeyPatch) -> None:
    leave = Prefetcher.leave

    def leave_the_rest(self: Prefetcher, state) -> None:
        state.retry = None
        leave(self, state)

    patch.setattr(Prefetcher, "leave", leave_the_rest)


def wait_for_storage_without_end(patch: pytest.MonkeyPatch) -> None:
    def should_wait(self: Prefetcher, state, num_local_tokens: int, now: float) -> bool:
        return state.fetch is not None and state.fetch.is_running

    patch.setattr(Prefetcher, "should_wait", should_wait)


def use_host_slots_that_one_worker_has(patch: pytest.MonkeyPatch) -> None:
    def take_slots(self: progress.ProgressJoin) -> tuple[int, int]:
        self.has_new_slots = False
        return sorted(self._slots_ready)[-1], 0

    patch.setattr(progress.ProgressJoin, "take_slots", take_slots)


MUTATIONS = {
    consume_the_maximum: "Violation",
    skip_an_empty_acknowledgement: "no rest",
    free_blocks_before_the_acknowledgement: "may be reused",
    publish_before_all_workers_have_answered: "should hold",
    reuse_a_slot_while_a_persist_reads_it: "persist",
    look_at_every_hash: "hashes were looked at",
    believe_that_everything_was_stored: "counts as stored",
    believe_that_another_storage_has_the_same: "counts as stored",
    save_what_was_computed_before_a_reset: "hold",
    use_loads_from_before_a_reset: "from before a reset",
    number_saves_backwards: "after",
    forget_offers_that_were_not_taken: "are booked as found",
    book_nothing_for_a_request_that_ends_in_the_queue: "ended before it was admitted",
    ask_again_for_whoever_stands_in_line: "waits not",
    leave_without_the_retry: "counts",
    use_host_slots_that_one_worker_has: "have memory everywhere",
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


def test_waiting_without_end_is_found_where_storage_is_silent(monkeypatch):
    """Silence that lasts is rare in random stories: processes are killed for it."""
    wait_for_storage_without_end(monkeypatch)
    assert "waits for storage" in first_silent_finding()


def test_the_planner_as_it_is_does_not_wait_for_a_silent_storage():
    assert first_silent_finding() == "nothing was found"


def first_silent_finding() -> str:
    for seed in range(8):
        script = draw_script(Random(seed))
        policy = replace(script.options.fetch, kind="timeout", base_s=0.01, exists_timeout_s=0.01)
        options = replace(script.options, fetch=replace(policy, min_tokens=0), defer_max_blocks=100)
        trouble = StorageTrouble(silence=0.2, hang=0.9)
        script = replace(
            script,
            world=(1, 1, 1),
            options=replace(options, page_bytes=(4096,)),
            trouble=trouble,
            slow_worker=None,
        )
        try:
            Story(seed, script=script).run(STEPS)
        except Violation as violation:
            return str(violation)
    return "nothing was found"


def test_the_product_as_it_is_passes_such_seeds():
    assert first_finding(0, 10) == "nothing was found"

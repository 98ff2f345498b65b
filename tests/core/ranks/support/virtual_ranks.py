"""An engine of workers that copy nothing: they take plans, start and finish copies, and report.

The checker is the real one, and so are the plans. What the workers mark is what real ones mark;
`tests/connectors/test_rank_checks.py` asserts that.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from vllm_hicache.checked_calls import checked, watch
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import CopyOp, Direction, StepPlan
from vllm_hicache.rank_consensus import ConsensusOptions, RankConsensus, check_plan
from vllm_hicache.rank_events import EventRecorder, pack_batch
from vllm_hicache.rank_places import places


class VirtualRank:
    """One worker."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.recorder = EventRecorder()
        self.plan: StepPlan | None = None
        self.running: dict[Direction, deque[int]] = {way: deque() for way in Direction}
        watch(self, self.recorder)

    @check_plan
    def bind(self, plan: StepPlan) -> None:
        self.plan = plan
        for op in (*plan.sync_loads, *plan.loads):
            self.start(Direction.LOAD, op)

    @checked(stream="start {direction}", key="op.op_id", arguments="op.all_copies")
    def start(self, direction: Direction, op: CopyOp) -> None:
        self.running[direction].append(op.op_id)

    @checked(in_step=True, result=True)
    def take_failed_requests(self) -> set[str]:
        return set(self.plan.failed_requests) if self.plan is not None else set()

    @checked(stream="finish {direction}", key="op_id", shown="is_ok")
    def finish(self, direction: Direction, op_id: int, is_ok: bool) -> None:
        """A copy has ended."""

    def run(self, plan: StepPlan) -> None:
        """A whole step, but for the copies."""
        self.bind(plan)
        for op in plan.saves:
            self.start(Direction.SAVE, op)
        self.take_failed_requests()

    def finish_next(self, direction: Direction, *, is_ok: bool = True) -> None:
        if self.running[direction]:
            self.finish(direction, self.running[direction].popleft(), is_ok)

    def report(self) -> bytes:
        return pack_batch(self.recorder.take_batch())


@dataclass
class VirtualRanks:
    """All workers of one engine, its scheduler's part of the checker, and what they may do wrong.

    ``wrong`` maps a worker to a function that runs a plan in its place.
    """

    folder: Path
    tp: int = 2
    pp: int = 2
    cp: int = 1
    mode: str = "report"
    num_events: int = 64
    seed: int = 0
    wrong: dict[int, Callable[[VirtualRank, StepPlan], None]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        options = ConsensusOptions(self.mode, self.num_events, str(self.folder))
        everyone = places(self.tp, self.pp, self.cp)
        self.consensus = RankConsensus(
            options, everyone, self.metrics, stop=lambda: self.stopped.append("process")
        )
        self.ranks = [VirtualRank(place.worker_id) for place in everyone]
        self.random = Random(self.seed)
        self.number = 0
        self.next_op = dict.fromkeys(Direction, 1)
        self.waiting: dict[int, deque[StepPlan]] = {rank.worker_id: deque() for rank in self.ranks}

    def new_plan(self, *, saves: int = 0, loads: int = 0, failed: Sequence[str] = ()) -> StepPlan:
        self.number += 1
        return StepPlan(
            number=self.number,
            loads=tuple(self.new_op(Direction.LOAD) for _ in range(loads)),
            saves=tuple(self.new_op(Direction.SAVE) for _ in range(saves)),
            failed_requests=tuple(failed),
        )

    def new_op(self, direction: Direction) -> CopyOp:
        op_id = self.next_op[direction]
        self.next_op[direction] += 1
        return CopyOp(op_id, np.full((op_id % 3 + 1, 4), op_id, np.int32))

    def send(self, plan: StepPlan) -> None:
        self.consensus.sent(plan)
        for plans in self.waiting.values():
            plans.append(plan)

    def run_next(self, worker_id: int) -> None:
        """The worker's next plan, and its report."""
        rank, plan = self.ranks[worker_id], self.waiting[worker_id].popleft()
        self.wrong.get(worker_id, VirtualRank.run)(rank, plan)

    def absorb(self, *worker_ids: int) -> None:
        """Reports of these workers, or of all."""
        chosen = worker_ids or range(len(self.ranks))
        batches = {i: self.ranks[i].report() for i in chosen}
        self.consensus.absorb(batches, batches.keys())

    def step(self, plan: StepPlan) -> None:
        """All workers run the plan at about the same time and finish its copies."""
        self.send(plan)
        for rank in self.ranks:
            self.run_next(rank.worker_id)
            for way in Direction:
                while rank.running[way]:
                    rank.finish_next(way)
        self.absorb()

    def settle(self) -> None:
        """Two steps without work: what is missing from a step shows with the next ones."""
        for _ in range(2):
            self.step(self.new_plan())

    def run_at_random(self, num_steps: int) -> None:
        """Every worker at its own pace; copies end whenever they like, and some fail."""
        rng = self.random
        for _ in range(num_steps):
            failed = ["a"] if rng.random() < 0.2 else []
            self.send(self.new_plan(saves=rng.randrange(3), loads=rng.randrange(3), failed=failed))
            for _ in range(2 * len(self.ranks)):
                self._move(rng.randrange(len(self.ranks)))
        for worker_id, plans in self.waiting.items():
            while plans or any(self.ranks[worker_id].running.values()):
                self._move(worker_id)
        self.absorb()

    def _move(self, worker_id: int) -> None:
        rank, rng = self.ranks[worker_id], self.random
        if self.waiting[worker_id] and rng.random() < 0.6:
            self.run_next(worker_id)
        rank.finish_next(rng.choice(list(Direction)), is_ok=rng.random() < 0.8)
        if rng.random() < 0.5:
            self.absorb(worker_id)

    def counted(self) -> dict[str, float]:
        """Divergences by class, those that are none left out."""
        totals = self.metrics.totals()
        name = "rank_divergences/"
        return {k.removeprefix(name): v for k, v in totals.items() if k.startswith(name) and v}


# What a worker may do wrong ----------------------------------------------------------------------

Run = Callable[[VirtualRank, StepPlan], None]


def at_step(number: int, run: Run) -> Run:
    """Wrong in this step only."""

    def run_or_behave(rank: VirtualRank, plan: StepPlan) -> None:
        (run if plan.number == number else VirtualRank.run)(rank, plan)

    return run_or_behave


def skip_plan(rank: VirtualRank, plan: StepPlan) -> None:
    """The plan never arrives."""


def skip_first_save(rank: VirtualRank, plan: StepPlan) -> None:
    rank.bind(plan)
    for op in plan.saves[1:]:
        rank.start(Direction.SAVE, op)
    rank.take_failed_requests()


def ask_twice(rank: VirtualRank, plan: StepPlan) -> None:
    rank.run(plan)
    rank.take_failed_requests()


def change_rows(rank: VirtualRank, plan: StepPlan) -> None:
    """The plan arrives with another device block."""
    saves = []
    for op in plan.saves:
        copies = op.copies.copy()
        copies[0, 2] += 1
        saves.append(CopyOp(op.op_id, copies))
    rank.run(replace(plan, saves=tuple(saves)))


def change_rows_after_bind(rank: VirtualRank, plan: StepPlan) -> None:
    """The plan arrives as it was sent; what is started is not what it says."""
    rank.bind(plan)
    for op in plan.saves:
        rank.start(Direction.SAVE, CopyOp(op.op_id, op.copies + 1))
    rank.take_failed_requests()


def lose_failures(rank: VirtualRank, plan: StepPlan) -> None:
    """The worker does not report the failed requests of its plan."""
    rank.bind(plan)
    for op in plan.saves:
        rank.start(Direction.SAVE, op)
    rank.plan = None
    rank.take_failed_requests()


def messages(caplog) -> list[str]:
    """What the checker said, warnings left out."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]

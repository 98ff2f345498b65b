"""Ranks with clocks, delays and failures of their own around one real planner, in virtual time.

Each rank has a random generator that no other rank shares. What it copies, reads and writes is
kept as the hash of the page that the bytes belong to, so that a wrong commit is seen.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random

from planner_rig import Rig

from vllm_hicache.plan import StepPlan
from vllm_hicache.progress import WorkerProgress
from vllm_hicache.storage_messages import (
    Cancel,
    Command,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReleased,
    unpack_hashes,
    unpack_slots,
)
from vllm_hicache.tiers import Direction, SlotOwner

MAX_DELAY_S = 0.05
FAILURE = 0.1


class Timeline:
    """What happens when; the rig's clock is its time."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def run_until(self, when: float) -> None:
        while self._events and self._events[0][0] <= when:
            self.rig.now, _, event = heapq.heappop(self._events)
            event()
        self.rig.now = when

    @property
    def is_empty(self) -> bool:
        return not self._events


class PrivateRank:
    """One worker and its storage process."""

    def __init__(self, worker_id: int, seed: int, time: Timeline, counts: Counter[str]) -> None:
        self.worker_id = worker_id
        self.rng = Random(f"{seed}-{worker_id}")
        self.time, self.rig, self.counts = time, time.rig, counts
        self.device: dict[int, bytes | None] = {}
        self.host: dict[int, bytes | None] = {}
        self.stored: set[bytes] = set()
        self.loaded: list[tuple[int, int]] = []
        """(number, blocks) of every load, as this rank has executed it."""
        self.num_plans = self.num_messages = 0
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._done = dict.fromkeys(Direction, 0)
        self._failed: dict[Direction, list[int]] = {direction: [] for direction in Direction}
        self._open: set[int] = set()
        self._num_told: Counter[int] = Counter()

    def later(self, event: Callable[[], None], start: float | None = None) -> float:
        """After a delay of its own, counted from ``start``."""
        when = (self.rig.now if start is None else start) + self.rng.uniform(0, MAX_DELAY_S)
        self.time.at(when, event)
        return when

    def fails(self, what: str) -> bool:
        has_failed = self.rng.random() < FAILURE
        self.counts[f"{what} failed"] += has_failed
        return has_failed

    # Copies ------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> None:
        """Every rank gets every plan, also those without work."""
        self.num_plans += 1
        for op in (*plan.sync_loads, *plan.loads):
            self._queue(Direction.LOAD, op.op_id, op.copies.tolist())
        for op in plan.saves:
            self._queue(Direction.SAVE, op.op_id, op.copies.tolist())

    def _queue(self, direction: Direction, op_id: int, rows: list[list[int]]) -> None:
        start = max(self._free_at[direction], self.rig.now)
        self._free_at[direction] = self.later(lambda: self._copy(direction, op_id, rows), start)

    def _copy(self, direction: Direction, op_id: int, rows: list[list[int]]) -> None:
        has_failed = self.fails(direction)
        owner = SlotOwner.OPERATION if direction is Direction.SAVE else SlotOwner.INDEX
        for slot, _, block_id, _ in rows:
            assert self.rig.planner.host.slots.owner(slot) is owner
            if direction is Direction.SAVE:
                self.host[slot] = None if has_failed else self.device[block_id]
            else:
                self.device[block_id] = None if has_failed else self.host[slot]
        if direction is Direction.LOAD:
            self.loaded.append((op_id, len(rows)))
        if has_failed:
            self._failed[direction].append(op_id)
        self._done[direction] = op_id
        self.rig.planner.join.update(
            self.worker_id,
            WorkerProgress(
                saves_done=self._done[Direction.SAVE],
                loads_done=self._done[Direction.LOAD],
                failed_saves=tuple(self._failed[Direction.SAVE]),
                failed_loads=tuple(self._failed[Direction.LOAD]),
            ),
        )

    # Storage -----------------------------------------------------------------------------------

    def read_messages(self) -> None:
        sent = self.rig.channels.sent[self.worker_id]
        for message in sent[self.num_messages :]:
            self._start(message)
        self.num_messages = len(sent)

    def _say(self, event: object) -> None:
        self.rig.channels.inbox.append((self.worker_id, event))

    def _start(self, message: Command) -> None:
        if isinstance(message, Exists):
            self.later(lambda: self._answer(message))
        elif isinstance(message, Fetch):
            self._open.add(message.op)
            self.later(lambda: self._read(message, 0))
        elif isinstance(message, Persist):
            self.later(lambda: self._write(message))
        elif isinstance(message, Cancel) and message.op in self._open:
            self._open.discard(message.op)
            self._say(FetchSettled(message.op, self._num_told[message.op], "cancelled"))

    def _answer(self, message: Exists) -> None:
        if self.fails("question"):
            self._say(ExistsResult(message.op, 0, ok=False, reason="unavailable"))
            return
        hashes = unpack_hashes(message.hashes)
        leading = next((i for i, h in enumerate(hashes) if h not in self.stored), len(hashes))
        self._say(ExistsResult(message.op, leading, ok=True))

    def _read(self, message: Fetch, page: int) -> None:
        """One page; a call that runs when the fetch is cancelled ends all the same."""
        hashes, slots = unpack_hashes(message.hashes), unpack_slots(message.slots)
        is_open, has_failed = message.op in self._open, self.fails("read")
        assert self.rig.planner.host.slots.owner(slots[page]) is SlotOwner.OPERATION
        self.host[slots[page]] = None if has_failed else hashes[page]
        if is_open and not has_failed:
            page += 1
            self._num_told[message.op] = page
            if page < len(hashes):
                self._say(FetchProgress(message.op, page))
                self.later(lambda: self._read(message, page))
                return
        if is_open:
            self._open.discard(message.op)
            reason = "corrupt" if has_failed else "complete"
            self._say(FetchSettled(message.op, self._num_told[message.op], reason))
        self.later(lambda: self._say(FetchReleased(message.op)))

    def _write(self, message: Persist) -> None:
        hashes, slots = unpack_hashes(message.hashes), unpack_slots(message.slots)
        if self.fails("write"):
            self._say(PersistDone(message.op, 0, 0, len(hashes), "unavailable"))
        else:
            assert [self.host[slot] for slot in slots] == hashes
            self.stored.update(hashes)
            self._say(PersistDone(message.op, len(hashes), 0, 0, "complete"))
        self.later(lambda: self._say(PersistReleased(message.op)))

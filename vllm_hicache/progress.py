"""Reports of the workers, and the join that turns them into one outcome for all.

A worker's counters are cumulative: "all operations up to n are done", per direction, and the
numbers of those that failed. Telling the same thing twice changes nothing.
"""

from dataclasses import dataclass, field

from vllm_hicache.plan import Direction


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What one worker has done so far."""

    saves_done: int = 0
    loads_done: int = 0
    failed_saves: tuple[int, ...] = ()
    failed_loads: tuple[int, ...] = ()
    saves_in_doubt: int = 0
    """Failures up to this number may be missing from ``failed_saves``."""
    loads_in_doubt: int = 0
    save_busy_s: float = 0.0
    load_busy_s: float = 0.0
    slots_ready: int = 0
    """Host slots below this number have their memory."""
    slots_refused: int = 0
    """Host slots, the last ones, that will never have it."""

    def done(self, direction: Direction) -> int:
        return self.saves_done if direction is Direction.SAVE else self.loads_done

    def failed(self, direction: Direction) -> tuple[int, ...]:
        return self.failed_saves if direction is Direction.SAVE else self.failed_loads

    def in_doubt(self, direction: Direction) -> int:
        return self.saves_in_doubt if direction is Direction.SAVE else self.loads_in_doubt

    def busy_s(self, direction: Direction) -> float:
        return self.save_busy_s if direction is Direction.SAVE else self.load_busy_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """One operation, finished on every worker; ``is_ok`` only where all succeeded."""

    direction: Direction
    op_id: int
    is_ok: bool


@dataclass(slots=True)
class _Lane:
    """One direction of the join."""

    done: list[int]
    busy_s: list[float]
    consumed: int = 0
    in_doubt: int = 0
    failed: set[int] = field(default_factory=set)


class ProgressJoin:
    """Minimum over all workers, consumed once and in order.

    What fast workers did beyond the slowest one stays queued. A worker that has said
    nothing yet counts as having done nothing. Host slots are ready where they are ready on all
    workers, ``num_ready_slots`` of them from the start.

    >>> join = ProgressJoin(2)
    >>> join.update(0, WorkerProgress(saves_done=2)); join.consume(Direction.SAVE)
    []
    >>> join.update(1, WorkerProgress(saves_done=1, failed_saves=(1,)))
    >>> join.consume(Direction.SAVE)
    [Outcome(direction=<Direction.SAVE: 'save'>, op_id=1, is_ok=False)]
    """

    def __init__(self, world_size: int, num_ready_slots: int = 0) -> None:
        self.world_size = world_size
        self.has_new_slots = False
        """Whether a worker has told of host slots since ``take_slots``."""
        self._slots_ready = [num_ready_slots] * world_size
        self._slots_refused = [0] * world_size
        self.num_ignored = 0
        self._lanes = {
            direction: _Lane([0] * world_size, [0.0] * world_size) for direction in Direction
        }
        self._latest: list[WorkerProgress | None] = [None] * world_size

    def update(self, worker_id: int, progress: WorkerProgress) -> None:
        """Take over a worker's counters. Older or unknown ones are ignored and counted."""
        if not 0 <= worker_id < self.world_size:
            self.num_ignored += 1
            return
        if progress is self._latest[worker_id]:
            return
        self._latest[worker_id] = progress
        self._note_slots(worker_id, progress)
        for direction, lane in self._lanes.items():
            done = progress.done(direction)
            if done < lane.done[worker_id]:
                self.num_ignored += 1
                continue
            lane.done[worker_id] = done
            lane.busy_s[worker_id] = progress.busy_s(direction)
            lane.in_doubt = max(lane.in_doubt, progress.in_doubt(direction))
            lane.failed.update(op for op in progress.failed(direction) if op > lane.consumed)

    def _note_slots(self, worker_id: int, progress: WorkerProgress) -> None:
        if progress.slots_ready > self._slots_ready[worker_id]:
            self._slots_ready[worker_id] = progress.slots_ready
            self.has_new_slots = True
        if progress.slots_refused > self._slots_refused[worker_id]:
            self._slots_refused[worker_id] = progress.slots_refused
            self.has_new_slots = True

    def take_slots(self) -> tuple[int, int]:
        """Host slots that are ready on every worker, and those that never will be on some."""
        self.has_new_slots = False
        return min(self._slots_ready), max(self._slots_refused)

    @property
    def num_short_workers(self) -> int:
        """Workers that could not get the memory for all their slots."""
        return sum(map(bool, self._slots_refused))

    def consume(self, direction: Direction) -> list[Outcome]:
        """Operations that every worker has finished and that were not consumed before."""
        lane = self._lanes[direction]
        agreed = min(lane.done)
        if agreed <= lane.consumed:
            return []
        outcomes = [
            Outcome(direction, op_id, op_id > lane.in_doubt and op_id not in lane.failed)
            for op_id in range(lane.consumed + 1, agreed + 1)
        ]
        lane.failed = {op_id for op_id in lane.failed if op_id > agreed}
        lane.consumed = agreed
        return outcomes

    def failures(self, direction: Direction) -> set[int]:
        """Operations that failed on some worker while others are behind: not consumed yet."""
        return self._lanes[direction].failed

    def consumed(self, direction: Direction) -> int:
        return self._lanes[direction].consumed

    def busy_seconds(self, direction: Direction) -> float:
        """Copy time of the slowest worker so far."""
        return max(self._lanes[direction].busy_s)

    def slowest_worker(self, direction: Direction) -> int:
        done = self._lanes[direction].done
        return done.index(min(done))

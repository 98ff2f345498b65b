"""Workers without bytes: what a granule holds is a tag, so that a wrong copy is seen.

A tag names the tokens and the weights that the KV of a granule was computed from. ``Garbage``
stands for bytes that mean nothing: a failed copy, a read that was torn, a forward on top of them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from vllm_hicache.plan import CopyOp, Direction, StepPlan
from vllm_hicache.progress import WorkerProgress
from vllm_hicache.tiers import SlotOwner


@dataclass(frozen=True)
class Garbage:
    """Bytes that nobody may use."""

    source: str


Tag = int | Garbage | None


def next_tag(previous: Tag, tokens: tuple[int, ...], weights: int) -> int:
    """Tag of the granule after ``previous``."""
    return hash((previous, tokens, weights))


@dataclass
class Item:
    """One request's part of a step, as it was when the step was scheduled."""

    request: object
    epoch: int
    block_ids: list[int]
    tags: list[int]
    """What the granules up to the step's end shall hold."""
    first_granule: int
    last_granule: int
    num_tokens: int


@dataclass
class Step:
    """One scheduled step until all workers have run it."""

    plan: StepPlan
    items: list[Item]
    runs: int = 0
    invalid_blocks: set[int] = field(default_factory=set)


class VirtualWorker:
    """Copies in order per direction, whenever its turn comes; some fail."""

    def __init__(
        self,
        worker_id: int,
        *,
        num_blocks: int,
        granules_per_block: int,
        num_slots: int,
        granules_per_page: int,
        rng: Random,
        failure_rate: dict[Direction, float],
        owner: Callable[[int], SlotOwner],
        is_held: Callable[[int], bool],
    ) -> None:
        self.worker_id = worker_id
        self.device: list[list[Tag]] = [[None] * granules_per_block for _ in range(num_blocks)]
        self.host: list[list[Tag]] = [[None] * granules_per_page for _ in range(num_slots)]
        self.steps: deque[Step] = deque()
        self._rng = rng
        self._failure_rate = failure_rate
        self._owner = owner
        self._is_held = is_held
        self._lanes: dict[Direction, deque[tuple[CopyOp, bool]]] = {d: deque() for d in Direction}
        self._done = dict.fromkeys(Direction, 0)
        self._failed: dict[Direction, list[int]] = {d: [] for d in Direction}
        self._told = dict.fromkeys(Direction, 0)
        self._old_progress: deque[WorkerProgress] = deque([WorkerProgress()], maxlen=4)

    # Reports -----------------------------------------------------------------------------------

    def progress(self) -> WorkerProgress:
        """What the board says. A thread may be late to write to it, except that a failed copy is
        told before the forward that it spoils."""
        for direction, done in self._done.items():
            if self._rng.random() < 0.7:
                self._told[direction] = done
        progress = WorkerProgress(
            saves_done=self._told[Direction.SAVE],
            loads_done=self._told[Direction.LOAD],
            failed_saves=tuple(self._failed[Direction.SAVE]),
            failed_loads=tuple(self._failed[Direction.LOAD]),
            load_busy_s=self._told[Direction.LOAD] * 0.001,
        )
        self._old_progress.append(progress)
        return progress

    def late_progress(self) -> WorkerProgress:
        """A report that was on its way for a while."""
        return self._rng.choice(self._old_progress)

    @property
    def is_quiet(self) -> bool:
        return not self.steps and not any(self._lanes.values())

    # Work --------------------------------------------------------------------------------------

    def run_step(self) -> None:
        """The next plan: loads start, the forward runs, saves start."""
        step = self.steps.popleft()
        for op in (*step.plan.sync_loads, *step.plan.loads):
            self._submit(Direction.LOAD, op)
        last_sync = step.plan.sync_loads[-1].op_id if step.plan.sync_loads else 0
        while self._done[Direction.LOAD] < last_sync:
            self.copy_next(Direction.LOAD)
        for op in step.plan.sync_loads:
            if op.op_id in self._failed[Direction.LOAD]:
                step.invalid_blocks.update(op.copies[:, 2].tolist())
        for item in step.items:
            self._forward(item)
        for op in step.plan.saves:
            self._submit(Direction.SAVE, op)
        step.runs += 1

    def copy_next(self, direction: Direction) -> bool:
        """Finish the oldest copy of this direction; False where there is none."""
        if not self._lanes[direction]:
            return False
        op, has_copied = self._lanes[direction].popleft()
        assert op.op_id == self._done[direction] + 1
        is_ok = self._rng.random() >= self._failure_rate[direction]
        if not has_copied:
            self._copy(direction, op)
        if not is_ok:
            self._spoil(direction, op)
            self._failed[direction].append(op.op_id)
            self._told[direction] = op.op_id
        self._done[direction] = op.op_id
        return True

    def _submit(self, direction: Direction, op: CopyOp) -> None:
        copies_now = self._rng.random() < 0.3
        if copies_now and not self._lanes[direction]:
            self._copy(direction, op)
        else:
            copies_now = False
        self._lanes[direction].append((op, copies_now))

    def _copy(self, direction: Direction, op: CopyOp) -> None:
        for slot, in_page, block_id, in_block in op.copies.tolist():
            if direction is Direction.SAVE:
                assert self._owner(slot) is SlotOwner.OPERATION, f"save writes to slot {slot}"
                assert self._is_held(block_id), f"save reads block {block_id}, which may be reused"
                self.host[slot][in_page] = self.device[block_id][in_block]
            else:
                assert self._owner(slot) is SlotOwner.INDEX, f"load reads slot {slot}"
                self.device[block_id][in_block] = self.host[slot][in_page]

    def _spoil(self, direction: Direction, op: CopyOp) -> None:
        for slot, in_page, block_id, in_block in op.copies.tolist():
            if direction is Direction.SAVE:
                self.host[slot][in_page] = Garbage(f"save {op.op_id}")
            else:
                self.device[block_id][in_block] = Garbage(f"load {op.op_id}")

    def _forward(self, item: Item) -> None:
        """Read everything before, write the granules that the step completes."""
        width = len(self.device[0])
        is_sound = True
        for granule in range(item.first_granule):
            held = self.device[item.block_ids[granule // width]][granule % width]
            if held != item.tags[granule]:
                # Only what a failed load has left may be met here; vLLM hears of it this step.
                assert isinstance(held, Garbage), (
                    f"worker {self.worker_id}: granule {granule} holds {held}, "
                    f"expected {item.tags[granule]}"
                )
                is_sound = False
        for granule in range(item.first_granule, item.last_granule):
            block_id = item.block_ids[granule // width]
            tag: Tag = item.tags[granule] if is_sound else Garbage("forward on garbage")
            self.device[block_id][granule % width] = tag

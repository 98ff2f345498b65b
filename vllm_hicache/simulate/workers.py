"""Virtual workers: copies in order per direction, whenever their turn comes; some fail."""

from collections import Counter, deque
from random import Random
from typing import Protocol

from vllm_hicache.progress import WorkerProgress
from vllm_hicache.simulate.contents import Garbage, Tag, Violation
from vllm_hicache.simulate.script import Script
from vllm_hicache.simulate.steps import Copy, Item, Step
from vllm_hicache.tiers import Direction, SlotOwner


class Ownership(Protocol):
    """Who may be written to and read from now, as the scheduler has it."""

    def slot_owner(self, slot: int) -> SlotOwner: ...

    def is_held(self, block_id: int) -> bool:
        """Whether this device block cannot be reused now."""

    def is_readable_by_others(self, block_id: int) -> bool: ...


class VirtualWorker:
    """One rank: its device blocks, its host slots, its copy lanes and what it has told of them."""

    def __init__(
        self,
        worker_id: int,
        script: Script,
        rng: Random,
        ownership: Ownership,
        counts: Counter[str],
    ) -> None:
        self.worker_id = worker_id
        granules = script.granules_per_block
        self.device: list[list[Tag]] = [[None] * granules for _ in range(script.num_blocks)]
        pages = script.options.num_host_slots
        self.host: list[list[Tag]] = [[None] * script.granules_per_page for _ in range(pages)]
        self.changed_slots: set[int] = set()
        """Host slots that were written to since the last check."""
        self.num_ready = script.options.first_slots
        """Host slots that have their memory."""
        self.steps: deque[Step] = deque()
        self._num_refused = 0
        self._rng = rng
        self._script = script
        self._ownership = ownership
        self._counts = counts
        self._failure_rate = {
            Direction.SAVE: script.save_failure,
            Direction.LOAD: script.load_failure,
        }
        # What write_back reads from a block that was reused meanwhile is thrown away.
        self._holds_saves = script.options.write_policy != "write_back"
        self._last_plan = 0
        self._lanes: dict[Direction, deque[tuple[Copy, bool]]] = {d: deque() for d in Direction}
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
        failed_saves, saves_in_doubt = self._failures(Direction.SAVE)
        failed_loads, loads_in_doubt = self._failures(Direction.LOAD)
        progress = WorkerProgress(
            saves_done=self._told[Direction.SAVE],
            loads_done=self._told[Direction.LOAD],
            failed_saves=failed_saves,
            failed_loads=failed_loads,
            saves_in_doubt=saves_in_doubt,
            loads_in_doubt=loads_in_doubt,
            load_busy_s=self._told[Direction.LOAD] * 0.001,
            slots_ready=self.num_ready,
            slots_refused=self._num_refused,
        )
        self._old_progress.append(progress)
        return progress

    def late_progress(self) -> WorkerProgress:
        """A report that was on its way for a while."""
        return self._rng.choice(self._old_progress)

    def _failures(self, direction: Direction) -> tuple[tuple[int, ...], int]:
        """The last failures, as a ring keeps them, and up to where older ones may be missing."""
        failed, ring = self._failed[direction], self._script.failure_ring
        if len(failed) < ring:
            return tuple(failed), 0
        self._counts["failures forgotten"] += len(failed) > ring
        return tuple(failed[-ring:]), failed[-ring] - 1

    @property
    def num_done(self) -> int:
        """Copies that are done, of both directions."""
        return sum(self._done.values())

    @property
    def has_copies(self) -> bool:
        return any(self._lanes.values())

    @property
    def is_quiet(self) -> bool:
        return not self.steps and not self.has_copies

    # Work --------------------------------------------------------------------------------------

    def grow(self) -> None:
        """The next piece of the host pool gets ready or is refused, if its time has come."""
        times, num_slots = self._script.growth, len(self.host)
        if times is None or self._num_refused or self.num_ready == num_slots:
            return
        if self._rng.random() >= times.rates[self.worker_id]:
            return
        if self.worker_id == times.short_worker and self.num_ready >= times.short_at:
            self._num_refused = num_slots - self.num_ready
            self._counts["host memory refused"] += 1
            return
        self.num_ready = min(self.num_ready + times.piece, num_slots)

    def run_step(self) -> None:
        """The next plan: loads start, the forward runs, saves start."""
        step = self.steps.popleft()
        if step.plan.number != self._last_plan + 1:
            raise Violation(
                f"worker {self.worker_id} gets plan {step.plan.number} after {self._last_plan}"
            )
        self._last_plan = step.plan.number
        for copy in (*step.sync_loads, *step.loads):
            self._submit(copy)
        last_sync = step.sync_loads[-1].op_id if step.sync_loads else 0
        while self._done[Direction.LOAD] < last_sync:
            self.copy_next(Direction.LOAD)
        for copy in step.sync_loads:
            if copy.op_id in self._failed[Direction.LOAD]:
                step.invalid_blocks.update(row[2] for row in copy.rows)
        for item in step.items:
            self._forward(item)
        for copy in step.saves:
            self._submit(copy)
        step.num_runs += 1

    def copy_next(self, direction: Direction) -> bool:
        """Finish the oldest copy of this direction; False where there is none."""
        if not self._lanes[direction]:
            return False
        copy, has_copied = self._lanes[direction].popleft()
        if copy.op_id != self._done[direction] + 1:
            raise Violation(
                f"worker {self.worker_id}: {direction} {copy.op_id} after {self._done[direction]}"
            )
        if not has_copied:
            self._copy(copy)
        if self._rng.random() < self._failure_rate[direction]:
            self._spoil(copy)
            self._failed[direction].append(copy.op_id)
            self._told[direction] = copy.op_id
            self._counts[f"{direction} failed"] += 1
        self._done[direction] = copy.op_id
        return True

    def write_slot(self, slot: int, content: list[Tag]) -> None:
        """Storage brings a page, or a piece of one."""
        if self._ownership.slot_owner(slot) is not SlotOwner.OPERATION:
            raise Violation(f"worker {self.worker_id}: a fetch writes to slot {slot}")
        self._check_ready(slot)
        self.host[slot] = content
        self.changed_slots.add(slot)

    def _submit(self, copy: Copy) -> None:
        lane = self._lanes[copy.direction]
        copies_now = not lane and self._rng.random() < 0.3
        if copies_now:
            self._copy(copy)
        lane.append((copy, copies_now))

    def _copy(self, copy: Copy) -> None:
        host, device, ownership = self.host, self.device, self._ownership
        is_save = copy.direction is Direction.SAVE
        needed = SlotOwner.OPERATION if is_save else SlotOwner.INDEX
        for slot, in_page, block_id, in_block in copy.rows:
            if ownership.slot_owner(slot) is not needed:
                raise Violation(f"{copy.direction} {copy.op_id} uses slot {slot} of another owner")
            self._check_ready(slot)
            # Steps are in order: one that reuses a block of a synchronous load runs after it.
            is_needed = self._holds_saves if is_save else copy.is_async
            if is_needed and not ownership.is_held(block_id):
                raise Violation(
                    f"{copy.direction} {copy.op_id} uses block {block_id}, which may be reused"
                )
            if is_save:
                host[slot][in_page] = device[block_id][in_block]
                self.changed_slots.add(slot)
                continue
            if copy.is_async and ownership.is_readable_by_others(block_id):
                raise Violation(f"load {copy.op_id} writes to block {block_id}, others may read it")
            device[block_id][in_block] = host[slot][in_page]

    def _check_ready(self, slot: int) -> None:
        if slot >= self.num_ready:
            raise Violation(
                f"slot {slot} is used, worker {self.worker_id} has memory for {self.num_ready}"
            )

    def _spoil(self, copy: Copy) -> None:
        garbage = Garbage(f"{copy.direction} {copy.op_id}")
        for slot, in_page, block_id, in_block in copy.rows:
            if copy.direction is Direction.SAVE:
                self.host[slot][in_page] = garbage
                self.changed_slots.add(slot)
            else:
                self.device[block_id][in_block] = garbage

    def _forward(self, item: Item) -> None:
        """Read everything before, write the granules that the step completes."""
        width, device, tags = len(self.device[0]), self.device, item.tags
        is_sound = True
        for granule in range(item.first_granule):
            held = device[item.block_ids[granule // width]][granule % width]
            if held != tags[granule]:
                # Only what a failed load has left may be met here; vLLM hears of it this step.
                if not isinstance(held, Garbage):
                    raise Violation(
                        f"worker {self.worker_id}: granule {granule} of "
                        f"{item.request.request_id} holds {held}, expected {tags[granule]}"
                    )
                is_sound = False
        for granule in range(item.first_granule, item.last_granule):
            tag: Tag = tags[granule] if is_sound else Garbage("forward on garbage")
            device[item.block_ids[granule // width]][granule % width] = tag

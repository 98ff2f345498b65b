"""One scheduled step, as every worker gets it."""

from dataclasses import dataclass, field

from vllm_hicache.plan import StepPlan
from vllm_hicache.simulate.requests import Request
from vllm_hicache.tiers import Direction

Rows = list[list[int]]
"""[slot, granule in page, block, granule in block] of every granule of a copy."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request's part of a step, as it was when the step was scheduled."""

    request: Request
    epoch: int
    block_ids: list[int]
    tags: list[int]
    """What the granules up to the step's end shall hold."""
    first_granule: int
    last_granule: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A device copy of a plan."""

    direction: Direction
    op_id: int
    rows: Rows
    is_async: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """One scheduled step until all workers have run it."""

    plan: StepPlan
    items: list[Item]
    sync_loads: list[Copy] = field(default_factory=list)
    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)
    num_runs: int = 0
    invalid_blocks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        plan = self.plan
        load, save = Direction.LOAD, Direction.SAVE
        self.sync_loads = [Copy(load, op.op_id, op.copies.tolist()) for op in plan.sync_loads]
        self.loads = [Copy(load, op.op_id, op.copies.tolist(), True) for op in plan.loads]
        self.saves = [Copy(save, op.op_id, op.copies.tolist()) for op in plan.saves]

"""What a seed decides before its story begins: sizes, options, and how often what goes wrong."""

from dataclasses import dataclass, replace
from random import Random

from vllm_hicache.fetch import FetchPolicy
from vllm_hicache.planner_options import PlannerOptions

SIZES = ((4, 4), (4, 4), (8, 4), (4, 8), (8, 2), (2, 8))
"""(page size, block size) in tokens."""
SMALL_WORLDS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2))
LARGE_WORLDS = ((4, 2, 1), (2, 2, 2), (4, 1, 4), (4, 4, 1), (8, 2, 2), (8, 4, 2), (16, 2, 2))
"""TP x PP x CP, up to 64 workers."""
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StorageTrouble:
    """Chances of things going wrong in storage, each time that they can."""

    death: float = 0.0
    """A storage process is killed; it comes back."""
    silence: float = 0.0
    """A storage process answers nothing for a while, or until it is killed."""
    hang: float = 0.0
    """A call to the backend does not come back; only its deadline does."""
    refusal: float = 0.0
    missing: float = 0.0
    corrupt: float = 0.0
    full: float = 0.0
    duplicate: float = 0.0
    unsent: float = 0.0
    """The queue to a process is full."""


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """How the host pools of a story get ready after ``options.num_ready_slots`` were."""

    rates: tuple[float, ...]
    """Chance that a worker's next piece gets ready in a step, by worker."""
    piece: int
    """Slots of a piece."""
    short_worker: int | None
    """This one is refused all pieces from ``short_at`` slots on."""
    short_at: int


@dataclass(frozen=True, slots=True)
class Script:
    """One story's circumstances. ``None`` for ``trouble`` means no storage."""

    world: tuple[int, int, int]
    page_size: int
    block_size: int
    num_blocks: int
    has_prefix_cache: bool
    depth: int
    """Steps that are in flight at most."""
    step_tokens: int
    prefill_s: float
    options: PlannerOptions
    trouble: StorageTrouble | None
    has_earlier_pages: bool
    save_failure: float
    load_failure: float
    failure_ring: int
    """Failures that a worker remembers."""
    slow_worker: int | None
    """This one seldom gets its turn."""
    late_report: float
    dropped_report: float
    reset_rate: float
    loss_rate: float
    switch_rate: float
    growth: PoolTimes | None
    """How host slots get ready; None: all are from the start."""

    @property
    def world_size(self) -> int:
        tp, pp, cp = self.world
        return tp * pp * cp

    @property
    def granules_per_page(self) -> int:
        return self.page_size // min(self.page_size, self.block_size)

    @property
    def granules_per_block(self) -> int:
        return self.block_size // min(self.page_size, self.block_size)

    def calm(self) -> "Script":
        """The same without new trouble: how a story ends."""
        trouble = self.trouble and StorageTrouble(
            missing=self.trouble.missing, corrupt=self.trouble.corrupt
        )
        return replace(self, trouble=trouble, slow_worker=None)


def draw_script(rng: Random) -> Script:
    """The circumstances of one seed."""
    page, block = rng.choice(SIZES)
    is_large = rng.random() < 0.05
    world = rng.choice(LARGE_WORLDS if is_large else SMALL_WORLDS)
    world_size = world[0] * world[1] * world[2]
    has_prefix_cache = rng.random() < 0.8
    num_slots = rng.choice((24, 32, 48, 96, 240)) // page
    has_storage = rng.random() < 0.8
    growth = _draw_growth(rng, num_slots, world_size) if rng.random() < 0.15 else None
    num_ready = rng.randint(1, num_slots - 1) if growth is not None else None
    options = _draw_options(rng, page, block, num_slots, world_size, has_prefix_cache)
    script = Script(
        world=world,
        page_size=page,
        block_size=block,
        num_blocks=rng.choice((80, 80, 80, 96, 160)) // block,
        has_prefix_cache=has_prefix_cache,
        depth=rng.choice((1, 1, 2, 3)),
        step_tokens=rng.choice((8, 16, 24)),
        prefill_s=rng.choice((0.05, 5.0, 20.0)),
        options=replace(options, num_ready_slots=num_ready),
        trouble=_draw_trouble(rng) if has_storage else None,
        has_earlier_pages=rng.random() < 0.85,
        save_failure=rng.choice((0.0, 0.02, 0.1)) / max(1, world_size / 4),
        load_failure=rng.choice((0.0, 0.05, 0.3)) / max(1, world_size / 4),
        failure_ring=rng.choice((1, 2, 128)),
        slow_worker=rng.randrange(world_size) if rng.random() < 0.3 else None,
        late_report=rng.choice((0.0, 0.2)),
        dropped_report=rng.choice((0.0, 0.2)),
        reset_rate=rng.choice((0.0, 0.0, 0.0, 0.005, 0.02)),
        loss_rate=rng.choice((0.0, 0.0, 0.0, 0.01)),
        switch_rate=rng.choice((0.0, 0.0, 0.03)),
        growth=growth,
    )
    if script.depth == 1:
        return script
    # As of an engine with several batches in flight: seed 7921 preempted a request whose load then
    # failed, and its blocks were in the prefix cache by then.
    return replace(script, options=replace(options, num_ready_slots=num_ready, sync_load_max_s=0.0))


def _draw_growth(rng: Random, num_slots: int, world_size: int) -> PoolTimes:
    return PoolTimes(
        rates=tuple(rng.choice((0.05, 0.2, 0.6)) for _ in range(world_size)),
        piece=rng.choice((1, 1, 2, 4)),
        short_worker=rng.randrange(world_size) if rng.random() < 0.9 else None,
        short_at=rng.randrange(num_slots),
    )


def _draw_trouble(rng: Random) -> StorageTrouble:
    if rng.random() < 0.2:
        return StorageTrouble()
    return StorageTrouble(
        death=rng.choice((0.0, 0.01, 0.02)),
        silence=rng.choice((0.0, 0.0, 0.01)),
        hang=rng.choice((0.0, 0.0, 0.15)),
        refusal=rng.choice((0.0, 0.0, 0.3)),
        missing=rng.choice((0.0, 0.0, 0.2)),
        corrupt=rng.choice((0.0, 0.2, 0.4)),
        full=rng.choice((0.0, 0.2)),
        duplicate=rng.choice((0.0, 0.1)),
        unsent=rng.choice((0.0, 0.02)),
    )


def _draw_options(
    rng: Random,
    page: int,
    block: int,
    num_slots: int,
    world_size: int,
    shares_device_pages: bool,
) -> PlannerOptions:
    return PlannerOptions(
        page_size=page,
        block_size=block,
        num_host_slots=num_slots,
        page_bytes=(PAGE_BYTES,) * world_size,
        eviction=rng.choice(("next_use", "lru", "lfu", "slru", "priority")),
        fetch=FetchPolicy(
            kind=rng.choice(("timeout", "timeout", "best_effort", "wait_complete")),
            base_s=rng.choice((0.05, 0.5, 5.0)),
            per_1k_tokens_s=0.25,
            min_tokens=rng.choice((0, 2 * page, 3 * page)),
            exists_timeout_s=rng.choice((0.02, 0.2, 2.0)),
            read_timeout_s=rng.choice((0.05, 0.05, 0.2, 3.0)),
            max_share=rng.choice((0.25, 0.5, 1.0)),
            max_tenant_share=rng.choice((0.25, 1.0)),
            retry_s=rng.choice((0.0, 0.01, 0.01, 0.05)),
            max_retries=rng.choice((0, 1, 8, 8)),
        ),
        persist_timeout_s=rng.choice((0.1, 0.5, 5.0)),
        sync_load_max_s=rng.choice((0.0, 0.003, 0.003)),
        defer_max_blocks=rng.choice((0, 0, 0, 1, 100)),
        shares_device_pages=shares_device_pages,
        write_policy=rng.choice(("write_through",) * 3 + ("write_through_selective", "write_back")),
        min_uses=rng.choice((1, 2, 3)),
        num_ahead_blocks=rng.choice((2, 8, 20)),
        admission=rng.choice(("always", "probation")),
        max_pinned_share=rng.choice((0.0, 0.25)),
        skip_slow_loads=rng.random() < 0.3,
    )

"""What travels inside vLLM's own messages between scheduler and workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_hicache.plan import StepPlan
from vllm_hicache.progress import WorkerProgress


@dataclass(frozen=True)
class PlanMetadata(KVConnectorMetadata):
    """Scheduler -> workers, once per step."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Workers -> scheduler: counters since the start, by worker; the newest one says it all."""

    progress: dict[int, WorkerProgress] = field(default_factory=dict)
    plan_number: int = 0
    """Plan of the step whose output carries this report."""
    events: dict[int, bytes] | None = None
    """Packed batches of the rank-consensus checker, by worker; None while it is off."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        if not isinstance(other, ReportMetadata):
            raise TypeError(f"expected a ReportMetadata, got {type(other).__name__}")
        plan_number = min(self.plan_number, other.plan_number)
        progress = {**self.progress, **other.progress}
        if self.events is None and other.events is None:
            return ReportMetadata(progress, plan_number)
        events = {**(self.events or {}), **(other.events or {})}
        return ReportMetadata(progress, plan_number, events)


@dataclass(frozen=True)
class PageRows:
    """What an engine's namespace says of its rows: the same on all workers.

    A model of several pools has zeros: each of them has a digest of its own.
    """

    kind: str
    """``full_attention``, ``latent``, ``window``, ``chunk``, or ``pools``."""
    reach: int
    """Tokens of the window or chunk; 0 without one."""
    page_size: int
    token_packing: str
    k_row_bytes: int
    v_row_bytes: int
    total_kv_heads: int
    heads_per_group: int
    layer_partition: int


@dataclass(frozen=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once, after its KV cache is registered."""

    worker_id: int
    num_slots: int
    page_bytes: int
    bytes_per_token: tuple[int, ...]
    """Of each KV cache group on this worker; of a state, its own bytes."""
    layout_digest: int
    rows: PageRows
    storage_address: str | None
    board_path: str
    board_token: int
    num_ready_slots: int | None = None
    """Host slots that have their memory already; None: all. The board tells of more."""


def first_slots(hellos: Sequence[WorkerHello]) -> int | None:
    """Host slots that have their memory on every worker; None: all."""
    known = [h.num_ready_slots for h in hellos if h.num_ready_slots is not None]
    return min(known, default=None)

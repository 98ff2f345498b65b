"""The workers' part of each connector in virtual time: which copies a step starts, when they may,
and when the scheduler is told that they have ended.

Copies are behind the same work of the device as in each connector's real worker, and reports go
the same way. vLLM's connectors look which copies have ended when a batch is launched, and the
batch's output brings it; ours writes boards which the scheduler reads whenever it wants.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from vllm_hicache.benchmarks.device_model import HostLink
from vllm_hicache.connectors.messages import PageRows, ReportMetadata, WorkerHello
from vllm_hicache.plan import CopyOp, Direction
from vllm_hicache.progress_board import ProgressBoard


@dataclass(frozen=True, slots=True)
class CopySizes:
    """What the copies of an engine are made of."""

    block_size: int
    page_size: int
    """Of ours."""
    token_bytes: int
    """Of KV in all layers."""
    num_layers: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch that is handed to the device."""

    now_s: float
    """When."""
    free_s: float
    """When all that was enqueued before will have ended; not before ``now_s``."""


class VirtualWorker(Protocol):
    """One worker of one engine. Moments are seconds of the virtual clock."""

    def before_forward(self, metadata: Any, launch: Launch) -> float:
        """Start what comes before a forward; the moment at which the forward may start."""

    def after_forward(self, metadata: Any, launch: Launch, end_s: float) -> None:
        """Start what comes behind a forward, which ends at ``end_s``."""

    def report(self, metadata: Any, launch: Launch) -> KVConnectorOutput | None:
        """What the batch's output says of copies; asked last at its launch."""

    def advance(self, now_s: float) -> None:
        """It is now so late: show what the scheduler can see without an output."""

    def close(self) -> None:
        """Give back what it holds."""


class NoConnector:
    """Nothing to copy."""

    def before_forward(self, metadata: Any, launch: Launch) -> float:
        return launch.free_s

    def after_forward(self, metadata: Any, launch: Launch, end_s: float) -> None: ...

    def report(self, metadata: Any, launch: Launch) -> KVConnectorOutput | None:
        return None

    def advance(self, now_s: float) -> None: ...

    def close(self) -> None: ...


class HiCacheWorker(NoConnector):
    """Ours: loads start behind the work enqueued before their step, saves behind its forward."""

    def __init__(self, link: HostLink, sizes: CopySizes, *, is_layerwise: bool) -> None:
        self._link = link
        self._sizes = sizes
        self._is_layerwise = is_layerwise
        self._board = ProgressBoard()
        self._running: dict[Direction, deque[tuple[int, float, float]]] = {
            direction: deque() for direction in Direction
        }

    def hello(self) -> WorkerHello:
        """What a worker says first, of a model with full attention."""
        sizes = self._sizes
        page_bytes = sizes.page_size * sizes.token_bytes
        return WorkerHello(
            worker_id=0,
            num_slots=sizes.host_bytes // page_bytes,
            page_bytes=page_bytes,
            bytes_per_token=(sizes.token_bytes,),
            layout_digest=1,
            rows=PageRows(
                kind="full_attention",
                reach=0,
                page_size=sizes.page_size,
                token_packing="rows",
                k_row_bytes=sizes.token_bytes // (2 * sizes.num_layers),
                v_row_bytes=sizes.token_bytes // (2 * sizes.num_layers),
                total_kv_heads=1,
                heads_per_group=1,
                layer_partition=sizes.num_layers,
            ),
            storage_address=None,
            board_path=self._board.path,
            board_token=self._board.token,
        )

    def before_forward(self, metadata: Any, launch: Launch) -> float:
        plan = metadata.plan
        if plan.failed_requests:
            raise RuntimeError(f"no copy fails here, but these did: {plan.failed_requests}")
        start_s = launch.free_s
        for op in plan.sync_loads:
            end_s = self._copy(Direction.LOAD, op, launch.free_s)
            if self._is_layerwise:  # the forward waits for the first layer, then for each in turn
                share = 1 - 1 / self._sizes.num_layers
                end_s -= share * self._link.copying_s(self._num_bytes(op))
            start_s = max(start_s, end_s)
        for op in plan.loads:
            self._copy(Direction.LOAD, op, launch.free_s)
        return start_s

    def after_forward(self, metadata: Any, launch: Launch, end_s: float) -> None:
        for op in metadata.plan.saves:
            self._copy(Direction.SAVE, op, end_s)

    def report(self, metadata: Any, launch: Launch) -> KVConnectorOutput | None:
        meta = ReportMetadata({0: self._board.read()}, metadata.plan.number)
        return KVConnectorOutput(kv_connector_worker_meta=meta)

    def advance(self, now_s: float) -> None:
        for direction, running in self._running.items():
            while running and running[0][1] <= now_s:
                op_id, _, busy_s = running.popleft()
                self._board.publish(direction, op_id, True, busy_s)

    def close(self) -> None:
        self._board.close()

    def _copy(self, direction: Direction, op: CopyOp, ready_s: float) -> float:
        num_bytes = self._num_bytes(op)
        end_s = self._link.copy(direction, num_bytes, ready_s)
        self._running[direction].append((op.op_id, end_s, self._link.copying_s(num_bytes)))
        return end_s

    def _num_bytes(self, op: CopyOp) -> int:
        sizes = self._sizes
        return len(op.copies) * min(sizes.page_size, sizes.block_size) * sizes.token_bytes


@dataclass(slots=True)
class _Job:
    """A copy of vLLM's OffloadingConnector that was started."""

    end_s: float
    request_id: str = ""
    """That waits for it; none waits for a store."""


@dataclass(slots=True)
class NativeWorker(NoConnector):
    """vLLM's OffloadingConnector: its loads start behind the forward of their step, its stores with
    the next one, or at once and waited for where their blocks are given to others."""

    link: HostLink
    sizes: CopySizes
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _later: list[tuple[int, int]] = field(default_factory=list)
    """Stores for the next batch: job, bytes."""

    def before_forward(self, metadata: Any, launch: Launch) -> float:
        urgent = metadata.jobs_to_flush or ()
        for number in urgent:
            job = metadata.store_jobs.pop(number, None)
            if job is not None:
                self._later.append((number, self._num_bytes(job.src_spec)))
        for number, num_bytes in self._later:
            end_s = self.link.copy(Direction.SAVE, num_bytes, launch.free_s)
            self._jobs[number] = _Job(end_s)
        self._later.clear()
        waited = (self._jobs[number].end_s for number in urgent if number in self._jobs)
        return max((launch.free_s, *waited))

    def after_forward(self, metadata: Any, launch: Launch, end_s: float) -> None:
        for number, job in metadata.load_jobs.items():
            num_bytes = self._num_bytes(job.dst_spec)
            loaded_s = self.link.copy(Direction.LOAD, num_bytes, end_s)
            self._jobs[number] = _Job(loaded_s, job.req_id)
        for number, job in metadata.store_jobs.items():
            self._later.append((number, self._num_bytes(job.src_spec)))

    def report(self, metadata: Any, launch: Launch) -> KVConnectorOutput | None:
        meta = OffloadingWorkerMetadata()
        ended = [number for number, job in self._jobs.items() if job.end_s <= launch.now_s]
        for number in ended:
            meta.mark_completed(number)
        loaded = {self._jobs.pop(number).request_id for number in ended} - {""}
        return KVConnectorOutput(
            finished_recving=loaded or None, kv_connector_worker_meta=meta if ended else None
        )

    def _num_bytes(self, spec: Any) -> int:
        return len(spec.block_ids) * self.sizes.block_size * self.sizes.token_bytes


@dataclass(slots=True)
class SimpleWorker(NoConnector):
    """vLLM's SimpleCPUOffloadConnector: its loads start at once, its stores behind the forward."""

    link: HostLink
    sizes: CopySizes
    _loads: deque[tuple[float, list[str]]] = field(default_factory=deque)
    """End, requests that wait."""
    _stores: deque[tuple[float, int]] = field(default_factory=deque)
    """End, number."""

    def before_forward(self, metadata: Any, launch: Launch) -> float:
        if not metadata.need_flush:
            return launch.free_s
        ends = [end_s for end_s, _ in (*self._loads, *self._stores)]
        return max((launch.free_s, *ends))

    def after_forward(self, metadata: Any, launch: Launch, end_s: float) -> None:
        if metadata.load_event >= 0:
            num_bytes = self._num_bytes(metadata.load_gpu_blocks)
            loaded_s = self.link.copy(Direction.LOAD, num_bytes, launch.now_s)
            waiting = metadata.load_event_to_reqs[metadata.load_event]
            self._loads.append((loaded_s, list(waiting)))
        if metadata.store_event >= 0:
            num_bytes = self._num_bytes(metadata.store_gpu_blocks)
            stored_s = self.link.copy(Direction.SAVE, num_bytes, end_s)
            self._stores.append((stored_s, metadata.store_event))

    def report(self, metadata: Any, launch: Launch) -> KVConnectorOutput | None:
        loaded: set[str] = set()
        stored: dict[int, int] = {}
        while self._loads and self._loads[0][0] <= launch.now_s:
            loaded.update(self._loads.popleft()[1])
        while self._stores and self._stores[0][0] <= launch.now_s:
            stored[self._stores.popleft()[1]] = 1
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )

    def _num_bytes(self, blocks: list[int]) -> int:
        return len(blocks) * self.sizes.block_size * self.sizes.token_bytes

"""Hooks of a worker process: allocates the host pool, runs plans, tells progress."""

import logging
import socket
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_world_group

from vllm_hicache.checked_calls import checked
from vllm_hicache.connectors import agreement, kv_pools, staging_room, vllm_view
from vllm_hicache.connectors.kv_placement import device_groups, layer_places
from vllm_hicache.connectors.layer_waits import LayerWaits, check_worker_pools
from vllm_hicache.connectors.messages import ReportMetadata, WorkerHello
from vllm_hicache.connectors.rank_checks import WorkerChecks
from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.host_memory import resolve_host_bytes, tightest_memory_limit
from vllm_hicache.host_pool import HostPool
from vllm_hicache.kernels.layer_spans import LayerSpans, span_memory
from vllm_hicache.kernels.reference import PageCopier
from vllm_hicache.plan import CopyOp, Direction, StepPlan
from vllm_hicache.pool_growth import PoolGrowth
from vllm_hicache.progress_board import ProgressBoard
from vllm_hicache.rank_consensus import check_plan
from vllm_hicache.storage_process_config import Section, StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess
from vllm_hicache.transfer import CopyEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_hicache.config import HiCacheConfig
    from vllm_hicache.connectors.kv_pools import WorkerPool
    from vllm_hicache.pools import ModelPools, Pool

logger = logging.getLogger(__name__)

SYNC_LOAD_TIMEOUT_S = 30.0
"""A synchronous load is chosen for milliseconds of copying; after this long something is broken
and the forward must not read the blocks."""
SMALL_OBJECT_BYTES = 512 << 10
"""Below this, each object's fixed cost (a request, a file) shows in the throughput of storage."""
CLOSE_TIMEOUT_S = 2.0
START_STORAGE_S = 5.0
"""Longest time for a storage process to look at its configuration, besides connecting."""
SLEEP_DRAIN_S = 30.0
"""Copies that vLLM let start before it sleeps end in milliseconds."""


def agreed_slots(agreed: "tuple[int, int, list[WorkerPool]]") -> int:
    """Host slots, the same on all workers."""
    return agreed[0]


def agreed_layout(agreed: "tuple[int, int, list[WorkerPool]]") -> int:
    """Digest of the page layout, the same on all workers."""
    return agreed[1]


def _shown(pool: "Pool") -> str:
    """Its name, and what the names of its stored objects end in."""
    return f"{pool.name} _P{pool.digest}" if pool.digest else pool.name


class WorkerSide:
    """One worker's hands. Decides nothing: it runs numbered plans and reports counters."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: "HiCacheConfig"
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self.worker_id: int = vllm_config.parallel_config.rank
        self._pools: ModelPools
        self.pools: list[WorkerPool] = []
        """What this worker has of each kind of KV."""
        self.hello: WorkerHello | None = None
        self.engine: CopyEngine | None = None
        self.pool: HostPool | None = None
        self.layers: LayerWaits | None = None
        """With ``load_mode: layerwise``."""
        self._growth: PoolGrowth | None = None
        self._board: ProgressBoard | None = None
        self._storage: StorageProcess | None = None
        self._plan: StepPlan | None = None
        self._last_plan = 0
        self._pending_saves: tuple[CopyOp, ...] = ()
        self._submitted = dict.fromkeys(Direction, 0)
        self._failed_sync_blocks: set[int] = set()
        self._failed_loads: set[int] = set()
        self._is_asleep = False
        self._checks = WorkerChecks.create(config, self)

    # Start ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Agree with all workers on the number of host slots, then allocate and start storage.

        Returns when the first host slots are ready; the others follow in the background.
        """
        buffer = vllm_view.kv_buffer(kv_caches, self._kv_cache_config)
        num_slots, digest, pools = self._agree(buffer)
        self.pools = pools
        groups = [
            device_groups(worker_pool, kv_caches, self._kv_cache_config, self._pools.groups)
            for worker_pool in pools
        ]
        copiers = [
            PageCopier(buffer, placed, worker_pool.layout)
            for placed, worker_pool in zip(groups, pools, strict=True)
        ]
        self._board = ProgressBoard()
        if self._checks is not None:
            self._checks.start(self._board)
        is_layerwise = self._config.load_mode == "layerwise"
        copier = staging_room.allocate(
            copiers,
            self._vllm_config.cache_config,
            more_bytes=span_memory(pools[0].layout) if is_layerwise else 0,
        )
        self.pool, self._growth = self._start_pool(num_slots, buffer.device, self._board)
        self.engine = CopyEngine(copier, self.pool, publish=self._publish, device=buffer.device)
        if is_layerwise:
            self.layers = LayerWaits(
                self.engine,
                LayerSpans(buffer, groups[0][0], pools[0].layout),
                self.pool.tensors[0],
                layer_places(pools[0]),
                worker_id=self.worker_id,
            )
        self.hello = WorkerHello(
            worker_id=self.worker_id,
            num_slots=num_slots,
            page_bytes=sum(worker_pool.layout.page_bytes for worker_pool in pools),
            bytes_per_token=kv_pools.bytes_per_token(pools, self._pools),
            layout_digest=digest,
            rows=kv_pools.page_rows(pools, self._pools),
            storage_address=self._start_storage(pools, num_slots),
            board_path=self._board.path,
            board_token=self._board.token,
            num_ready_slots=self._growth.num_ready,
        )
        self._growth.go_on()

    def _start_pool(
        self, num_slots: int, device: torch.device, board: ProgressBoard
    ) -> tuple[HostPool, PoolGrowth]:
        """The pool with its first slots ready."""
        name = f"HiCache worker {self.worker_id}"
        pool = HostPool(
            num_slots,
            [worker_pool.layout.slot_stride for worker_pool in self.pools],
            name=f"hicache-{self.worker_id}",
            device=device,
        )
        growth = PoolGrowth(pool, board.publish_slots, name=name)
        growth.begin()
        logger.info(
            "%s: %d host slots of %d tokens (%s), %.2f GiB%s, %d ready in %.1f s",
            name,
            num_slots,
            self._pools.page_size,
            ", ".join(_shown(worker_pool.pool) for worker_pool in self.pools),
            pool.num_bytes / 2**30,
            " pinned" if pool.is_pinned else "",
            growth.num_ready,
            growth.seconds,
        )
        return pool, growth

    @checked(stream="start", in_step=True, result=(agreed_slots, agreed_layout))
    def _agree(self, buffer: torch.Tensor) -> "tuple[int, int, list[WorkerPool]]":
        parallel = self._vllm_config.parallel_config
        replica = parallel.data_parallel_index
        stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
        group = get_world_group().cpu_group if parallel.world_size > 1 else None
        try:
            self._pools = kv_pools.model_pools(
                self._vllm_config, self._kv_cache_config, self._config
            )
            pools = kv_pools.worker_pools(
                self._vllm_config,
                self._kv_cache_config,
                self._config,
                self._pools,
                kv_pools.Place(stage, get_tensor_model_parallel_rank()),
            )
            if self._config.load_mode == "layerwise":
                check_worker_pools(self._vllm_config, pools)
            self._check_objects(pools)
            num_slots = self._affordable_slots(pools, buffer.numel())
            rows = kv_pools.page_rows(pools, self._pools)
            digest = agreement.layout_digest(self._pools, rows)
        except ConfigError:
            # The others must hear of it, or they would wait for this worker.
            agreement.gather_facts(agreement.WorkerFacts.refused(replica, self.worker_id), group)
            raise
        page_bytes = sum(worker_pool.layout.page_bytes for worker_pool in pools)
        facts = agreement.WorkerFacts(replica, self.worker_id, num_slots, digest, page_bytes)
        everyone = agreement.gather_facts(facts, group)
        return agreement.agree_on_slots(everyone, parallel.world_size), digest, pools

    def _affordable_slots(self, pools: "list[WorkerPool]", device_pool_bytes: int) -> int:
        limit = tightest_memory_limit()
        parallel = self._vllm_config.parallel_config
        num_bytes = resolve_host_bytes(
            self._config.host_memory,
            device_pool_bytes=device_pool_bytes,
            workers_on_host=vllm_view.workers_on_host(parallel, self._config.host_memory),
            available=limit.available_bytes,
            limited_by=limit.source,
        )
        slot_bytes = sum(worker_pool.layout.slot_stride for worker_pool in pools)
        num_slots = num_bytes // slot_bytes
        if num_slots < 1:
            raise ConfigError(
                f"host_memory gives {num_bytes} bytes per worker, less than one page of "
                f"{slot_bytes} bytes; raise host_memory or lower page_size"
            )
        return num_slots

    def _check_objects(self, pools: "list[WorkerPool]") -> None:
        """Refuse stored objects so small that operations, not bytes, would set the speed."""
        if self._config.storage is None:
            return
        shards = [shard for worker_pool in pools for shard in worker_pool.layout.shards]
        smallest = min(shard.length for shard in shards)
        advice = (
            "raise page_size, storage_layer_partition or storage_head_partition "
            f"(page of {self._pools.page_size} tokens, {len(shards)} objects per worker)"
        )
        if smallest < self._config.min_object_bytes:
            raise ConfigError(
                f"a stored object would have {smallest} bytes, allowed are "
                f"{self._config.min_object_bytes} (min_object_bytes) and more; {advice}"
            )
        if smallest < SMALL_OBJECT_BYTES and self.worker_id == 0:
            logger.warning("HiCache: stored objects have %d bytes only; %s", smallest, advice)

    def _start_storage(self, pools: "list[WorkerPool]", num_slots: int) -> str | None:
        storage = self._config.initial_storage
        if storage is None or self.pool is None:
            return None
        parallel = self._vllm_config.parallel_config
        host = _own_address(parallel.master_addr) if parallel.nnodes > 1 else ""
        self._storage = StorageProcess(
            StorageProcessConfig(
                worker_id=self.worker_id,
                num_slots=num_slots,
                sections=tuple(
                    Section(
                        base=base,
                        slot_stride=worker_pool.layout.slot_stride,
                        shards=worker_pool.layout.shards,
                        own_shards=worker_pool.layout.own_shards,
                        bit=worker_pool.pool.bit,
                        may_be_zero=worker_pool.pool.may_be_zero,
                    )
                    for worker_pool, base in zip(pools, self.pool.bases, strict=True)
                ),
                all_parts=self._pools.all_parts,
                storage=storage,
            ),
            self.pool.fd,
            host=host,
        )
        address = self._storage.start()
        refusal = self._storage.refusal(storage.connect_timeout_s + START_STORAGE_S)
        if refusal:
            raise ConfigError(refusal)
        return address

    # Steps ---------------------------------------------------------------------------------------

    @check_plan
    def bind(self, plan: StepPlan) -> None:
        """Take this step's plan. Loads start here, behind everything enqueued before this step."""
        self.finish_step()  # of a step whose wait_for_save never came
        if plan.number <= self._last_plan:
            logger.warning("HiCache plan %d was executed before; ignored", plan.number)
            return
        if self._last_plan and plan.number != self._last_plan + 1:
            raise InvariantBroken(
                f"worker {self.worker_id}: plan {plan.number} came after plan {self._last_plan}"
            )
        self._last_plan, self._plan = plan.number, plan
        if self._checks is not None:
            self._checks.begin_step(plan.number)
        self._pending_saves = plan.saves
        for op in (*plan.sync_loads, *plan.loads):
            self._submit(Direction.LOAD, op)
        if self.layers is not None:
            self.layers.start()

    def start_load(self) -> None:
        """Called before the forward where a request of this step has a synchronous load."""
        if self._plan is None or self.engine is None or self.layers is not None:
            return
        for op in self._plan.sync_loads:
            if not self.engine.make_current_stream_wait(op.op_id, SYNC_LOAD_TIMEOUT_S):
                # The forward goes without it: it counts as failed, whenever it ends.
                self._failed_loads.add(op.op_id)
                self._failed_sync_blocks.update(int(block) for block in op.copies[:, 2])
                logger.error("HiCache: load %d did not start in time", op.op_id)
            elif op.op_id in self._failed_loads:
                self._failed_sync_blocks.update(int(block) for block in op.copies[:, 2])

    def finish_step(self) -> None:
        """Called after all forwards of the step: saves start behind them."""
        if self.layers is not None:
            self.layers.end()
        self._flush_saves()

    def _flush_saves(self) -> None:
        saves, self._pending_saves = self._pending_saves, ()
        for op in saves:
            self._submit(Direction.SAVE, op)

    # Which copies this worker starts. Saves of a step may be started at the beginning of the next.
    @checked(stream="start {direction}", key="op.op_id", arguments="op.all_copies")
    def _submit(self, direction: Direction, op: CopyOp) -> None:
        if self.engine is None or self._is_asleep:
            raise InvariantBroken("a plan came while no KV caches are registered")
        self._submitted[direction] = op.op_id
        if direction is Direction.LOAD and self.layers is not None:
            self.layers.add(op)
        else:
            self.engine.submit(direction, op.op_id, op.all_copies, self.engine.fence())

    @checked(in_step=True, result=True)
    def take_failed_requests(self) -> set[str]:
        """Requests that this step's plan says to report as failed; once."""
        plan, self._plan = self._plan, None
        return set(plan.failed_requests) if plan is not None else set()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that a synchronous load of this step did not fill."""
        failed, self._failed_sync_blocks = self._failed_sync_blocks, set()
        return failed

    def report(self) -> ReportMetadata | None:
        """Counters since the start, with every step: what was said before costs nothing again."""
        if self._board is None:
            return None
        progress = {self.worker_id: self._board.read()}
        if self._checks is None:
            return ReportMetadata(progress, self._last_plan)
        events = {self.worker_id: self._checks.end_step()}
        return ReportMetadata(progress, self._last_plan, events)

    # A copy that fails on one worker only is no divergence: the join makes it fail on all.
    @checked(stream="finish {direction}", key="op_id", shown="is_ok")
    def _publish(self, direction: Direction, op_id: int, is_ok: bool, seconds: float) -> None:
        """On the copy thread of the direction."""
        if direction is Direction.LOAD:
            if not is_ok:
                self._failed_loads.add(op_id)
            is_ok = op_id not in self._failed_loads
        if self._board is not None:
            self._board.publish(direction, op_id, is_ok, seconds)

    # Sleep ---------------------------------------------------------------------------------------

    def unregister_kv_caches(self) -> None:
        """Before the KV cache is unmapped: every copy has ended when this returns."""
        if self.engine is None or self._is_asleep:
            return
        self._flush_saves()
        for direction, op_id in self._submitted.items():
            if not self.engine.wait(direction, op_id, SLEEP_DRAIN_S):
                raise InvariantBroken(
                    f"worker {self.worker_id}: {direction} {op_id} still runs after "
                    f"{SLEEP_DRAIN_S} s; its memory cannot be unmapped"
                )
        self._is_asleep = True

    def restore_kv_caches(self) -> None:
        """The KV cache is mapped again, at the addresses it had."""
        self._is_asleep = False

    # End -----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish running copies, let the storage process go; it persists what it was given."""
        if self._growth is not None:
            self._growth.stop()
        is_quiet = self.engine.close(CLOSE_TIMEOUT_S) if self.engine is not None else True
        if self._growth is not None:
            is_quiet = self._growth.join(CLOSE_TIMEOUT_S) and is_quiet
        self.engine = self._growth = None
        if self._checks is not None:
            self._checks.close()
        if self._storage is not None:
            self._storage.stop(0)
            self._storage = None
        if self.pool is not None and is_quiet:
            self.pool.close()
            self.pool = None


def _own_address(peer: str) -> str:
    """This host's address on the way to ``peer``."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])

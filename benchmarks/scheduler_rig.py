"""vLLM's real scheduler with HiCacheConnector and workers that copy nothing, for timing hooks.

The scheduler, its requests, its block pool and every message are vLLM's own. The workers' part
is played here: they answer every copy at once, on real progress boards. The storage processes
are real, with pages of 4 KiB.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_hicache.checked_calls import watch
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.messages import PageRows, ReportMetadata, WorkerHello
from vllm_hicache.connectors.worker_side import WorkerSide
from vllm_hicache.host_pool import HostPool
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.plan import CopyOp, Direction, StepPlan
from vllm_hicache.progress_board import ProgressBoard
from vllm_hicache.rank_events import EventRecorder, pack_batch
from vllm_hicache.storage_process_config import Section, StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess

ROOT = Path(__file__).resolve().parent.parent
PAGE_BYTES = 4096
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "request_finished_all_groups",
    "has_pending_push_work",
)


@dataclass(frozen=True, slots=True)
class RigOptions:
    """Sizes of one rig."""

    folder: Path
    """For the model's files and the stored pages; the caller removes it."""
    max_tokens: int
    """Longest request: prompt and output."""
    num_requests: int
    num_tokens: int
    """Of all requests together; the device holds them all."""
    block_size: int
    page_size: int
    batched_tokens: int
    num_workers: int
    has_storage: bool
    rank_consensus: str = "off"


class HookClock:
    """Seconds in each hook since the last ``take``, and how many of them a core worked on it."""

    def __init__(self, connector: Any) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_s = 0.0
        self.plan: StepPlan | None = None
        for name in HOOKS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> tuple[dict[str, float], float]:
        """(seconds by hook, seconds of this thread's CPU in all of them)."""
        taken = dict(self._seconds), self._cpu_s
        self._seconds, self._cpu_s = defaultdict(float), 0.0
        return taken

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        clock, cpu_clock = time.perf_counter, time.thread_time

        def timed(*arguments: Any) -> Any:
            cpu_started, started = cpu_clock(), clock()
            result = hook(*arguments)
            self._seconds[name] += clock() - started
            self._cpu_s += cpu_clock() - cpu_started
            if name == "build_connector_meta":
                self.plan = result.plan
            return result

        return timed


class SilentSide:
    """What a worker's checker records of a step, without the copies."""

    def __init__(self) -> None:
        self.recorder = EventRecorder()
        watch(self, self.recorder)

    @wraps(WorkerSide.bind)
    def bind(self, plan: StepPlan) -> None:
        self._plan = plan
        for op in (*plan.sync_loads, *plan.loads):
            self._submit(Direction.LOAD, op)

    @wraps(WorkerSide._submit)
    def _submit(self, direction: Direction, op: CopyOp) -> None: ...

    @wraps(WorkerSide._publish)
    def _publish(self, direction: Direction, op_id: int, is_ok: bool, seconds: float) -> None: ...

    @wraps(WorkerSide.take_failed_requests)
    def take_failed_requests(self) -> set[str]:
        return set(self._plan.failed_requests)

    def execute(self, plan: StepPlan) -> bytes:
        self.bind(plan)
        for op in plan.saves:
            self._submit(Direction.SAVE, op)
            self._publish(Direction.SAVE, op.op_id, True, 0.0)
        for op in (*plan.sync_loads, *plan.loads):
            self._publish(Direction.LOAD, op.op_id, True, 0.0)
        self.take_failed_requests()
        return pack_batch(self.recorder.take_batch())


class SilentWorkers:
    """All workers of the engine: they report every copy as done and touch no memory."""

    def __init__(self, options: RigOptions, config: HiCacheConfig) -> None:
        self._boards = [ProgressBoard() for _ in range(options.num_workers)]
        self._pools: list[HostPool] = []
        self._processes: list[StorageProcess] = []
        is_checked = options.rank_consensus != "off"
        self._sides = [SilentSide() for _ in range(options.num_workers)] if is_checked else []
        num_slots = 2 * options.num_tokens // options.page_size + 64
        addresses = [
            self._start_storage(rank, num_slots, config) if config.storage else None
            for rank in range(options.num_workers)
        ]
        self.hellos = [
            WorkerHello(
                worker_id=rank,
                num_slots=num_slots,
                page_bytes=PAGE_BYTES,
                bytes_per_token=(PAGE_BYTES // options.page_size,),
                layout_digest=1,
                rows=PageRows(
                    kind="full_attention",
                    reach=0,
                    page_size=options.page_size,
                    token_packing="rows",
                    k_row_bytes=8,
                    v_row_bytes=8,
                    total_kv_heads=options.num_workers,
                    heads_per_group=1,
                    layer_partition=1,
                ),
                storage_address=addresses[rank],
                board_path=board.path,
                board_token=board.token,
            )
            for rank, board in enumerate(self._boards)
        ]

    def _start_storage(self, rank: int, num_slots: int, config: HiCacheConfig) -> str:
        pool = HostPool(num_slots, [PAGE_BYTES])
        shards = (Shard(LayerSpan(0, 1), rank, 0, PAGE_BYTES),)
        process = StorageProcess(
            StorageProcessConfig(
                worker_id=rank,
                num_slots=num_slots,
                sections=(Section(0, PAGE_BYTES, shards, shards),),
                storage=config.storage,
            ),
            pool.fd,
        )
        self._pools.append(pool)
        self._processes.append(process)
        return process.start()

    def execute(self, plan: StepPlan) -> ReportMetadata:
        """Finish every copy of the plan on every worker, and report as they do."""
        for board in self._boards:
            for op in plan.saves:
                board.publish(Direction.SAVE, op.op_id, True, 1e-4)
            for op in (*plan.sync_loads, *plan.loads):
                board.publish(Direction.LOAD, op.op_id, True, 1e-4)
        progress = {rank: board.read() for rank, board in enumerate(self._boards)}
        if not self._sides:
            return ReportMetadata(progress, plan.number)
        events = {rank: side.execute(plan) for rank, side in enumerate(self._sides)}
        return ReportMetadata(progress, plan.number, events)

    def close(self) -> None:
        for process in self._processes:
            process.stop()
        for pool in self._pools:
            pool.close()
        for board in self._boards:
            board.close()


class SchedulerRig:
    """A scheduler that can be stepped without an engine. Use as a context manager."""

    def __init__(self, options: RigOptions) -> None:
        self._options = options
        config = _vllm_config(options)
        num_blocks = options.num_tokens // options.block_size + 4 * options.num_requests + 64
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=options.block_size,
            num_kv_heads=1,
            head_size=64,
            dtype=config.model_config.dtype,
        )
        cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)],
        )
        self.scheduler = Scheduler(
            config,
            cache_config,
            StructuredOutputManager(config),
            options.block_size,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hash_name: str = config.cache_config.prefix_caching_hash_algo
        self._hash_blocks = get_request_block_hasher(options.block_size, hash_fn)
        self.hashing_s = 0.0
        """Time that vLLM's block hashing of the last new request took."""
        self.workers = SilentWorkers(
            options, HiCacheConfig.parse(config.kv_transfer_config.kv_connector_extra_config)
        )
        connector = self.scheduler.connector
        hellos = {(0, hello.worker_id): hello for hello in self.workers.hellos}
        connector.set_xfer_handshake_metadata_pp_aware(hellos)
        self.clock = HookClock(connector)

    def __enter__(self) -> "SchedulerRig":
        return self

    def __exit__(self, *error: object) -> None:
        self.scheduler.shutdown()
        self.workers.close()

    def new_request(self, name: str, prompt: list[int], num_output: int) -> Request:
        """A request as the engine makes it, its blocks hashed by vLLM; not yet added."""

        def timed_hasher(request: Request) -> list[Any]:
            started = time.perf_counter()
            hashes = self._hash_blocks(request)
            if not request.block_hashes:
                self.hashing_s = time.perf_counter() - started
            return hashes

        parameters = SamplingParams(max_tokens=num_output, ignore_eos=True)
        return Request(name, prompt, parameters, None, block_hasher=timed_hasher)

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> "Step":
        """One whole step: schedule, the workers' answers, update."""
        self.clock.take()
        started = time.perf_counter()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter()
        plan = self.clock.plan
        if plan is None:
            raise SystemExit("the scheduler did not build a plan")
        answer = self._model_output(output, self.workers.execute(plan))
        ran = time.perf_counter()
        self.scheduler.update_from_output(output, answer)
        ended = time.perf_counter()
        hooks, cpu_s = self.clock.take()
        return Step(
            num_pages=sum(_num_pages(op.copies, self._options) for op in plan.saves),
            num_running=len(output.num_scheduled_tokens),
            num_tokens=output.total_num_scheduled_tokens,
            hooks=hooks,
            hooks_cpu_s=cpu_s,
            scheduler_s=ended - ran + scheduled - started,
        )

    def _model_output(self, output: SchedulerOutput, report: ReportMetadata) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in ids
        ]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did and cost."""

    num_pages: int
    """Pages whose save this step planned."""
    num_running: int
    num_tokens: int
    hooks: dict[str, float]
    """Seconds by hook."""
    hooks_cpu_s: float
    """CPU time of the scheduler's thread in all hooks: without waits for a core or the GIL."""
    scheduler_s: float
    """vLLM's scheduling and update, hooks included."""

    @property
    def hooks_s(self) -> float:
        return sum(self.hooks.values())


def _num_pages(copies: Sequence[Sequence[int]], options: RigOptions) -> int:
    granule = min(options.page_size, options.block_size)
    return len(copies) * granule // options.page_size


def _vllm_config(options: RigOptions) -> VllmConfig:
    heads = str(options.num_workers)
    model = options.folder / "model"
    sizes = ("--num-layers", "1", "--hidden-size", "64", "--intermediate-size", "64")
    shape = ("--num-heads", heads, "--num-kv-heads", heads, "--head-size", "64")
    script = str(ROOT / "examples" / "tiny_model.py")
    command = [sys.executable, script, str(model), *sizes, *shape]
    subprocess.run([*command, "--max-positions", str(options.max_tokens)], check=True)
    extra: dict[str, object] = {
        "page_size": options.page_size,
        "rank_consensus": options.rank_consensus,
    }
    if options.has_storage:
        extra["storage"] = f"file://{options.folder / 'pages'}"
        extra["min_object_bytes"] = 1
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=options.max_tokens,
        max_num_seqs=options.num_requests,
        max_num_batched_tokens=options.batched_tokens,
        block_size=options.block_size,
        enable_prefix_caching=True,
        async_scheduling=False,
        tensor_parallel_size=options.num_workers,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    ).create_engine_config()

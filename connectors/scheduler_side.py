"""Hooks of the scheduler process: vLLM's requests and steps -> planner, outcomes -> vLLM."""

import logging
import time
from collections import deque
from secrets import token_hex
from typing import TYPE_CHECKING

from vllm_hicache.activity import ActivityLine
from vllm_hicache.connectors import kv_pools, vllm_view
from vllm_hicache.connectors.device_blocks import PoolReferences, drain_before_reset
from vllm_hicache.connectors.events import PageEvents
from vllm_hicache.connectors.messages import PlanMetadata, ReportMetadata, WorkerHello, first_slots
from vllm_hicache.connectors.page_sizes import pages_per_decode_save
from vllm_hicache.connectors.rank_checks import SchedulerChecks
from vllm_hicache.connectors.request_hints import HintReader
from vllm_hicache.connectors.request_tables import RequestTables
from vllm_hicache.connectors.request_view import RequestTokens
from vllm_hicache.connectors.stats import HiCacheStats
from vllm_hicache.control_server import ControlServer
from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.fetch import FetchPolicy
from vllm_hicache.keys import Namespace
from vllm_hicache.metrics import Metrics
from vllm_hicache.namespace_records import encode_record
from vllm_hicache.near_miss_notice import NearMissNotice
from vllm_hicache.persists import PERSIST_TIMEOUT_FACTOR
from vllm_hicache.planner import Planner
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.progress_board import WorkerBoards
from vllm_hicache.request_state import RequestState
from vllm_hicache.series import HOST, STORAGE
from vllm_hicache.settled import NOTHING_SETTLED, Settled
from vllm_hicache.storage_channel import StorageChannels
from vllm_hicache.storage_link import StorageLink
from vllm_hicache.storage_messages import Describe, Drain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_hicache.config import HiCacheConfig

logger = logging.getLogger(__name__)

RESET_DRAIN_S = 0.1
"""A reset waits this long for copies that hold device blocks."""
SHUTDOWN_COPY_S = 1.0
START_STORAGE_S = 5.0
"""Longest time for a storage process to come up, besides connecting to its service."""
POLL_S = 0.0005
AHEAD_STEPS = 4
"""Steps whose device blocks are saved ahead of their reuse. A copy that was planned in one step is
done one or two later; less would lose pages under load, more saves what may be used again."""
MAX_AHEAD_SHARE = 0.25
"""The same as a part of all device blocks, for small ones."""


class SchedulerSide:
    """One engine's brain inside vLLM. All hooks run on the scheduler's thread."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: "HiCacheConfig"
    ) -> None:
        pools = kv_pools.model_pools(vllm_config, kv_cache_config, config)
        self._vllm_config = vllm_config
        self._config = config
        self._pools = pools
        self._page_size = pools.page_size
        self._pages_per_decode_save = pages_per_decode_save(pools)
        self._block_size = pools.unit
        self._tables = RequestTables(pools.groups)
        self._world_size: int = vllm_config.parallel_config.world_size
        self._shares_device_pages = bool(vllm_config.cache_config.enable_prefix_caching)
        # Tokens that drafts or asynchronous scheduling count before they are certain.
        self._counts_ahead = vllm_config.speculative_config is not None
        self._blocks = PoolReferences()
        self._requests: dict[str, RequestState] = {}
        self._boards = WorkerBoards()
        self._channels: StorageChannels | None = None
        self._planner: Planner | None = None
        self._notice: NearMissNotice | None = None
        self._control: ControlServer | None = None
        self._checks: SchedulerChecks | None = None
        self._num_storage_changes = 0
        self._loaded: list[str] = []
        self._steps: deque[tuple[int, float, int]] = deque()
        self._last_output = 0.0
        self._storage_tokens: dict[str, tuple[int, int]] = {}
        self.metrics = Metrics()
        self._hints = HintReader(self.metrics)
        self._activity = ActivityLine(
            self.metrics, interval_s=config.log_interval_s, clock=time.monotonic
        )
        self._events = self._page_events(vllm_config, config)
        self._identity = vllm_view.weights_identity(vllm_config, config)
        self._epoch = "" if self._identity else token_hex(8)
        logger.info("HiCache configuration: %s", config.describe())
        if config.initial_storage is not None and self._identity is None:
            logger.warning(
                "HiCache: the weights cannot be identified, so stored pages are not found again "
                "after a restart; set weights_id to say what they are"
            )

    def _page_events(self, vllm_config: "VllmConfig", config: "HiCacheConfig") -> PageEvents | None:
        if not vllm_view.publishes_events(vllm_config, config, self._pools):
            return None
        return PageEvents(block_size=self._block_size, page_size=self._page_size)

    @property
    def planner(self) -> Planner:
        if self._planner is None:
            raise InvariantBroken("vLLM called a scheduler hook before the workers said hello")
        return self._planner

    # Start ---------------------------------------------------------------------------------------

    def bind_manager(self, manager: "KVCacheManager") -> None:
        self._tables.manager = manager
        self._blocks.pool = manager.block_pool
        drain_before_reset(manager, self._drain_copies)

    def greet(self, hellos: list[WorkerHello]) -> None:
        """All workers have registered their caches: open boards and channels, start planning."""
        hellos = sorted(hellos, key=lambda hello: hello.worker_id)
        if [hello.worker_id for hello in hellos] != list(range(self._world_size)):
            raise ConfigError(
                f"expected {self._world_size} workers, heard of "
                f"{[hello.worker_id for hello in hellos]}"
            )
        for hello in hellos:
            self._boards.open(hello.worker_id, hello.board_path, hello.board_token)
        self._rows = hellos[0].rows
        link = self._open_storage(hellos)
        self._planner = Planner(
            self._planner_options(hellos),
            self._blocks,
            self.metrics,
            link=link,
            namespace=self._namespace().digest,
            on_evict=self._evicted,
            queue=self._blocks,
        )
        parallel = self._vllm_config.parallel_config
        self._checks = SchedulerChecks.create(
            self._config, parallel, self._boards.readers, self._planner, self.metrics
        )
        state = "off" if link is None else self._await_storage(link)
        self._control = ControlServer.create(
            self._config,
            parallel.data_parallel_index,
            [hello.storage_address for hello in hellos if hello.storage_address],
        )
        logger.info(
            "HiCache: %d worker(s), %d host slots of %d tokens each, storage %s, namespace %s",
            self._world_size,
            hellos[0].num_slots,
            self._page_size,
            state,
            self._planner.namespace,
        )
        if link is not None:
            described = vllm_view.describe_objects(self._vllm_config, self._rows)
            logger.info("HiCache storage: %s", described)

    def _await_storage(self, link: StorageLink) -> str:
        """Give storage processes a moment, so that the first request after a start can hit. An
        engine starts without them: what is away at start joins when it comes up."""
        storage = self._config.storage
        deadline = time.monotonic() + START_STORAGE_S
        if storage is not None:
            deadline += storage.connect_timeout_s
        while not link.is_reached and time.monotonic() < deadline:
            self._settle_storage()
            time.sleep(POLL_S * 10)
        if not link.is_reached:
            logger.warning("HiCache: storage does not answer; starting without it")
            return "away"
        return "on" if link.is_up else "detached"

    def _open_storage(self, hellos: list[WorkerHello]) -> StorageLink | None:
        addresses = [hello.storage_address for hello in hellos if hello.storage_address]
        if not addresses:
            return None
        if len(addresses) != self._world_size:
            raise ConfigError("storage is configured on some workers only")
        self._channels = StorageChannels(addresses)
        # An epoch's pages are nobody else's: its namespace gets no record and no comparison.
        if self._epoch:
            return StorageLink(self._channels, self._world_size)
        record = encode_record(self._namespace())
        self._notice = NearMissNotice(record, self.metrics)
        return StorageLink(self._channels, self._world_size, Describe(record))

    def _planner_options(self, hellos: list[WorkerHello]) -> PlannerOptions:
        config = self._config
        storage = config.initial_storage
        operation_s = storage.operation_timeout_s if storage is not None else 0.0
        return PlannerOptions(
            page_size=self._page_size,
            block_size=self._block_size,
            num_host_slots=hellos[0].num_slots,
            num_ready_slots=first_slots(hellos),
            page_bytes=tuple(hello.page_bytes for hello in hellos),
            bytes_per_token=tuple(
                sum(sizes) for sizes in zip(*(h.bytes_per_token for h in hellos), strict=True)
            ),
            eviction=config.eviction,
            fetch=FetchPolicy(
                kind=config.prefetch_policy,
                base_s=config.prefetch_timeout_base_s,
                per_1k_tokens_s=config.prefetch_timeout_per_1k_tokens_s,
                min_tokens=config.prefetch_min_tokens,
                exists_timeout_s=storage.exists_timeout_s if storage is not None else 0.0,
                read_timeout_s=operation_s,
                max_share=config.prefetch_max_percent / 100,
                max_tenant_share=config.prefetch_tenant_max_percent / 100,
                retry_s=config.prefetch_retry_s,
                max_retries=config.prefetch_max_retries,
            ),
            persist_timeout_s=operation_s * PERSIST_TIMEOUT_FACTOR,
            sync_load_max_s=vllm_view.sync_load_max_s(self._vllm_config, config),
            defer_max_blocks=config.defer_max_blocks,
            shares_device_pages=self._shares_device_pages,
            write_policy=config.write_policy,
            min_uses=config.save_after_uses,
            num_ahead_blocks=self._num_ahead_blocks(),
            admission=config.admission,
            max_pinned_share=config.pin_max_percent / 100,
            skip_slow_loads=config.skip_slow_loads,
            loads_by_layer=config.load_mode == "layerwise",
            pools=self._pools.pools,
            groups=self._pools.groups,
            num_unsure_tokens=self._pools.num_unsure_tokens,
            draft_miss=config.draft_miss,
        )

    def _num_ahead_blocks(self) -> int:
        """Free blocks that `write_back` keeps saved: what the next steps can take."""
        num_tokens = AHEAD_STEPS * self._vllm_config.scheduler_config.max_num_batched_tokens
        pool = self._blocks.num_blocks
        return min(-(-num_tokens // self._block_size), int(pool * MAX_AHEAD_SHARE))

    def _namespace(self) -> Namespace:
        return vllm_view.build_namespace(
            self._vllm_config, self._rows, self._identity or "", self._epoch
        )

    # A request's life ----------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        make_note = self._events.blocks_of_page if self._events is not None else None
        tokens = RequestTokens(request, self._page_size, make_note)
        skips = bool(request.skip_reading_prefix_cache)
        hints = self._hints.read(request.kv_transfer_params)
        state = RequestState(
            tokens,
            may_load=hints.load and not skips,
            why_not="skip_reading" if skips else "not_wanted",
            may_save=hints.store,
            priority=hints.priority,
            pin_s=hints.pin_s,
            tenant=request.cache_salt or "",
        )
        self._requests[request.request_id] = state
        self.settle_slots()
        self._settle_storage()
        self.planner.add_request(state, time.monotonic())

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        self._settle_storage()
        answer = self.planner.match(state, num_computed_tokens, time.monotonic())
        return answer.num_tokens, answer.is_async

    def update_state_after_alloc(
        self,
        request: "Request",
        tables: tuple[list[int], ...],
        num_external_tokens: int,
    ) -> None:
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if num_external_tokens == 0:
            self.planner.admit(state)
            return
        now = time.monotonic()
        load = self.planner.begin_load(state, num_external_tokens, tables[0], now, tables[1:])
        self._storage_tokens[request.request_id] = (load.num_tokens, load.num_storage_tokens)

    def hit_sources(self, request_id: str, num_external_tokens: int) -> tuple[int, int]:
        """(host, storage) tokens of the load that was just planned."""
        num_tokens, num_storage = self._storage_tokens.pop(request_id, (0, 0))
        num_storage = min(num_storage, num_external_tokens) if num_tokens else 0
        return num_external_tokens - num_storage, num_storage

    def request_finished(self, request: "Request", tables: tuple[list[int], ...]) -> None:
        """Save what the last step computed. Never asks vLLM to keep the blocks: we hold them."""
        state = self._requests.pop(request.request_id, None)
        self._storage_tokens.pop(request.request_id, None)
        if state is None:
            return
        if state.load is None and any(tables):
            state.block_ids, *others = self._tables.at_end(tables)
            state.other_tables = tuple(others)
            certain = min(request.num_computed_tokens, request.num_tokens - 1)
            self.planner.collect_saves(state, certain, time.monotonic())
        self.planner.finish(state, time.monotonic())

    # Steps ---------------------------------------------------------------------------------------

    def build_connector_meta(self, output: "SchedulerOutput") -> PlanMetadata:
        planner, now = self.planner, time.monotonic()
        self._settle_storage()
        for request_id in output.preempted_req_ids or ():
            state = self._requests.get(request_id)
            if state is not None:
                planner.preempt(state)
        num_taken = self._tables.follow(output, self._requests)
        if planner.write_back is not None:
            planner.write_back.count_taken(num_taken)
        self._collect_saves(output, now)
        scheduled = output.total_num_scheduled_tokens
        plan = planner.plan_step(is_busy=scheduled > 0, now=now)
        if self._checks is not None:
            self._checks.sent(plan)
        is_late = plan.sync_loads and planner.options.loads_by_layer  # its layers wait for loads
        self._steps.append((plan.number, now, 0 if is_late else scheduled))
        self._activity.poll()
        return PlanMetadata(plan)

    def _collect_saves(self, output: "SchedulerOutput", now: float) -> None:
        page_size = self._page_size
        requests, planner, counts_ahead = self._requests, self.planner, self._counts_ahead
        drafts = output.scheduled_spec_decode_tokens
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None:
                continue
            request = state.tokens.request  # type: ignore[attr-defined]
            # Tokens that this step's forward has computed for certain: known ids only, without
            # those that wait for a sampled token, and without drafts, which may be rejected.
            placeholders = request.num_output_placeholders
            computed = request.num_computed_tokens - placeholders
            if not counts_ahead:
                computed += num_scheduled
            elif not placeholders:
                computed += num_scheduled - len(drafts.get(request_id, ()))
            # Nearly always false: nothing else is looked at for a request that adds no page.
            num_new = 1 if computed <= request.num_prompt_tokens else self._pages_per_decode_save
            if computed >= (state.num_saved_pages + num_new) * page_size:
                planner.collect_saves(state, min(computed, request.num_tokens), now)

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, ReportMetadata):
            self._time_step(report.plan_number)
            if self._checks is not None:
                self._checks.absorb(report)
            for worker_id, progress in report.progress.items():
                if worker_id not in self._boards.readers:  # a board is never older
                    self.planner.join.update(worker_id, progress)
        self._settle_copies()
        self._settle_storage()
        if self._loaded:
            loaded, self._loaded = self._loaded, []
            output.finished_recving = (output.finished_recving or set()) | set(loaded)

    def _time_step(self, plan_number: int) -> None:
        """Prefill speed from the step that has just ended; steps may overlap."""
        now, steps = time.monotonic(), self._steps
        while steps and steps[0][0] <= plan_number:
            number, started, num_tokens = steps.popleft()
            if number == plan_number:
                self.planner.costs.prefilled(num_tokens, now - max(started, self._last_output))
        self._last_output = now

    @property
    def has_pending_push_work(self) -> bool:
        """Steps go on while copies hold device blocks; they end in milliseconds."""
        return self._planner is not None and self._planner.holds_device_blocks

    def settle_slots(self) -> bool:
        """Use host slots that got ready while no step ran; whether all are ready that ever will."""
        host = self.planner.host
        if host.is_growing:
            self._boards.tell(self.planner.join)
            self.planner.settle_slots()
        return not host.is_growing

    def _settle_copies(self) -> None:
        self._boards.tell(self.planner.join)
        self._apply(self.planner.settle_copies(time.monotonic()))

    def _apply(self, settled: Settled) -> None:
        if settled is NOTHING_SETTLED:
            return
        # A request whose load failed is reported by the workers, in the step whose plan says so.
        self._loaded += [load.state.request_id for load in settled.loaded if load.is_async]
        self._tell(settled.published, HOST)

    def _settle_storage(self) -> None:
        if self._channels is None or not self._channels.has_news:
            return
        self.planner.settle_storage(time.monotonic())
        if self.planner.num_storage_changes != self._num_storage_changes:
            self._num_storage_changes = self.planner.num_storage_changes
            if self._events is not None:
                self._events.clear(STORAGE)
        self._tell(self.planner.take_fetched(), HOST)
        self._tell(self.planner.take_persisted(), STORAGE)
        if self._notice is not None:
            self._notice.tell(self.planner.take_near_misses())

    # Whole cache ---------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Drop host pages and running fetches. Unless the weights are fixed, storage is used
        under a new epoch: this is vLLM's only sign that weights may have changed."""
        if not self._config.fixed_weights:
            self._epoch = token_hex(8)
        self.planner.reset(self._namespace().digest, self._requests.values())
        if self._events is not None:
            self._events.clear(HOST)
            if not self._config.fixed_weights:
                self._events.clear(STORAGE)
        logger.info("HiCache: cache reset, namespace %s", self.planner.namespace)
        return True

    def _drain_copies(self, timeout_s: float = RESET_DRAIN_S) -> None:
        """Wait for copies that hold device blocks; those that no worker knows of are dropped."""
        if self._planner is None:
            return
        self._planner.saves.cancel_planned()
        deadline = time.monotonic() + timeout_s
        while self._planner.saves.num_running:
            self._settle_copies()
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)

    def shutdown(self) -> None:
        """Publish finished copies, persist what is in host, within the grace time."""
        if self._planner is None:
            return
        self._drain_copies(SHUTDOWN_COPY_S)
        self._settle_storage()
        if self._control is not None:
            self._control.close()
        if self._channels is not None and self._planner.link is not None:
            grace_s = self._planner.link.grace_s
            deadline = time.monotonic() + grace_s
            for worker_id in range(self._world_size):
                self._channels.send(worker_id, Drain(grace_s))
            persists = self._planner.persists
            while persists is not None and persists.num_running and time.monotonic() < deadline:
                time.sleep(POLL_S * 10)
                self._settle_storage()
            self._channels.close()
        if self._checks is not None:
            self._checks.close()
        self._boards.close()
        self._planner = None

    # Seeing it -----------------------------------------------------------------------------------

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._events.take() if self._events is not None else ()

    def take_stats(self) -> HiCacheStats | None:
        if self._planner is not None:
            self._planner.gauges.update()
        return HiCacheStats.take(self.metrics)

    def _tell(self, pages: "Iterable[HostPage]", tier: str) -> None:
        if self._events is None:
            return
        for page in pages:
            if page.note is not None:
                self._events.stored(page.page_hash, tier, page.note)  # type: ignore[arg-type]

    def _evicted(self, page: HostPage) -> None:
        self.metrics.count("evicted_tokens", self._page_size)
        if self._events is not None:
            self._events.removed(page.page_hash, HOST)

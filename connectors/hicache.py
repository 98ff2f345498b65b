"""HiCacheConnector: vLLM's connector interface, forwarded to the two sides and nothing else."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors import vllm_view
from vllm_hicache.connectors.messages import PlanMetadata, WorkerHello
from vllm_hicache.connectors.scheduler_side import SchedulerSide
from vllm_hicache.connectors.stats import HiCachePromMetrics, HiCacheStats, attach_loggers
from vllm_hicache.connectors.worker_side import WorkerSide
from vllm_hicache.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Extends vLLM's prefix cache to host memory and storage. See README for its options."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        attach_loggers()
        config = vllm_view.parse_config(vllm_config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = SchedulerSide(vllm_config, kv_cache_config, config)
        else:
            self._worker_side = WorkerSide(vllm_config, kv_cache_config, config)

    @property
    def scheduler_side(self) -> SchedulerSide:
        if self._scheduler_side is None:
            raise InvariantBroken("a scheduler hook was called on a worker's connector")
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        if self._worker_side is None:
            raise InvariantBroken("a worker hook was called on the scheduler's connector")
        return self._worker_side

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss; nobody waits for it."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whole-graph capture is kept, unless layers wait for their loads. Reads the options, so
        that a bad one is refused in the front end, before any process is started."""
        return HiCacheConfig.parse(extra_config).load_mode == "layerwise"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Sleep drains copies, and the KV cache wakes up at its old addresses (vLLM 0.33)."""
        return True

    # Worker --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33)."""
        self.worker_side.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """After wake-up (vLLM 0.33)."""
        self.worker_side.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.hello

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, PlanMetadata):
            self.worker_side.bind(connector_metadata.plan)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self.worker_side.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called in every layer of every step. Loads are whole when the forward begins, unless
        they come layer by layer."""
        side = self._worker_side
        if side is not None and side.layers is not None:
            side.layers.wait(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Saves start after the forward, all layers at once."""

    def wait_for_save(self) -> None:
        self.worker_side.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed = self.worker_side.take_failed_requests()
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=set(failed), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.report()

    # Scheduler -----------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.greet([m for m in metadata.values() if isinstance(m, WorkerHello)])

    def on_new_request(self, request: "Request") -> None:
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self.scheduler_side.update_state_after_alloc(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        host, storage = self.scheduler_side.hit_sources(request.request_id, num_external_tokens)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: storage}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self.scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self.scheduler_side.update_connector_output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.request_finished(request, block_ids)
        return False, None

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self.scheduler_side.take_events()

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_pending_push_work

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset_cache()

    # Both ----------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        return self._scheduler_side.take_stats() if self._scheduler_side is not None else None

    def shutdown(self) -> None:
        for side in (self._scheduler_side, self._worker_side):
            if side is not None:
                side.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        return HiCacheStats(data=data) if data is not None else HiCacheStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        return HiCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

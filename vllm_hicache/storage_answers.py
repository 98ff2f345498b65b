"""What the storage processes say, handed to whom it concerns."""

from vllm_hicache.metrics import Metrics, StorageCounters
from vllm_hicache.persists import Persists
from vllm_hicache.prefetch import Prefetcher
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_link import StorageLink
from vllm_hicache.storage_messages import (
    Drained,
    Hello,
    NearMisses,
    PersistDone,
    PersistReleased,
    Stats,
    Switching,
)


class StorageAnswers:
    """Reads the link. An answer to nothing that is known is counted and ignored."""

    def __init__(
        self, link: StorageLink, persists: Persists, prefetcher: Prefetcher, metrics: Metrics
    ) -> None:
        self._link = link
        self._persists = persists
        self._prefetcher = prefetcher
        self._metrics = metrics
        self._counters = StorageCounters(metrics)
        self._switching: set[int] = set()
        self._near_misses: list[bytes] = []
        self.num_changes = 0
        """How often a worker's storage was attached, detached or replaced since the start."""

    def take_near_misses(self) -> list[bytes]:
        """Records of namespaces that storage found close to this engine's, since the last call."""
        records, self._near_misses = self._near_misses, []
        return records

    def settle(self, now: float) -> None:
        """Take what arrived since the last call."""
        for worker_id, event in self._link.poll():
            self._settle_event(worker_id, event, now)

    def _settle_event(self, worker_id: int, event: object, now: float) -> None:
        known = True
        if isinstance(event, ChannelUp):
            self._regain_worker(worker_id, event, now)
        elif isinstance(event, Switching):
            self._switching.add(worker_id)
        elif isinstance(event, ChannelDown):
            self._lose_worker(worker_id, now)
        elif isinstance(event, Stats):
            incarnation = self._link.incarnation(worker_id)
            self._counters.absorb(worker_id, incarnation, event.counters)
        elif isinstance(event, NearMisses):
            self._near_misses += event.records
        elif isinstance(event, PersistDone | PersistReleased):
            known = self._persists.handle(worker_id, event, now)
        elif not isinstance(event, Hello | Drained):
            known = self._prefetcher.handle(worker_id, event, now)  # type: ignore[arg-type]
        if not known:
            self._metrics.count("ignored_reports")

    def _regain_worker(self, worker_id: int, up: ChannelUp, now: float) -> None:
        if self._link.note_storage(worker_id, up):
            self._persists.change_storage()
            self.num_changes += 1
        if up.times is not None:
            self._link.grace_s = up.times.grace_s
            self._persists.use_times(up.times)
            self._prefetcher.use_times(up.times)
        self._persists.regain_worker(worker_id, now)
        self._prefetcher.regain_worker(worker_id, now)

    def _lose_worker(self, worker_id: int, now: float) -> None:
        if worker_id in self._switching:
            self._switching.remove(worker_id)
        else:
            self._metrics.count("storage_restarts")
        self._persists.lose_worker(worker_id)
        self._prefetcher.lose_worker(worker_id, now)
        self._counters.forget(worker_id)

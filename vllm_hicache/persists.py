"""Host -> storage: pages on their way to storage, and the pins that keep them in host."""

from dataclasses import dataclass

from vllm_hicache.host_tier import HostTier
from vllm_hicache.metrics import Metrics
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.storage_link import StorageLink, WorldAnswer
from vllm_hicache.storage_messages import (
    Persist,
    PersistDone,
    PersistReleased,
    StorageTimes,
    pack_hashes,
    pack_slots,
)

MAX_PAGES_PER_PERSIST = 16
"""A worker says for an operation, not for a page, whether all of it was stored; a smaller
operation loses less when one page is dropped and costs more messages."""


PERSIST_TIMEOUT_FACTOR = 3
"""A persist may wait in line; its pages stay pinned for at most this many operation timeouts."""
RETRY_S = 5.0
"""After a drop, pages that were dropped are not offered again for so long. Sooner, every request
would send its whole chain to a tier that is down; later, more pages leave host unstored."""
FULL_RETRY_S = 1.0
"""A tier that was full is offered nothing for so long: it reads a page before it refuses it."""


@dataclass(slots=True)
class _Persist:
    """Pages that storage processes read from host. Pinned until every worker released them."""

    pages: list[HostPage]
    parts: bytes
    """Of each page, when it was sent; b"" where no page lacks anything."""
    answer: WorldAnswer
    is_stored: bool = True
    is_stale: bool = False


class Persists:
    """All running persists."""

    def __init__(
        self,
        host: HostTier,
        link: StorageLink,
        metrics: Metrics,
        *,
        page_size: int,
        deadline_s: float,
        has_parts: bool = False,
    ) -> None:
        self._has_parts = has_parts
        self._host = host
        self._link = link
        self._metrics = metrics
        self._page_size = page_size
        self._deadline_s = deadline_s
        self._retry_at = self._full_until = 0.0
        self._running: dict[int, _Persist] = {}
        self._stored: list[HostPage] = []

    def take_stored(self) -> list[HostPage]:
        """Pages that storage holds on all workers since the last call."""
        stored, self._stored = self._stored, []
        return stored

    @property
    def num_running(self) -> int:
        return len(self._running)

    def pinned_pages(self) -> list[HostPage]:
        """Pages of all running persists, one entry a pin."""
        return [page for persist in self._running.values() for page in persist.pages]

    def start(self, pages: list[HostPage], namespace: str, now: float) -> None:
        """Send pages to storage, in chain order. While storage is away they stay in host only
        and are sent when they are used again."""
        wanted = [
            page
            for page in pages
            if page.is_present and not page.is_persisted and not page.is_persisting
        ]
        if wanted and now < self._full_until:
            self._drop(len(wanted), "full", now)
            return
        for i in range(0, len(wanted), MAX_PAGES_PER_PERSIST):
            self._send(wanted[i : i + MAX_PAGES_PER_PERSIST], namespace, now)

    def catch_up(self, page: HostPage, namespace: str, now: float) -> None:
        """Send what storage lacks of the chain that ends in this page, ancestors first. O(chain):
        a page that was dropped may have descendants that were stored."""
        if now < self._retry_at or not self._link.is_up:
            return
        chain = []
        ancestor: HostPage | None = page
        while ancestor is not None:
            chain.append(ancestor)
            ancestor = ancestor.parent
        self.start(chain[::-1], namespace, now)

    def handle(self, worker_id: int, event: PersistDone | PersistReleased, now: float) -> bool:
        """Take one answer; False when the operation is unknown."""
        persist = self._running.get(event.op)
        if persist is None:
            return False
        if isinstance(event, PersistDone):
            num_pages = event.num_stored + event.num_existing
            if not persist.answer.advance(worker_id, num_pages):
                return False
            persist.answer.settle(worker_id, event.reason)
            if num_pages < len(persist.pages):
                persist.is_stored = False
            self._metrics.count("persisted_bytes", event.num_bytes)
        else:
            if persist.answer.settle(worker_id, "cancelled"):
                persist.is_stored = False
            persist.answer.released.add(worker_id)
        self._finish(event.op, persist, now)
        return True

    def lose_worker(self, worker_id: int) -> None:
        """A storage process died: what it did not confirm is not stored."""
        for persist in self._running.values():
            if persist.answer.settle(worker_id, "unavailable"):
                persist.is_stored = False

    def use_times(self, times: StorageTimes) -> None:
        """Deadlines from now on are those of this storage."""
        self._deadline_s = times.operation_s * PERSIST_TIMEOUT_FACTOR

    def change_storage(self) -> None:
        """The storage is another one: pages of host are offered to it when they are used again."""
        self._host.forget_stored()
        self._retry_at = self._full_until = 0.0
        for persist in self._running.values():
            persist.is_stale = True

    def regain_worker(self, worker_id: int, now: float) -> None:
        """Its successor said hello: nobody reads the old slots any more."""
        for op, persist in list(self._running.items()):
            persist.answer.released.add(worker_id)
            self._finish(op, persist, now)

    def forget(self) -> None:
        """Reset: results of running persists no longer matter, their pins do."""
        for persist in self._running.values():
            persist.is_stale = True

    def _send(self, pages: list[HostPage], namespace: str, now: float) -> None:
        op = self._link.next_number()
        parts = bytes(page.parts for page in pages) if self._has_parts else b""
        message = Persist(
            op,
            namespace,
            pack_hashes(page.page_hash for page in pages),
            pack_slots([page.slot for page in pages]),
            self._deadline_s,
            parts,
        )
        answer = WorldAnswer(self._link.world_size)
        if not self._link.broadcast(message, answer):
            self._drop(len(pages), "unavailable", now)
            return
        self._host.pin(pages)
        for page in pages:
            page.is_persisting = True
        persist = _Persist(pages, parts, answer, is_stored=not answer.released)
        self._running[op] = persist
        self._finish(op, persist, now)

    def _finish(self, op: int, persist: _Persist, now: float) -> None:
        answer = persist.answer
        if not (answer.is_settled and answer.is_released):
            return
        del self._running[op]
        stored = persist.is_stored and not persist.is_stale
        for i, page in enumerate(persist.pages):
            page.is_persisting = False
            is_whole = not persist.parts or persist.parts[i] == page.parts  # it may have got more
            page.is_persisted = page.is_persisted or (stored and is_whole)
        if stored:
            self._stored += persist.pages
        self._host.unpin(persist.pages)
        if not persist.is_stored:
            reason = "reset" if persist.is_stale else answer.reason
            if reason == "full":
                self._full_until = now + FULL_RETRY_S
            self._drop(len(persist.pages) - answer.agreed, reason, now)

    def _drop(self, num_pages: int, reason: str, now: float) -> None:
        if reason != "reset":
            self._retry_at = now + RETRY_S
        known = ("backlog", "full", "deadline", "reset", "cancelled")
        reason = reason if reason in known else "unavailable"
        self._metrics.count("persist_dropped_tokens", num_pages * self._page_size, reason)

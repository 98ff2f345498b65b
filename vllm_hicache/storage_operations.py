"""What one exists, fetch or persist does with the calls that a lane grants it."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from vllm_hicache.errors import BackendError
from vllm_hicache.host_pages import HostPages
from vllm_hicache.storage import FetchOutcome, ShardObject, WriteOutcome
from vllm_hicache.storage_breaker import Breaker
from vllm_hicache.storage_lanes import Operation
from vllm_hicache.storage_messages import (
    HASH_BYTES,
    Event,
    Exists,
    ExistsReason,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReason,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReason,
    PersistReleased,
    unpack_hashes,
    unpack_slots,
)

# Pages of the first question about a prompt, and of the largest: most answers lie in the first
# few pages, and a question of 512 pages of 8 shards takes about 10 ms from local files.
FIRST_EXISTS_PAGES = 4
MAX_EXISTS_PAGES = 512
_NO_ANSWER = "no answer to a question"


class VerifiedStorage(Protocol):
    """What operations need of ``CheckedStorage``; its rule about buffers applies."""

    async def exists(self, names: Sequence[str]) -> list[bool]: ...

    async def fetch(self, items: Sequence[ShardObject]) -> list[FetchOutcome]: ...

    async def persist(self, items: Sequence[ShardObject]) -> list[WriteOutcome]: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every operation is given."""

    storage: VerifiedStorage
    pages: HostPages
    send: Callable[[Event], None]
    retire: Callable[[Operation], None]
    """Called once, when the operation is settled and no call of it runs."""
    changed: Callable[[], None]
    """Called when an operation has settled."""
    zeroed: Callable[[], None]
    """Called when a page got zeros in place of what it was fetched without."""


class _StorageOperation(Operation):
    def __init__(
        self,
        message: Exists | Fetch | Persist,
        around: Surroundings,
        breaker: Breaker,
    ) -> None:
        super().__init__(message.op, breaker)
        self._around = around
        self._namespace = message.namespace
        self._hashes = unpack_hashes(message.hashes)
        self._is_retired = False
        self._deadline = asyncio.get_running_loop().call_later(
            max(0.0, message.deadline_s), self._pass_deadline
        )

    @abstractmethod
    def _release(self) -> None:
        """Tell that no call runs any more."""

    def _pass_deadline(self) -> None:
        self.stop("deadline")

    def _settle(self, event: Event) -> None:
        self.is_settled = True
        self._deadline.cancel()
        self._around.send(event)
        self._around.changed()

    def call_ended(self) -> None:
        self.retire_if_quiet()

    def retire_if_quiet(self) -> None:
        """Release once, when settled and without calls."""
        if self.is_settled and not self.calls and not self._is_retired:
            self._is_retired = True
            self._release()
            self._around.retire(self)


class ExistsOperation(_StorageOperation):
    """Asks for the leading pages in growing pieces, one at a time."""

    def __init__(self, message: Exists, around: Surroundings, breaker: Breaker) -> None:
        super().__init__(message, around, breaker)
        self._parts = bytearray()  # of the leading pages
        self._piece = FIRST_EXISTS_PAGES

    @property
    def _num_leading(self) -> int:
        return len(self._parts)

    def next_call(self) -> Coroutine[Any, Any, bytes] | None:
        if self.calls:
            return None
        hashes = self._hashes[self._num_leading : self._num_leading + self._piece]
        return self._find_leading(hashes)

    async def _find_leading(self, hashes: list[bytes]) -> bytes:
        pages = self._around.pages
        found = await self._around.storage.exists(pages.names(self._namespace, hashes))
        return pages.leading_parts(found)

    def take_result(self, result: bytes) -> None:
        if self.is_settled:
            return
        asked = min(self._piece, len(self._hashes) - self._num_leading)
        self._parts += result
        self._piece = min(self._piece * 8, MAX_EXISTS_PAGES)
        if len(result) < asked or self._num_leading == len(self._hashes):
            self._settle(self._answer(ok=True))

    def _answer(self, *, ok: bool, reason: ExistsReason = "") -> ExistsResult:
        parts = bytes(self._parts) if self._around.pages.all_parts else b""
        return ExistsResult(self.op, self._num_leading, ok, reason, parts)

    def _pass_deadline(self) -> None:
        """Answer; a call goes on until it stalls, for it tells a slow storage from a dead one.
        Unless a dead one counts as failed, every request of an outage waits for its question."""
        if not self.is_settled:
            self._settle(self._answer(ok=False, reason="deadline"))
        self.fail_stalled_calls(_NO_ANSWER, "deadline")
        self.retire_if_quiet()

    def call_stalled(self) -> None:
        super().call_stalled()
        if self.is_settled:
            self.fail_stalled_calls(_NO_ANSWER, "deadline")

    def stop(self, reason: ExistsReason) -> None:
        if not self.is_settled:
            self._settle(self._answer(ok=False, reason=reason))
            self.cancel_calls()
            self.retire_if_quiet()

    def _release(self) -> None:
        """Nothing to tell: an exists uses no host slot."""


class FetchOperation(_StorageOperation):
    """Reads pages concurrently, reports the leading verified ones, ends at the first bad one: one
    whose call failed costs those before it nothing."""

    def __init__(self, message: Fetch, around: Surroundings, breaker: Breaker) -> None:
        super().__init__(message, around, breaker)
        self._slots = unpack_slots(message.slots)
        self._parts = message.parts or bytes(len(self._hashes))
        self._next = 0
        self._stop = len(self._hashes)  # pages from here on are of no use
        self._lost = len(self._hashes)  # the first whose call failed
        self._early: dict[int, FetchOutcome] = {}  # answers beyond the leading pages
        self._num_leading = 0
        self._is_progress_due = False

    def next_call(self) -> Coroutine[Any, Any, tuple[int, FetchOutcome | None]] | None:
        if self._next >= self._stop:
            return None
        self._next += 1
        return self._read(self._next - 1)

    async def _read(self, page: int) -> tuple[int, FetchOutcome | None]:
        """What became of the page; None where there was nothing to read."""
        pages, slot, parts = self._around.pages, self._slots[page], self._parts[page]
        items = pages.objects(self._namespace, self._hashes[page], slot, parts)
        try:
            outcomes = await self._around.storage.fetch(items) if items else []
        except BackendError:
            self._lost = min(self._lost, page)
            raise
        bad = [outcome for outcome in outcomes if outcome is not FetchOutcome.OK]
        if FetchOutcome.CORRUPT in bad:
            return page, FetchOutcome.CORRUPT
        if bad:
            return page, bad[0]
        if pages.zero(slot, parts):
            self._around.zeroed()
        return page, FetchOutcome.OK if items else None

    def is_answer(self, result: tuple[int, FetchOutcome | None]) -> bool:
        return result[1] is not None

    def take_result(self, result: tuple[int, FetchOutcome | None]) -> None:
        page, outcome = result[0], result[1] or FetchOutcome.OK
        if self.is_settled:
            return
        self._early[page] = outcome
        if outcome is not FetchOutcome.OK:
            self._stop = min(self._stop, page)
        before = self._num_leading
        while self._early.get(self._num_leading) is FetchOutcome.OK:
            del self._early[self._num_leading]
            self._num_leading += 1
        bad = self._early.get(self._num_leading)
        if bad is FetchOutcome.CORRUPT:
            self.stop("corrupt")
        elif bad is FetchOutcome.MISSING:
            self.stop("missing")
        elif self._num_leading == len(self._hashes):
            self.stop("complete")
        elif self._num_leading >= self._lost:
            self.stop("unavailable")
        elif self._num_leading > before and not self._is_progress_due:
            # One message for all pages that end in this turn of the loop.
            self._is_progress_due = True
            asyncio.get_running_loop().call_soon(self._tell_progress)

    def _tell_progress(self) -> None:
        self._is_progress_due = False
        if not self.is_settled:
            self._around.send(FetchProgress(self.op, self._num_leading))

    def _pass_deadline(self) -> None:
        if self.num_stalled and not self._num_leading:
            self.fail_stalled_calls("nothing arrived before the deadline", "deadline")
        self.stop("deadline")

    def stop(self, reason: FetchReason) -> None:
        if reason == "cancelled" and self.num_stalled and not self._num_leading:
            # Nobody waits for it any longer: unless that counts, every request waits like this.
            self.fail_stalled_calls("nothing arrived before it was given up", reason)
        if reason == "unavailable" and self._num_leading < self._lost < len(self._hashes):
            self._stop = min(self._stop, self._lost)  # those before it are being read
            return
        if not self.is_settled:
            self._settle(FetchSettled(self.op, self._num_leading, reason))
            self.cancel_calls()
            self.retire_if_quiet()

    def _release(self) -> None:
        self._around.send(FetchReleased(self.op))


def page_bytes(message: Persist, pages: HostPages) -> list[int]:
    """Bytes that this worker writes of each page."""
    sizes = {parts: pages.written_bytes(parts) for parts in {0, *message.parts}}
    return [sizes[parts] for parts in message.parts or bytes(len(message.hashes) // HASH_BYTES)]


class PersistOperation(_StorageOperation):
    """Writes pages in order, several at a time. Bytes count as backlog until written or dropped."""

    def __init__(
        self,
        message: Persist,
        around: Surroundings,
        breaker: Breaker,
        num_admitted: int,
    ) -> None:
        super().__init__(message, around, breaker)
        self._slots = unpack_slots(message.slots)
        self._parts = message.parts or bytes(len(self._hashes))
        # Bytes of all pages before each one.
        self._offsets = [0, *accumulate(page_bytes(message, around.pages))]
        self._next = 0
        self._stop = num_admitted
        self._num_stored = 0
        self._num_existing = 0
        self._num_bytes = 0
        self._reason: PersistReason = "complete"
        if num_admitted < len(self._hashes):
            self._reason = "backlog"
        self._settle_if_finished()

    @property
    def bytes_held(self) -> int:
        """Bytes of pages that are queued or being written."""
        offsets = self._offsets
        queued = 0 if self.is_settled else offsets[self._stop] - offsets[self._next]
        return queued + sum(offsets[page + 1] - offsets[page] for page in self.calls.values())

    def next_call(self) -> Coroutine[Any, Any, WriteOutcome | None] | None:
        if self._next >= self._stop:
            return None
        self._next += 1
        return self._write(self._next - 1)

    async def _write(self, page: int) -> WriteOutcome | None:
        """What became of the page; None where this worker writes nothing of it."""
        pages = self._around.pages
        items = pages.own_objects(
            self._namespace, self._hashes[page], self._slots[page], self._parts[page]
        )
        if not items:
            return None
        outcomes = await self._around.storage.persist(items)
        self._num_bytes += sum(
            item.payload.nbytes
            for item, outcome in zip(items, outcomes, strict=True)
            if outcome is WriteOutcome.STORED
        )
        for outcome in (WriteOutcome.FULL, WriteOutcome.STORED):
            if outcome in outcomes:
                return outcome
        return WriteOutcome.EXISTS

    def is_answer(self, result: WriteOutcome | None) -> bool:
        return result is not None

    def take_result(self, result: WriteOutcome | None) -> None:
        if self.is_settled:
            return
        if result is WriteOutcome.STORED:
            self._num_stored += 1
        elif result in (WriteOutcome.EXISTS, None):
            self._num_existing += 1
        else:
            self.stop("full")

    def call_ended(self) -> None:
        self._settle_if_finished()
        super().call_ended()

    def stop(self, reason: PersistReason) -> None:
        """Drop what has not started; healthy writes still count unless time or will is out."""
        if self.is_settled:
            return
        self._stop = self._next
        if self._reason == "complete":
            self._reason = reason
        if reason in ("deadline", "cancelled"):
            self._finish()
            self.cancel_calls()
        self._settle_if_finished()
        self.retire_if_quiet()

    def _settle_if_finished(self) -> None:
        if not self.is_settled and self._next >= self._stop and not self.calls:
            self._finish()

    def _finish(self) -> None:
        dropped = len(self._hashes) - self._num_stored - self._num_existing
        done = PersistDone(
            self.op,
            self._num_stored,
            self._num_existing,
            dropped,
            self._reason,
            self._num_bytes,
        )
        self._settle(done)

    def _release(self) -> None:
        self._around.send(PersistReleased(self.op))

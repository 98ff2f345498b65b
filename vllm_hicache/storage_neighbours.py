"""Inside one engine's first storage process: keeps the record of its namespace in the store, and
looks once for near ones when nothing is found.

It only listens to what goes over the channel. Its own calls to the store run beside all
operations and delay none.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_hicache.errors import BackendError
from vllm_hicache.namespace_records import near_misses, record_digest
from vllm_hicache.storage import KeepsRecords, WriteOutcome
from vllm_hicache.storage_messages import (
    HASH_BYTES,
    Command,
    Describe,
    Event,
    Exists,
    ExistsResult,
    NearMisses,
    Persist,
    PersistDone,
)

logger = logging.getLogger(__name__)

RENEW_S = 6 * 3600.0
"""Written anew this often, a record in use outlives what bounds the store."""
RETRY_S = 60.0
"""After a failure; a record is never urgent."""


class Neighbours:
    """Watches one storage on behalf of one namespace: the one that ``Describe`` told of."""

    def __init__(
        self,
        records: Callable[[], KeepsRecords | None],
        *,
        min_pages: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._min_pages = min_pages
        self._clock = clock
        self._own: bytes = b""
        self._namespace = ""
        self._send: Callable[[Event], None] | None = None
        self._asked: dict[int, int] = {}  # exists -> its pages
        self._persists: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._num_missed = 0
        self._is_settled = False  # nothing to look for any more
        self._write_due = 0.0
        self._is_new = False  # this process was the first to write the record

    def listen(self, send: Callable[[Event], None]) -> Callable[[Event], None]:
        """Connect to a scheduler: returns what takes its events from now on."""
        self._asked.clear()
        self._persists.clear()
        self._send = send

        def forward(event: Event) -> None:
            self._note_event(event)
            send(event)

        return forward

    def take(self, command: Command) -> bool:
        """Look at a command; True when it was meant for nobody else."""
        if isinstance(command, Describe):
            self._own = command.record
            self._namespace = record_digest(command.record)
            return True
        if isinstance(command, Exists) and command.namespace == self._namespace:
            self._asked[command.op] = len(command.hashes) // HASH_BYTES
        elif isinstance(command, Persist) and command.namespace == self._namespace:
            self._persists.add(command.op)
        return False

    def _note_event(self, event: Event) -> None:
        if isinstance(event, ExistsResult):
            num_pages = self._asked.pop(event.op, 0)
            if event.ok and num_pages and not self._is_settled:
                self._note_answer(num_pages, event.num_leading)
        elif isinstance(event, PersistDone) and event.op in self._persists:
            self._persists.discard(event.op)
            if event.num_stored and self._clock() >= self._write_due:
                self._write_due = self._clock() + RENEW_S
                self._start(self._write())

    def _note_answer(self, num_pages: int, num_found: int) -> None:
        self._num_missed += num_pages
        if num_found:
            self._is_settled = True
        elif self._num_missed >= self._min_pages:
            self._is_settled = True
            self._start(self._look())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        records = self._records()
        if records is None:
            return
        outcome = WriteOutcome.FULL
        try:
            async with self._turn:
                outcome = await records.write_record(self._namespace, self._own)
        finally:
            if outcome is WriteOutcome.FULL:
                self._write_due = self._clock() + RETRY_S
        self._is_new |= outcome is WriteOutcome.STORED

    async def _look(self) -> None:
        records = self._records()
        if records is None:
            return
        async with self._turn:
            found = await records.read_records()
        if self._namespace in found and not self._is_new:
            return  # others share this namespace: the prompts are new, not the configuration
        near = near_misses(self._own, found)
        if near and self._send is not None:
            self._send(NearMisses(tuple(found[one.digest] for one in near)))


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """A record is a courtesy: without it everything works."""
    try:
        await work
    except BackendError as error:
        logger.info("Records of namespaces: %s", error)
    except Exception:
        logger.exception("Records of namespaces")

"""All operations of one storage process: admits commands, drains, tells when buffers are quiet."""

import asyncio
from collections.abc import Callable
from itertools import accumulate

from vllm_hicache.host_pages import HostPages
from vllm_hicache.storage_breaker import Breaker
from vllm_hicache.storage_lanes import Lane, Operation
from vllm_hicache.storage_messages import (
    Ask,
    Attach,
    Cancel,
    Command,
    Configure,
    Drain,
    Drained,
    Event,
    Exists,
    Fetch,
    Persist,
    ProtocolError,
    unpack_slots,
)
from vllm_hicache.storage_operations import (
    ExistsOperation,
    FetchOperation,
    PersistOperation,
    Surroundings,
    VerifiedStorage,
    page_bytes,
)
from vllm_hicache.storage_process_config import StorageProcessConfig

# With less, an operation reads page by page and leaves the backend idle in between.
MIN_PAGES_AT_ONCE = 4


class OperationTable:
    """Runs the operations of one connection at a time against one storage."""

    def __init__(
        self, storage: VerifiedStorage, pages: HostPages, config: StorageProcessConfig
    ) -> None:
        def lane(limit: int) -> Lane:
            timeout_s = config.storage.operation_timeout_s
            stall_s = min(config.stall_s, timeout_s)
            return Lane(limit, stall_s=stall_s, timeout_s=timeout_s, changed=self._note_change)

        def breaker(direction: str) -> Breaker:
            return Breaker(
                direction,
                failures=config.breaker_failures,
                backoff_s=config.breaker_backoff_s,
                max_backoff_s=config.breaker_max_backoff_s,
            )

        self._pages = pages
        self._is_attached = config.storage.is_attached
        self._backlog_limit = config.storage.write_backlog_bytes
        self._exists_lane = lane(config.exists_concurrency)
        self._fetch_lane = lane(_pages_at_once(config.storage.read_concurrency, pages))
        self._persist_lane = lane(_pages_at_once(config.storage.write_concurrency, pages))
        self._lanes = (self._exists_lane, self._fetch_lane, self._persist_lane)
        # Of its own: a server that answers questions may still hang in reads.
        self._exists_breaker = breaker("questions")
        self._read_breaker = breaker("reads")
        self._write_breaker = breaker("writes")
        self._reads: dict[int, ExistsOperation | FetchOperation] = {}
        self._persists: dict[int, PersistOperation] = {}
        self._num_drains = 0
        self._is_pump_due = False
        self._drain_tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._send: Callable[[Event], None] | None = None
        self._num_zeroed = 0
        self._around = Surroundings(
            storage, pages, self._tell, self._retire, self._note_change, self._note_zeroed
        )
        self.is_open = False
        """Whether the storage has been opened; until then everything is unavailable."""

    # Connections ----------------------------------------------------------------------------

    def attach(self, send: Callable[[Event], None]) -> None:
        """Answers go to ``send`` from now on."""
        self._send = send

    def detach(self) -> None:
        """Nobody listens any more: reads are cancelled, persists go on in silence."""
        self._send = None
        self.cancel_reads()
        exists = [op for op, read in self._reads.items() if isinstance(read, ExistsOperation)]
        for op in exists:
            del self._reads[op]

    def cancel_reads(self) -> None:
        """Settle every exists and fetch as cancelled."""
        for operation in list(self._reads.values()):
            operation.stop("cancelled")

    async def quiet(self) -> None:
        """Return when no thread touches a host slot; meaningful while detached."""
        while self._reads or self._persists:
            await self._changed.wait()

    def handle(self, command: Command) -> None:
        """Take one command; ``ProtocolError`` when it cannot be meant for this process."""
        match command:
            case Exists() | Fetch() | Persist():
                self._check(command)
                self._begin(command)
                self._note_change()
            case Cancel():
                operation = self._reads.get(command.op) or self._persists.get(command.op)
                if operation is not None:
                    operation.stop("cancelled")
            case Drain():
                task = asyncio.create_task(self._answer_drain(command.deadline_s))
                self._drain_tasks.add(task)
                task.add_done_callback(self._drain_tasks.discard)
            case Attach() | Ask() | Configure():
                raise ProtocolError("a first message that came later")

    async def drain(self, deadline_s: float) -> None:
        """Refuse new reads, wait for persists until the deadline, drop what is left then."""
        self._num_drains += 1
        try:
            async with asyncio.timeout(deadline_s):
                while any(not persist.is_settled for persist in self._persists.values()):
                    await self._changed.wait()
        except TimeoutError:
            for persist in list(self._persists.values()):
                persist.stop("deadline")
        finally:
            self._num_drains -= 1

    # Watching -------------------------------------------------------------------------------

    @property
    def backlog_bytes(self) -> int:
        """Bytes of pages that are queued or being written."""
        return sum(persist.bytes_held for persist in self._persists.values())

    def oldest_running_s(self) -> float:
        """Age of the oldest running storage call in seconds, 0.0 without one."""
        return max(lane.oldest_running_s() for lane in self._lanes)

    def counters(self) -> dict[str, float]:
        """Totals since construction, by the names of the metrics."""
        return {"zeroed_pages": float(self._num_zeroed)}

    def gauges(self) -> dict[str, float]:
        """Current levels, by the names of the metrics."""
        breakers = (self._exists_breaker, self._read_breaker, self._write_breaker)
        is_closed = all(breaker.is_closed for breaker in breakers)
        is_working = is_closed and self.is_open
        return {
            "breaker_open": 1.0 if self._is_attached and not is_working else 0.0,
            "storage_attached": float(self._is_attached),
            "write_backlog_bytes": float(self.backlog_bytes),
        }

    # Operations -----------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if self._send is not None:
            self._send(event)

    async def _answer_drain(self, deadline_s: float) -> None:
        await self.drain(deadline_s)
        self._tell(Drained())

    def _check(self, command: Exists | Fetch | Persist) -> None:
        if command.op in self._reads or command.op in self._persists:
            raise ProtocolError(f"operation number {command.op} is in use")
        if isinstance(command, Exists):
            return
        slots = unpack_slots(command.slots)
        if min(slots) < 0 or max(slots) >= self._pages.num_slots:
            raise ProtocolError(
                f"host slots [{min(slots)}, {max(slots)}], but there are {self._pages.num_slots}"
            )
        if any(parts & ~self._pages.all_parts for parts in set(command.parts)):
            known, asked = self._pages.all_parts, max(command.parts)
            raise ProtocolError(f"parts up to {asked:#x}, but there are {known:#x}")

    def _is_refused(self, breaker: Breaker) -> bool:
        # While a probe runs, newcomers are refused too: waiting for it is waiting for a maybe.
        return not self.is_open or not breaker.may_start

    def _begin(self, command: Exists | Fetch | Persist) -> None:
        match command:
            case Exists():
                exists = ExistsOperation(command, self._around, self._exists_breaker)
                self._begin_read(exists, self._exists_lane)
            case Fetch():
                fetch = FetchOperation(command, self._around, self._read_breaker)
                self._begin_read(fetch, self._fetch_lane)
            case Persist():
                self._begin_persist(command)

    def _begin_read(self, read: ExistsOperation | FetchOperation, lane: Lane) -> None:
        self._reads[read.op] = read
        if self._num_drains:
            read.stop("cancelled")
        # While pages cannot be read, nobody needs to know which there are.
        elif self._is_refused(self._read_breaker) or self._is_refused(read.breaker):
            read.stop("unavailable")
        else:
            lane.add(read)

    def _begin_persist(self, command: Persist) -> None:
        persist = PersistOperation(
            command, self._around, self._write_breaker, num_admitted=self._num_admitted(command)
        )
        self._persists[persist.op] = persist
        if self._is_refused(self._write_breaker):
            persist.stop("unavailable")
        persist.retire_if_quiet()
        if not persist.is_settled:
            self._persist_lane.add(persist)

    def _num_admitted(self, command: Persist) -> int:
        """Leading pages that fit into the backlog; one page fits into an empty one."""
        backlog_bytes = self.backlog_bytes
        ends = accumulate(page_bytes(command, self._pages), initial=backlog_bytes)
        next(ends)
        num_fitting = sum(end <= self._backlog_limit for end in ends)
        return num_fitting if backlog_bytes else max(num_fitting, 1)

    def _retire(self, operation: Operation) -> None:
        self._reads.pop(operation.op, None)
        self._persists.pop(operation.op, None)
        self._note_change()

    def _note_zeroed(self) -> None:
        self._num_zeroed += 1

    def _note_change(self) -> None:
        """Wake who waits for a state, and start calls in the next turn of the loop."""
        self._changed.set()
        self._changed = asyncio.Event()
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        for lane in self._lanes:
            lane.pump()


def _pages_at_once(num_objects: int, pages: HostPages) -> int:
    """Pages whose shards keep a backend busy that works on so many objects at a time."""
    return max(MIN_PAGES_AT_ONCE, num_objects // max(1, pages.num_required))

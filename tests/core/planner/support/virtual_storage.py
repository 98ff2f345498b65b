"""Storage processes without bytes or sockets: slow, forgetful, corrupting, dying.

Channels behave as ``StorageChannels``: a message reaches the connection that the caller has seen
come up, and one poll may bring the end of a process and the start of its successor.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from virtual_workers import Garbage, Tag, VirtualWorker

from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import (
    Cancel,
    Command,
    Event,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReleased,
    Stats,
    unpack_hashes,
    unpack_slots,
)
from vllm_hicache.tiers import SlotOwner

Store = dict[tuple[str, bytes, int], tuple[Tag, ...]]
"""(namespace, page hash, worker) -> what the worker's shards of the page hold."""


@dataclass(frozen=True)
class Trouble:
    """Chances of things going wrong, each time that they can."""

    death: float = 0.0
    refusal: float = 0.0
    missing: float = 0.0
    corrupt: float = 0.0
    deadline: float = 0.0
    drop: float = 0.0


@dataclass
class _Operation:
    """A fetch or persist inside one process."""

    message: Fetch | Persist
    hashes: list[bytes]
    slots: list[int]
    started: set[int] = field(default_factory=set)
    ended: dict[int, bool] = field(default_factory=dict)
    is_settled: bool = False
    num_told: int = 0

    @property
    def num_leading(self) -> int:
        leading = 0
        while self.ended.get(leading):
            leading += 1
        return leading

    @property
    def running(self) -> set[int]:
        return self.started - self.ended.keys()


class VirtualProcess:
    """The storage process of one worker, one incarnation after the other."""

    def __init__(
        self,
        worker: VirtualWorker,
        store: Store,
        rng: Random,
        trouble: Trouble,
        owner: Callable[[int], SlotOwner],
        expected: Callable[[str, bytes], tuple[Tag, ...]],
    ) -> None:
        self.worker = worker
        self.generation = 0
        self.events: list[tuple[Event | ChannelUp | ChannelDown, int]] = []
        self.inbox: deque[Command] = deque()
        self._store = store
        self._rng = rng
        self._trouble = trouble
        self._owner = owner
        self._expected = expected
        self._operations: dict[int, _Operation] = {}
        self._num_lives = 0

    @property
    def is_quiet(self) -> bool:
        return not self.inbox and not self._operations

    def start(self) -> None:
        """Say hello: no thread of an earlier life touches a slot any more."""
        self._operations.clear()
        self.inbox.clear()
        self._num_lives += 1
        self.generation = self._num_lives
        self._say(ChannelUp(self._num_lives))

    def die(self) -> None:
        """The connection breaks. Reads and writes that have started may go on until ``start``."""
        self.generation = 0
        self.events.append((ChannelDown(), 0))
        self.inbox.clear()

    def calm(self, trouble: Trouble) -> None:
        """From now on only this goes wrong."""
        self._trouble = trouble

    def tick(self) -> None:
        """One thing happens."""
        if not self.generation:
            if self._rng.random() < 0.3:
                self.start()
            else:
                self._work_on()
            return
        if self._rng.random() < self._trouble.death:
            self.die()
            if self._rng.random() < 0.5:
                self.start()  # so soon that one poll brings both
        elif self.inbox and self._rng.random() < 0.7:
            self._receive(self.inbox.popleft())
        elif self._rng.random() < 0.05:
            self._say(Stats({"objects_read": float(self._num_lives)}))
        else:
            self._work_on()

    def _say(self, event: Event | ChannelUp) -> None:
        if self.generation:
            self.events.append((event, self.generation))

    def _receive(self, message: Command) -> None:
        match message:
            case Exists():
                self._answer_exists(message)
            case Fetch() | Persist():
                hashes, slots = unpack_hashes(message.hashes), unpack_slots(message.slots)
                self._operations[message.op] = _Operation(message, hashes, slots)
            case Cancel():
                operation = self._operations.get(message.op)
                if operation is not None and not operation.is_settled:
                    self._settle(operation, "cancelled")

    def _answer_exists(self, message: Exists) -> None:
        if self._rng.random() < self._trouble.refusal:
            result = ExistsResult(message.op, 0, ok=False, reason="unavailable")
        else:
            leading = 0
            for page_hash in unpack_hashes(message.hashes):
                if (message.namespace, page_hash, self.worker.worker_id) not in self._store:
                    break
                leading += 1
            result = ExistsResult(message.op, leading, ok=True)
        self._say(result)

    def _work_on(self) -> None:
        if not self._operations:
            return
        operation = self._rng.choice(list(self._operations.values()))
        if operation.running and (operation.is_settled or self._rng.random() < 0.6):
            self._end_page(operation, self._rng.choice(sorted(operation.running)))
        elif operation.is_settled:
            del self._operations[operation.message.op]
            is_fetch = isinstance(operation.message, Fetch)
            released = FetchReleased if is_fetch else PersistReleased
            self._say(released(operation.message.op))
            return
        elif len(operation.started) < len(operation.hashes):
            self._start_page(operation, len(operation.started))
        if not operation.is_settled:
            self._look(operation)

    def _start_page(self, operation: _Operation, page: int) -> None:
        operation.started.add(page)
        if isinstance(operation.message, Fetch):
            self._write(operation.slots[page], Garbage(f"fetch {operation.message.op} runs"))

    def _end_page(self, operation: _Operation, page: int) -> None:
        slot, page_hash = operation.slots[page], operation.hashes[page]
        key = (operation.message.namespace, page_hash, self.worker.worker_id)
        if isinstance(operation.message, Fetch):
            is_missing = key not in self._store or self._rng.random() < self._trouble.missing
            is_corrupt = self._rng.random() < self._trouble.corrupt
            operation.ended[page] = not is_missing and not is_corrupt
            if operation.ended[page]:
                self._write(slot, *self._store[key])
            return
        assert self._owner(slot) is SlotOwner.INDEX, f"persist reads slot {slot}"
        content = tuple(self.worker.host[slot])
        assert content == self._expected(operation.message.namespace, page_hash), (
            f"worker {self.worker.worker_id} persists {content} from slot {slot}"
        )
        operation.ended[page] = self._rng.random() >= self._trouble.drop
        if operation.ended[page]:
            self._store[key] = content

    def _write(self, slot: int, *content: Tag) -> None:
        assert self._owner(slot) is SlotOwner.OPERATION, f"fetch writes to slot {slot}"
        host = self.worker.host[slot]
        host[:] = content if len(content) == len(host) else content * len(host)

    def _look(self, operation: _Operation) -> None:
        """Tell what is news; settle when there is nothing more to come."""
        leading = operation.num_leading
        is_bad = operation.ended.get(leading) is False
        if self._rng.random() < self._trouble.deadline:
            self._settle(operation, "deadline")
        elif len(operation.ended) == len(operation.hashes):
            self._settle(operation, "missing" if is_bad else "complete")
        elif isinstance(operation.message, Fetch):
            if is_bad:
                self._settle(operation, "corrupt")
            elif leading > operation.num_told and self._rng.random() < 0.7:
                operation.num_told = leading
                self._say(FetchProgress(operation.message.op, leading))

    def _settle(self, operation: _Operation, reason: str) -> None:
        operation.is_settled = True
        op, num_pages = operation.message.op, len(operation.hashes)
        if isinstance(operation.message, Fetch):
            self._say(FetchSettled(op, operation.num_leading, reason))
            return
        stored = sum(operation.ended.values())
        if reason == "missing":
            reason = "full"
        self._say(PersistDone(op, stored, 0, num_pages - stored, reason))


class VirtualChannels:
    """What ``StorageLink`` needs of ``StorageChannels``."""

    def __init__(self, processes: list[VirtualProcess], rng: Random, duplicate: float) -> None:
        self._processes = processes
        self._seen = [0] * len(processes)
        self._rng = rng
        self._duplicate = duplicate

    def send(self, worker_id: int, message: Command) -> bool:
        process = self._processes[worker_id]
        if not self._seen[worker_id] or process.generation != self._seen[worker_id]:
            return False
        if self._rng.random() < 0.01:
            return False  # the queue to this process is full
        process.inbox.append(message)
        return True

    def poll(self) -> list[tuple[int, Event | ChannelUp | ChannelDown]]:
        arrived: list[tuple[int, Event | ChannelUp | ChannelDown]] = []
        for worker_id, process in enumerate(self._processes):
            events, process.events = process.events, []
            for event, generation in events:
                self._seen[worker_id] = generation
                arrived.append((worker_id, event))
                is_message = not isinstance(event, ChannelUp | ChannelDown)
                if is_message and self._rng.random() < self._duplicate:
                    arrived.append((worker_id, event))
        return arrived

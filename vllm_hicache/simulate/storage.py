"""Virtual storage processes: slow, forgetful, corrupting, hanging, dying, changing.

They answer as real ones do. An operation settles when its work or its deadline ends, and is
released when none of its calls runs any more, which a hung call puts off for ever.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from vllm_hicache.simulate.clock import Clock
from vllm_hicache.simulate.contents import Garbage, Tag, Violation
from vllm_hicache.simulate.script import PAGE_BYTES, StorageTrouble
from vllm_hicache.simulate.workers import Ownership, VirtualWorker
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
    Switching,
    unpack_hashes,
    unpack_slots,
)
from vllm_hicache.tiers import SlotOwner

Key: TypeAlias = tuple[str, bytes, int]
"""(namespace, page hash, worker)."""
Expected: TypeAlias = Callable[[str, bytes], tuple[Tag, ...]]
"""What a page holds under a namespace."""
ChannelEvent: TypeAlias = Event | ChannelUp | ChannelDown


class Stores:
    """All storages of a story by number, and what each has ever held."""

    def __init__(self) -> None:
        self.objects: defaultdict[int, dict[Key, tuple[Tag, ...]]] = defaultdict(dict)
        self.ever: defaultdict[int, set[Key]] = defaultdict(set)

    def put(self, number: int, key: Key, content: tuple[Tag, ...]) -> None:
        self.objects[number][key] = content
        self.ever[number].add(key)

    def lose(self, number: int, rng: Random) -> int:
        """Some objects are gone: evicted, deleted by somebody, expired. Returns how many."""
        objects = self.objects[number]
        lost = [key for key in objects if rng.random() < 0.3]
        for key in lost:
            del objects[key]
        return len(lost)


@dataclass(slots=True)
class _Operation:
    """A fetch or persist inside one process."""

    message: Fetch | Persist
    hashes: list[bytes]
    slots: list[int]
    deadline: float
    num_started: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    """How the calls ended, by page: "ok", "existing" or what was wrong."""
    running: list[int] = field(default_factory=list)
    hung: set[int] = field(default_factory=set)
    is_settled: bool = False
    num_told: int = 0

    @property
    def num_leading(self) -> int:
        leading = 0
        while self.ended.get(leading) == "ok":
            leading += 1
        return leading


class VirtualProcess:
    """The storage process of one worker, one incarnation after the other."""

    def __init__(
        self,
        worker: VirtualWorker,
        clock: Clock,
        rng: Random,
        ownership: Ownership,
        counts: Counter[str],
    ) -> None:
        self.worker = worker
        self.generation = 0
        self.attachment = 1
        """Number of the storage that it serves; 0 while none."""
        self.events: list[tuple[ChannelEvent, int]] = []
        self.inbox: deque[Command] = deque()
        self.trouble = StorageTrouble()
        self._clock = clock
        self._rng = rng
        self._ownership = ownership
        self._counts = counts
        self._operations: dict[int, _Operation] = {}
        self._questions: list[tuple[Exists, float]] = []
        self._num_lives = 0
        self._next_attachment = 1
        self._is_silent = False

    def connect(self, stores: Stores, expected: Expected, trouble: StorageTrouble) -> None:
        """What it serves, and the truth that it compares with."""
        self._stores, self._expected, self.trouble = stores, expected, trouble

    @property
    def is_quiet(self) -> bool:
        is_working = self.inbox or self._operations or self._questions
        return bool(self.generation) and not is_working and not self.is_leaving

    # Lives -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Say hello: no thread of an earlier life touches a slot any more."""
        self._operations.clear()
        self._questions.clear()
        self.inbox.clear()
        self._is_silent = False
        self._num_lives += 1
        self.attachment = self._next_attachment
        self.generation = self._num_lives
        self._say(ChannelUp(self._num_lives, self.attachment))

    def die(self) -> None:
        """The connection breaks. Reads and writes that have started may go on until ``start``."""
        self.generation = 0
        self.events.append((ChannelDown(), 0))
        self.inbox.clear()

    def switch(self, attachment: int) -> None:
        """Leave soon, so that a successor serves another storage, or none."""
        self._next_attachment = attachment

    @property
    def is_leaving(self) -> bool:
        return self._next_attachment != self.attachment

    def tick(self) -> None:
        """One thing happens."""
        rng, trouble = self._rng, self.trouble
        if not self.generation:
            self.start() if rng.random() < 0.3 else self._work_on()
        elif self._is_silent:
            self._stay_silent()
        elif self.is_leaving and rng.random() < 0.3:
            self._say(Switching())
            self.die()
        elif rng.random() < trouble.death:
            self._counts["storage killed"] += 1
            self.die()
            if rng.random() < 0.5:
                self.start()  # so soon that one poll brings both
        elif rng.random() < trouble.silence:
            self._counts["storage silent"] += 1
            self._is_silent = True
        elif self.inbox and rng.random() < 0.7:
            self._receive(self.inbox.popleft())
        elif rng.random() < 0.01:
            self._say(Stats({"objects_read": float(self._num_lives)}))
        else:
            self._work_on()

    def _stay_silent(self) -> None:
        chance = self._rng.random()
        if chance < 0.1:
            self._counts["storage killed"] += 1
            self.die()
        elif chance < 0.25 or not self.trouble.silence:
            self._is_silent = False

    def _say(self, event: Event | ChannelUp) -> None:
        if self.generation:
            self.events.append((event, self.generation))

    # Messages ----------------------------------------------------------------------------------

    def _receive(self, message: Command) -> None:
        now = self._clock.now
        if isinstance(message, Exists):
            if self._rng.random() < self.trouble.hang:
                self._counts["question hung"] += 1
                self._questions.append((message, now + message.deadline_s))
            else:
                self._answer(message)
        elif isinstance(message, Fetch | Persist):
            self._begin(message, now + message.deadline_s)
        elif isinstance(message, Cancel):
            operation = self._operations.get(message.op)
            if operation is not None and not operation.is_settled:
                self._settle(operation, "cancelled")
            for question, _ in [q for q in self._questions if q[0].op == message.op]:
                self._say(ExistsResult(question.op, 0, ok=False, reason="cancelled"))
            self._questions = [q for q in self._questions if q[0].op != message.op]

    def _answer(self, message: Exists) -> None:
        if not self.attachment or self._rng.random() < self.trouble.refusal:
            self._counts["question refused"] += 1
            self._say(ExistsResult(message.op, 0, ok=False, reason="unavailable"))
            return
        leading = 0
        objects = self._stores.objects[self.attachment]
        for page_hash in unpack_hashes(message.hashes):
            if (message.namespace, page_hash, self.worker.worker_id) not in objects:
                break
            leading += 1
        self._say(ExistsResult(message.op, leading, ok=True))

    def _begin(self, message: Fetch | Persist, deadline: float) -> None:
        hashes, slots = unpack_hashes(message.hashes), unpack_slots(message.slots)
        if message.op in self._operations:
            raise Violation(f"operation {message.op} was sent twice to one process")
        operation = _Operation(message, hashes, slots, deadline)
        self._operations[message.op] = operation
        if not self.attachment:
            self._settle(operation, "unavailable")
        elif isinstance(message, Persist) and self._rng.random() < self.trouble.refusal:
            self._counts["write refused"] += 1
            self._settle(
                operation, self._rng.choice(("unavailable", "backlog", "backlog", "backlog"))
            )

    # Work --------------------------------------------------------------------------------------

    def _work_on(self) -> None:
        if self._questions:
            self._give_up_questions()
        if not self._operations:
            return
        rng = self._rng
        operation = rng.choice(list(self._operations.values()))
        if not operation.is_settled and self._clock.now >= operation.deadline:
            self._counts["deadline passed"] += 1
            self._settle(operation, "deadline")
        if operation.hung and not (self.trouble.hang and self.generation):
            operation.hung.clear()
        self._go_on(operation)
        if not operation.is_settled:
            self._look(operation)

    def _give_up_questions(self) -> None:
        now = self._clock.now
        for question, deadline in self._questions:
            if now >= deadline:
                self._say(ExistsResult(question.op, 0, ok=False, reason="deadline"))
        self._questions = [q for q in self._questions if now < q[1]]

    def _go_on(self, operation: _Operation) -> None:
        """A call of the operation begins or ends, or all have ended."""
        rng = self._rng
        runs_calls = len(operation.running) > len(operation.hung)
        if runs_calls and (operation.is_settled or rng.random() < 0.6):
            self._end_call(operation)
        elif operation.is_settled and not operation.running:
            self._release(operation)
        elif not operation.is_settled and operation.num_started < len(operation.hashes):
            self._start_call(operation)
        elif operation.hung and rng.random() < 0.1:
            operation.hung.clear()  # it came back after all

    def _start_call(self, operation: _Operation) -> None:
        page = operation.num_started
        operation.num_started += 1
        operation.running.append(page)
        if self._rng.random() < self.trouble.hang:
            self._counts["call hung"] += 1
            operation.hung.add(page)
        if isinstance(operation.message, Fetch):
            width = len(self.worker.host[0])
            torn: list[Tag] = [Garbage(f"fetch {operation.message.op} runs")] * width
            self.worker.write_slot(operation.slots[page], torn)

    def _end_call(self, operation: _Operation) -> None:
        able = [page for page in operation.running if page not in operation.hung]
        page = self._rng.choice(able)
        self._counts["calls reordered"] += page != operation.running[0]
        operation.running.remove(page)
        read_or_write = self._read if isinstance(operation.message, Fetch) else self._write
        operation.ended[page] = read_or_write(operation, page)

    def _key(self, operation: _Operation, page: int) -> Key:
        return (operation.message.namespace, operation.hashes[page], self.worker.worker_id)

    def _read(self, operation: _Operation, page: int) -> str:
        content = self._stores.objects[self.attachment].get(self._key(operation, page))
        if content is None or self._rng.random() < self.trouble.missing:
            self._counts["object missing"] += 1
            return "missing"
        if self._rng.random() < self.trouble.corrupt:
            self._counts["object corrupt"] += 1
            return "corrupt"
        self.worker.write_slot(operation.slots[page], list(content))
        return "ok"

    def _write(self, operation: _Operation, page: int) -> str:
        slot, key = operation.slots[page], self._key(operation, page)
        content = tuple(self.worker.host[slot])
        if self._ownership.slot_owner(slot) is not SlotOwner.INDEX:
            raise Violation(f"worker {self.worker.worker_id}: a persist reads slot {slot}")
        if content != self._expected(key[0], key[1]):
            raise Violation(
                f"worker {self.worker.worker_id} persists {content} from slot {slot}, "
                f"the page holds {self._expected(key[0], key[1])}"
            )
        if key in self._stores.objects[self.attachment]:
            return "existing"
        if self._rng.random() < self.trouble.full:
            self._counts["storage full"] += 1
            return "full"
        self._stores.put(self.attachment, key, content)
        return "ok"

    # Answers -----------------------------------------------------------------------------------

    def _look(self, operation: _Operation) -> None:
        """Tell what is news; settle when there is nothing more to come."""
        outcomes = operation.ended.values()
        if isinstance(operation.message, Persist):
            if "full" in outcomes and not operation.running:
                self._settle(operation, "full")
            elif len(operation.ended) == len(operation.hashes):
                self._settle(operation, "complete")
            return
        leading = operation.num_leading
        how = operation.ended.get(leading)
        if leading == len(operation.hashes):
            self._settle(operation, "complete")
        elif how is not None:
            self._settle(operation, how)
        elif leading > operation.num_told and self._rng.random() < 0.7:
            operation.num_told = leading
            self._say(FetchProgress(operation.message.op, leading))

    def _settle(self, operation: _Operation, reason: str) -> None:
        operation.is_settled = True
        op = operation.message.op
        if isinstance(operation.message, Fetch):
            self._say(FetchSettled(op, operation.num_leading, reason))  # type: ignore[arg-type]
            return
        how = Counter(operation.ended.values())
        stored, existing = how["ok"], how["existing"]
        dropped = len(operation.hashes) - stored - existing
        num_bytes = stored * PAGE_BYTES
        self._say(PersistDone(op, stored, existing, dropped, reason, num_bytes))  # type: ignore[arg-type]

    def _release(self, operation: _Operation) -> None:
        op = operation.message.op
        del self._operations[op]
        is_fetch = isinstance(operation.message, Fetch)
        self._say(FetchReleased(op) if is_fetch else PersistReleased(op))

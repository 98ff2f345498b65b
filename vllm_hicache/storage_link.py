"""The scheduler's view of all storage processes as one partner.

An operation goes to every worker's process under one number, or to none. Its answers are joined
here: the minimum over the workers, told once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import Command, Describe, Event


class Channels(Protocol):
    """What this module needs of ``StorageChannels``."""

    def send(self, worker_id: int, message: Command) -> bool:
        """Queue a message; False while the process is away."""

    def poll(self) -> list[tuple[int, Event | ChannelUp | ChannelDown]]:
        """What arrived since the last call, in order per worker."""


@dataclass(slots=True)
class WorldAnswer:
    """One operation's answers from every worker."""

    world_size: int
    progress: list[int] = field(default_factory=list)
    settled: list[str | None] = field(default_factory=list)
    released: set[int] = field(default_factory=set)
    parts: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = [0] * self.world_size
        self.settled = [None] * self.world_size

    @property
    def agreed(self) -> int:
        """Pages that are done on every worker."""
        return min(self.progress)

    @property
    def is_settled(self) -> bool:
        """Whether every worker has given its final number."""
        return None not in self.settled

    @property
    def is_released(self) -> bool:
        """Whether no worker's process touches the slots any more."""
        return len(self.released) == self.world_size

    @property
    def reason(self) -> str:
        """The reason of the worker that fell shortest."""
        shortest = self.progress.index(min(self.progress))
        return self.settled[shortest] or "cancelled"

    def note_parts(self, worker_id: int, parts: bytes) -> None:
        """What the worker's leading pages have besides what is required; its first word counts."""
        if parts:
            self.parts.setdefault(worker_id, parts)

    def agreed_parts(self, num_pages: int) -> list[int]:
        """For each of so many leading pages, what it has on every worker. Of which a worker has
        said nothing counts as absent."""
        if len(self.parts) < self.world_size:
            return [0] * num_pages
        common = -1
        for parts in self.parts.values():
            common &= int.from_bytes(parts[:num_pages], "little")
        return list(common.to_bytes(num_pages, "little"))

    def advance(self, worker_id: int, pages: int) -> bool:
        """Note progress; False after the worker's final number, which nothing changes."""
        if self.settled[worker_id] is not None:
            return False
        self.progress[worker_id] = max(self.progress[worker_id], pages)
        return True

    def settle(self, worker_id: int, reason: str) -> bool:
        """The worker's progress is final; False where it was before."""
        if self.settled[worker_id] is not None:
            return False
        self.settled[worker_id] = reason
        return True


class StorageLink:
    """Numbers operations and sends them to all workers."""

    def __init__(
        self, channels: Channels, world_size: int, describe: Describe | None = None
    ) -> None:
        self.world_size = world_size
        self._describe = describe  # said to every process of the first worker, before all else
        self._channels = channels
        self._numbers = count(1)
        self._up: set[int] = set()
        self._reached: set[int] = set()
        self._attachments: dict[int, int] = {}
        self.grace_s = 0.0
        """What a drain may take, by the options of the storage that is attached."""
        self._incarnations: dict[int, str] = {}

    @property
    def is_up(self) -> bool:
        """Whether every worker's storage process can be reached and has a storage."""
        return len(self._up) == self.world_size

    @property
    def is_reached(self) -> bool:
        """Whether every worker's storage process can be reached, with a storage or without."""
        return len(self._reached) == self.world_size

    def note_storage(self, worker_id: int, up: ChannelUp) -> bool:
        """Note which storage this worker has now; whether that is a change.

        What was stored in the former one need not be in this one.
        """
        before = self._attachments.get(worker_id, up.attachment)
        self._attachments[worker_id] = up.attachment
        return before != up.attachment

    def incarnation(self, worker_id: int) -> str:
        """Which process of this worker spoke last; "" before the first one."""
        return self._incarnations.get(worker_id, "")

    def next_number(self) -> int:
        return next(self._numbers)

    def broadcast(self, message: Command, answer: WorldAnswer | None = None) -> bool:
        """Send to every worker; False, and nothing sent, while one is away.

        ``answer`` is told of a worker whose channel broke or is full at this moment: its process
        never hears of the operation.
        """
        if not self.is_up:
            return False
        for worker_id in range(self.world_size):
            if not self._channels.send(worker_id, message) and answer is not None:
                answer.settle(worker_id, "unavailable")
                answer.released.add(worker_id)
        return True

    def poll(self) -> Iterator[tuple[int, Event | ChannelUp | ChannelDown]]:
        """What arrived. Ups and downs are noted here and passed on.

        A process that died and came back within one batch takes messages already, while its
        predecessor's operations are not given up yet. It counts as away until the caller has
        seen both, or an operation sent to it would be taken for its predecessor's.
        """
        events = self._channels.poll()
        last_down = {
            worker_id: i
            for i, (worker_id, event) in enumerate(events)
            if isinstance(event, ChannelDown)
        }
        self._up -= last_down.keys()
        self._reached -= last_down.keys()
        for i, (worker_id, event) in enumerate(events):
            if isinstance(event, ChannelUp):
                self._incarnations[worker_id] = str(event.incarnation)
                if worker_id == 0 and self._describe is not None:
                    self._channels.send(0, self._describe)
                if i > last_down.get(worker_id, -1):
                    self._reached.add(worker_id)
                    if event.attachment:
                        self._up.add(worker_id)
            yield worker_id, event

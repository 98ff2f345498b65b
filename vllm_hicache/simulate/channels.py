"""Channels to virtual storage processes, with what a socket may do to messages."""

from collections import Counter
from random import Random

from vllm_hicache.simulate.storage import ChannelEvent, VirtualProcess
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import Command


class VirtualChannels:
    """What ``StorageLink`` needs of ``StorageChannels``.

    A message reaches the connection that the caller has seen come up, and one poll may bring the
    end of a process and the start of its successor.
    """

    def __init__(self, processes: list[VirtualProcess], rng: Random, counts: Counter[str]) -> None:
        self.attachments = [process.attachment for process in processes]
        """Storages as the caller knows them."""
        self._processes = processes
        self._seen = [0] * len(processes)
        self._rng = rng
        self._counts = counts

    def send(self, worker_id: int, message: Command) -> bool:
        process = self._processes[worker_id]
        if not self._seen[worker_id] or process.generation != self._seen[worker_id]:
            self._counts["message lost"] += 1
            return False
        if self._rng.random() < process.trouble.unsent:
            self._counts["message unsent"] += 1
            return False
        process.inbox.append(message)
        return True

    def poll(self) -> list[tuple[int, ChannelEvent]]:
        arrived: list[tuple[int, ChannelEvent]] = []
        for worker_id, process in enumerate(self._processes):
            if not process.events:
                continue
            events, process.events = process.events, []
            for event, generation in events:
                self._seen[worker_id] = generation
                arrived.append((worker_id, event))
                if isinstance(event, ChannelUp):
                    self.attachments[worker_id] = event.attachment
                elif not isinstance(event, ChannelDown):
                    self._repeat(worker_id, event, arrived)
        return arrived

    def _repeat(
        self, worker_id: int, event: ChannelEvent, arrived: list[tuple[int, ChannelEvent]]
    ) -> None:
        if self._rng.random() < self._processes[worker_id].trouble.duplicate:
            self._counts["message repeated"] += 1
            arrived.append((worker_id, event))

"""A process that only saves: a host pool, its storage process, and no engine. Ends when killed.

`python saving_process.py FOLDER FIRST_PAGE` stores pages FIRST_PAGE, FIRST_PAGE + 1, ... one after
the other in FOLDER and prints the number of the last page of which storage said that it is stored.
"""

import mmap
import os
import random
import sys
import time
from hashlib import sha256

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage_channel import ChannelUp, StorageChannels
from vllm_hicache.storage_messages import Persist, PersistDone, PersistReleased
from vllm_hicache.storage_process_config import Section, StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess

NAMESPACE = "hc1-0123456789abcdef"
NUM_SLOTS = 8
SHARD_BYTES = 1 << 20
SLOT_BYTES = 2 * SHARD_BYTES
SHARDS = tuple(Shard(LayerSpan(0, 2), i, i * SHARD_BYTES, SHARD_BYTES) for i in range(2))
PERSIST_TIMEOUT_S = 30.0


def page_hash(page: int) -> bytes:
    return sha256(page.to_bytes(8, "little")).digest()


def page_content(page: int) -> bytes:
    """What the page must hold wherever it is read: equal everywhere, unlike any other page's."""
    return random.Random(page).randbytes(SLOT_BYTES)


def storage_config(folder: str) -> StorageProcessConfig:
    config = HiCacheConfig.parse({"storage": {"url": f"file://{folder}", "min_free": 0}}, env={})
    if config.storage is None:
        raise SystemExit("no storage")
    return StorageProcessConfig(
        worker_id=0,
        num_slots=NUM_SLOTS,
        sections=(Section(0, SLOT_BYTES, SHARDS, SHARDS),),
        storage=config.storage,
    )


class Saver:
    """Sends one page after the other, as many at once as there are slots."""

    def __init__(self, folder: str, first_page: int) -> None:
        self._pool_fd = os.memfd_create("pool")
        os.truncate(self._pool_fd, NUM_SLOTS * SLOT_BYTES)
        self._pool = mmap.mmap(self._pool_fd, NUM_SLOTS * SLOT_BYTES)
        self.process = StorageProcess(storage_config(folder), self._pool_fd)
        self._channels = StorageChannels([self.process.start()], first_backoff_s=0.01)
        self._page = first_page
        self._slots: dict[int, int] = {}  # page -> slot
        self._free = list(range(NUM_SLOTS))

    def run(self) -> None:
        while True:
            for _, event in self._channels.poll():
                if isinstance(event, ChannelUp):
                    _say(f"up {self.process.pid}")
                    self._fill()
                elif isinstance(event, PersistDone):
                    _say(f"stored {event.op} {event.num_stored}")
                elif isinstance(event, PersistReleased):
                    self._free.append(self._slots.pop(event.op))
                    self._fill()
            time.sleep(0.0002)

    def _fill(self) -> None:
        while self._free:
            page, slot = self._page, self._free.pop()
            self._page, self._slots[page] = page + 1, slot
            self._pool[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = page_content(page)
            slots = slot.to_bytes(4, "little")
            message = Persist(page, NAMESPACE, page_hash(page), slots, PERSIST_TIMEOUT_S)
            self._channels.send(0, message)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Saver(sys.argv[1], int(sys.argv[2])).run()

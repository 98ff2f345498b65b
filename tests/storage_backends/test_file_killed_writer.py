"""A writer killed at any moment leaves whole objects, and nothing else after the next open."""

import hashlib
import random
import subprocess
import sys
import time

import pytest

from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import FetchOutcome, ShardObject
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_backends.file import FileBackend
from vllm_hicache.storage_backends.file_capacity import charged_bytes

pytestmark = pytest.mark.services

NUM_BYTES = 300_000
CAPACITY = 20_000_000

WRITER = """
import asyncio, hashlib, sys
from pathlib import Path
from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import ShardObject
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_backends.file import FileBackend

async def main(root, capacity, num_bytes, first):
    storage = CheckedStorage(FileBackend(Path(root), capacity_bytes=capacity))
    await storage.open()
    shard = Shard(LayerSpan(0, 4), 0, 0, num_bytes)
    print("saving", flush=True)
    while True:
        items = []
        for number in range(first, first + 8):
            page_hash = hashlib.sha256(b"%d" % number).digest()
            payload = memoryview(page_hash * (num_bytes // 32))
            name = shard_name(page_hash, "hc1-0123456789abcdef", shard)
            items.append(ShardObject(name, "hc1-0123456789abcdef", page_hash, shard, payload))
        await storage.persist(items)
        first += 8

root, *numbers = sys.argv[1:]
asyncio.run(main(root, *map(int, numbers)))
"""


MORE_KILLS = 60
"""Until one kill has met a writer in the middle of a file and another one after a whole file."""


def kill_while_saving(root, first: int, delay_s: float) -> None:
    numbers = [str(number) for number in (CAPACITY, NUM_BYTES, first)]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, root, *numbers], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"saving\n"
        time.sleep(delay_s)
        child.kill()


def item_of(number: int) -> ShardObject:
    page_hash = hashlib.sha256(b"%d" % number).digest()
    shard = Shard(LayerSpan(0, 4), 0, 0, NUM_BYTES)
    name = shard_name(page_hash, "hc1-0123456789abcdef", shard)
    payload = memoryview(bytearray(NUM_BYTES))
    return ShardObject(name, "hc1-0123456789abcdef", page_hash, shard, payload)


@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=pytest.mark.full)])
async def test_killed_writers_leave_no_wrong_object_and_no_temporary_file(tmp_path, num_kills):
    dice = random.Random(num_kills)
    num_found = num_interrupted = 0
    for kill in range(num_kills + MORE_KILLS):
        if kill >= num_kills and num_found and num_interrupted:
            break
        kill_while_saving(tmp_path, 1000 * kill, dice.uniform(0.001, 0.05))
        num_interrupted += bool(list(tmp_path.rglob("*.tmp")))
        storage = CheckedStorage(FileBackend(tmp_path, capacity_bytes=CAPACITY))
        await storage.open()
        try:
            assert list(tmp_path.rglob("*.tmp")) == []
            items = [item_of(number) for number in range(1000 * kill, 1000 * kill + 100)]
            for item, outcome in zip(items, await storage.fetch(items), strict=True):
                assert outcome is not FetchOutcome.CORRUPT
                if outcome is FetchOutcome.OK:
                    num_found += 1
                    assert item.payload == item.page_hash * (NUM_BYTES // 32)
            sizes = [path.stat().st_size for path in tmp_path.glob("???/*")]
            assert storage.stats()["used_bytes_now"] == sum(map(charged_bytes, sizes)) <= CAPACITY
            assert storage.stats()["corrupt_objects"] == 0
        finally:
            await storage.close()
    assert num_found > 0
    assert num_interrupted > 0

"""Processes that only save are killed in the middle, again and again: what is visible is right."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from saving_process import (
    NAMESPACE,
    SHARD_BYTES,
    SHARDS,
    page_content,
    page_hash,
    storage_config,
)

from vllm_hicache.keys import shard_name
from vllm_hicache.storage_backends import file_names
from vllm_hicache.storage_backends.envelope import CheckedStorage, FetchOutcome, ShardObject
from vllm_hicache.storage_backends.registry import open_backend

pytestmark = pytest.mark.services

SAVER = Path(__file__).resolve().parent / "support" / "saving_process.py"
PAGES_PER_LIFE = 10_000
SECONDS_TO_LIVE = 0.25


def _kill_while_saving(store: Path, first_page: int, life_s: float) -> list[int]:
    """One life of a saver: the pages that it was told are stored."""
    saver = subprocess.Popen(
        [sys.executable, "-P", SAVER, store, str(first_page)], stdout=subprocess.PIPE, text=True
    )
    with saver, saver.stdout:
        word, storage_pid = saver.stdout.readline().split()
        assert word == "up"
        time.sleep(life_s)
        os.kill(int(storage_pid), signal.SIGKILL)
        saver.kill()
        lines = [line.split() for line in saver.stdout if line.endswith("\n")]
    return [int(line[1]) for line in lines if line[0] == "stored" and int(line[2]) == 1]


async def _assert_right(store: Path, names: dict[str, tuple[int, int]]) -> int:
    """Every object that is visible holds exactly its own page; how many there are."""
    config = storage_config(str(store)).storage
    storage = CheckedStorage(open_backend(config.url, config))
    await storage.open()
    visible = [path.name for path in store.rglob("*") if file_names.is_object(path.name)]
    assert set(visible) <= names.keys()
    payload = memoryview(bytearray(SHARD_BYTES))
    for name in visible:
        page, index = names[name]
        item = ShardObject(name, NAMESPACE, page_hash(page), SHARDS[index], payload)
        assert await storage.fetch([item]) == [FetchOutcome.OK]
        start = SHARDS[index].offset
        assert payload == page_content(page)[start : start + SHARD_BYTES]
    await storage.close()
    return len(visible)


def _leftovers(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if file_names.is_temporary(path.name)]


@pytest.mark.parametrize("num_lives", [5, pytest.param(50, marks=pytest.mark.full)])
async def test_killed_while_saving_again_and_again(num_lives, tmp_path):
    store, chance = tmp_path / "store", random.Random(num_lives)
    names: dict[str, tuple[int, int]] = {}
    told: list[str] = []
    num_leftovers = 0
    for life in range(num_lives):
        first = life * PAGES_PER_LIFE
        stored = _kill_while_saving(store, first, chance.uniform(0.0, SECONDS_TO_LIVE))
        # At most these pages were begun: pages are sent in order, eight at once.
        for page in range(first, max([first, *stored]) + 64):
            for index, shard in enumerate(SHARDS):
                names[shard_name(page_hash(page), NAMESPACE, shard)] = (page, index)
        told += [
            shard_name(page_hash(page), NAMESPACE, shard) for page in stored for shard in SHARDS
        ]
        num_leftovers += len(_leftovers(store))
    num_visible = await _assert_right(store, names)
    assert num_visible >= num_lives
    # What storage said is stored is there, however its process ended.
    assert set(told) <= {path.name for path in store.rglob("*")}
    assert _leftovers(store) == []  # opening has removed what dead writers left
    if num_lives >= 50:
        assert num_leftovers > 0  # so that there was something to remove

"""LMCache keeps its chunks in one of our stores: one process stores four, a second one reads them.

In an environment with LMCache (docs/lmcache.md): python examples/lmcache_bridge.py [URL]
You see equal bytes in the second process and, without URL, that a damaged chunk is a miss.
A server of LMCache takes the same adapter: lmcache server ... --l2-adapter 'JSON as below'
"""

import json
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 256, 256])], [torch.bfloat16])
RANK = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
KEYS = [ObjectKey(bytes([i]) * 32, "org/model", RANK) for i in range(4)]
CHUNKS = torch.randn(4, 2, 4, 256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def storage(url: str) -> StorageManager:
    adapter = {
        "type": "plugin",
        "module_path": "vllm_hicache.connectors.lmcache_l2",
        "class_name": "HiCacheL2Adapter",
        "adapter_params": {"url": url, "exists_timeout_s": 5},
    }
    sizes = ["--l1-size-gb", "0.25", "--eviction-policy", "LRU"]
    return StorageManager(parse_args([*sizes, "--l2-adapter", json.dumps(adapter)]))


def store(url: str) -> None:
    manager = storage(url)
    for key, thing in manager.reserve_write(KEYS, LAYOUT).items():
        thing.tensor.copy_(CHUNKS[KEYS.index(key)])
    manager.finish_write(KEYS)
    adapter = manager.l2_adapters()[0][1]
    while num_in_store(adapter.report_status()) < len(KEYS):
        time.sleep(0.01)
    manager.close()


def num_in_store(status: dict) -> float:
    return status["chunks_stored"] + status["chunks_existing"]


def load(url: str) -> None:
    manager = storage(url)
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, LAYOUT)]))
    manager.wait_prefetch_status(handle, 30)
    num_hits = manager.query_prefetch_status(handle).l2_hit_count
    print(f"{num_hits} of 4 chunks come from the store", flush=True)
    if num_hits:
        with manager.read_prefetched_results(KEYS[:num_hits]) as things:
            is_equal = torch.equal(torch.stack([t.tensor for t in things]), CHUNKS[:num_hits])
            print(f"they are what was stored: {is_equal}", flush=True)
        manager.finish_read_prefetched(KEYS[:num_hits])
    manager.close()


def in_a_new_process(step, url: str) -> None:
    process = get_context("spawn").Process(target=step, args=(url,))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{step.__name__} failed")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/store"
        in_a_new_process(store, url)
        in_a_new_process(load, url)
        damaged = next(iter(sorted(Path(folder).glob("store/*/*_lmc1-*"))), None)
        if damaged is not None:
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
            in_a_new_process(load, url)
            print(f"the damaged chunk is gone: {not damaged.exists()}")


if __name__ == "__main__":
    main()

"""Runs in LMCache's environment: the storage of its server, driven by one JSON request a line.

First {"do": "open", "adapter": {...}}, then {"do": "store", "chunks": [1, 2]} and so on; each
answer is one JSON line. A chunk has the same bytes in every process.
"""

import argparse
import hashlib
import json
import sys
import time

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Session:
    """The storage of one server and what its engines would do with it."""

    def __init__(self, adapter, model="org/model", dtype="bfloat16", tokens=256):
        self.model = model
        self.layout = MemoryLayoutDesc([torch.Size([2, 4, tokens, 256])], [DTYPES[dtype]])
        memory = L1MemoryManagerConfig(size_in_bytes=1 << 28, use_lazy=False)
        arguments = argparse.Namespace(l2_adapter=[adapter])
        self.storage = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=parse_args_to_l2_adapters_config(arguments),
            )
        )
        self.adapter = self.storage.l2_adapters()[0][1]

    def keys(self, chunks):
        rank = ObjectKey.ComputeKVRank(2, 1, 2, 1)
        return [
            ObjectKey(hashlib.blake2b(b"%d" % n, digest_size=32).digest(), self.model, rank)
            for n in chunks
        ]

    def content(self, chunk):
        shape, dtype = self.layout.shapes[0], self.layout.dtypes[0]
        generator = torch.Generator().manual_seed(chunk)
        return torch.randn(shape, generator=generator).to(dtype)

    def store(self, chunks):
        before = self.adapter.report_status()
        reserved = self.storage.reserve_write(self.keys(chunks), self.layout)
        for chunk, key in zip(chunks, self.keys(chunks), strict=True):
            if key in reserved:  # the others are in memory and on their way already
                reserved[key].tensor.copy_(self.content(chunk))
        self.storage.finish_write(list(reserved))
        started = time.monotonic()
        while time.monotonic() < started + 60:
            status = self.adapter.report_status()
            counts = [
                status[name] - before[name]
                for name in (
                    "chunks_stored",
                    "chunks_existing",
                    "chunks_over_backlog",
                    "chunks_unanswered",
                )
            ]
            if sum(counts) == len(reserved):
                break
            time.sleep(0.01)
        return {"stored": counts[0], "existing": counts[1], "failed": sum(counts[2:])}

    def load(self, chunks):
        keys = self.keys(chunks)
        row = GroupedObjectKeys(keys, 0, self.layout)
        started = time.monotonic()
        handle = self.storage.submit_prefetch_task(PrefetchTaskSpec([row]))
        assert self.storage.wait_prefetch_status(handle, 60)
        seconds = time.monotonic() - started
        result = self.storage.query_prefetch_status(handle)
        places = result.hit_cells[0].get_indices_list()
        hits = [chunks[i] for i in places]
        equal = []
        if hits:
            with self.storage.read_prefetched_results([keys[i] for i in places]) as objects:
                for chunk, thing in zip(hits, objects, strict=True):
                    same_bytes = torch.equal(
                        thing.tensor.view(torch.uint8), self.content(chunk).view(torch.uint8)
                    )
                    equal.append(same_bytes and thing.get_dtype() == self.layout.dtypes[0])
            self.storage.finish_read_prefetched([keys[i] for i in places])
        return {
            "hits": hits,
            "from_store": result.l2_hit_count,
            "equal": all(equal),
            "seconds": seconds,
        }

    def clear(self, chunks):
        self.storage.clear(force=True)
        return {}

    def delete(self, chunks):
        self.adapter.delete(self.keys(chunks))
        return {}

    def wait_until_healthy(self, chunks):
        while not self.adapter.report_status()["is_healthy"]:
            time.sleep(0.05)
        return {}

    def status(self, chunks):
        return self.adapter.report_status()


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # LMCache logs to standard output
    session = None
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        answer = {}
        if verb == "open":
            try:
                session = Session(**request)
            except ValueError as error:
                answer = {"refused": str(error)}
        elif verb == "close":
            session.storage.close()
        else:
            answer = getattr(session, verb)(request.get("chunks", []))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

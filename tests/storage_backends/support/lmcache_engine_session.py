"""Runs in LMCache's environment: its in-process engine, driven by one JSON request a line.

First {"do": "open", "options": {...}}, then {"do": "store", "prompt": 1, "tokens": 600} and so on;
each answer is one JSON line. A prompt has the same KV in every process.
"""

import json
import sys
import time

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

NUM_LAYERS, KV, CHUNK, HEADS, HEAD_SIZE = 4, 2, 256, 2, 128
DTYPE = torch.bfloat16


class CpuKv(GPUConnectorInterface):
    """The KV of one prompt in plain host memory: [2, layers, tokens, hidden]."""

    def __init__(self):
        self.kv = None

    def to_gpu(self, memory_obj, start, end, **kwargs):
        self.kv[:, :, start:end] = memory_obj.tensor

    def from_gpu(self, memory_obj, start, end, **kwargs):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for thing, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(thing, start, end)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for thing, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(thing, start, end)

    def get_shape(self, num_tokens):
        return torch.Size([KV, NUM_LAYERS, num_tokens, HEADS * HEAD_SIZE])


class Session:
    """One engine and what vLLM would ask of it."""

    count = 0

    def __init__(self, options):
        Session.count += 1
        self.name = f"engine-{Session.count}"
        place = "storage_plugin.hicache."
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            local_cpu=False,
            max_local_cpu_size=0.25,
            storage_plugins=["hicache"],
            extra_config={
                f"{place}module_path": "vllm_hicache.connectors.lmcache_plugin",
                f"{place}class_name": "HiCacheStoragePlugin",
                **{f"hicache.{name}": value for name, value in options.items()},
            },
        )
        metadata = LMCacheMetadata(
            "org/model", 1, 1, 0, 0, DTYPE, (NUM_LAYERS, KV, CHUNK, HEADS, HEAD_SIZE)
        )
        self.connector = CpuKv()
        self.engine = LMCacheEngineBuilder.get_or_create(
            self.name, config, metadata, self.connector, lambda *_: None, lambda *_: None
        )
        self.engine.post_init()

    @property
    def plugin(self):
        return self.engine.storage_manager.storage_backends.get("hicache")

    def content(self, prompt, tokens):
        generator = torch.Generator().manual_seed(prompt)
        shape = (tokens, KV, NUM_LAYERS, HEADS * HEAD_SIZE)
        return torch.randn(shape, generator=generator).to(DTYPE).permute(1, 2, 0, 3).contiguous()

    def ids(self, prompt, tokens):
        return [prompt * 1_000_000 + i for i in range(tokens)]

    def store(self, prompt, tokens, waits=True):
        before = self.num_settled()
        self.connector.kv = self.content(prompt, tokens)
        self.engine.store(tokens=self.ids(prompt, tokens))
        while waits and self.num_settled() < before + tokens // CHUNK:
            time.sleep(0.01)
        return {"stored": self.plugin.stats()["chunks_stored"]}

    def num_settled(self):
        stats = self.plugin.stats()
        kinds = ("stored", "existing", "over_backlog", "unanswered")
        return sum(stats[f"chunks_{kind}"] for kind in kinds)

    def load(self, prompt, tokens):
        self.connector.kv = torch.zeros_like(self.content(prompt, tokens))
        started = time.monotonic()
        ids = self.ids(prompt, tokens)
        found = self.engine.lookup(ids)
        mask = self.engine.retrieve(ids)
        seconds = time.monotonic() - started
        num_hits = int(mask.sum())
        wanted = self.content(prompt, tokens)
        wanted[:, :, num_hits:] = 0
        equal = torch.equal(self.connector.kv.view(torch.int16), wanted.view(torch.int16))
        return {"found": found, "hits": num_hits, "equal": equal, "seconds": seconds}

    def status(self):
        return {"backends": list(self.engine.storage_manager.storage_backends)} | (
            self.plugin.stats() if self.plugin else {}
        )

    def close(self):
        LMCacheEngineBuilder.destroy(self.name)
        return {}


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # LMCache logs to standard output
    session = None
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        answer = {}
        if verb == "open":
            session = Session(**request)
        else:
            answer = getattr(session, verb)(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

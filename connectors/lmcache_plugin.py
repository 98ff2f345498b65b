"""LMCache inside an engine keeps its chunks in our stores: a backend for ``storage_plugins``.

The only file for LMCache's in-process mode; imported by LMCache alone, in its environment.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import FetchOutcome, WriteOutcome
from vllm_hicache.storage_backends.chunk_store import ChunkStore
from vllm_hicache.storage_backends.lmcache_names import ChunkLayout, ChunkNames
from vllm_hicache.storage_backends.lmcache_options import BridgeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from vllm_hicache.storage import ShardObject

logger = logging.getLogger(__name__)

_PREFIX = "hicache."
_IS_STORED = (WriteOutcome.STORED, WriteOutcome.EXISTS)


class HiCacheStoragePlugin(StoragePluginInterface):
    """Verified objects on files, Redis or S3 behind LMCache's host memory.

    Options are ``extra_config`` keys that begin with ``hicache.``. Only whole chunks are kept: a
    key does not tell how many tokens a shorter one has. Raises ConfigError for what cannot be
    right, which LMCache logs before it goes on without this backend.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        local_cpu_backend: LocalCPUBackend | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config.use_layerwise:
            raise ConfigError("the bridge keeps whole chunks; it needs use_layerwise: false")
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in (config.extra_config or {}).items()
            if name.startswith(_PREFIX)
        }
        options = BridgeOptions.parse(given)
        self._layout_text = options.layout
        self._names = ChunkNames("in-process", options.cache_id)
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self._backlog_bytes = options.storage.write_backlog_bytes
        self._saving: set[CacheEngineKey] = set()
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._store = ChunkStore(options.storage, load_timeout_s=options.load_timeout_s)
        logger.info("LMCache chunks are kept in %s", options.storage)

    def __str__(self) -> str:
        return type(self).__name__

    # Questions -------------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether the chunk is stored. Nothing is pinned: it may be gone when it is wanted."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many leading chunks are stored."""
        return _num_leading(self._store.find(self._object_names(keys)).result())

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """As ``batched_contains``."""
        found = await asyncio.wrap_future(self._store.find(self._object_names(keys)))
        return _num_leading(found)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is on its way to the store."""
        with self._lock:
            return key in self._saving

    # Writing ---------------------------------------------------------------------------------

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> list[Future[Any]] | None:
        """Copy whole chunks and store the copies in the background."""
        wanted = self._layout()
        items = self._copies(
            [pair for pair in zip(keys, objs, strict=True) if _layout_of(pair[1]) == wanted], wanted
        )
        if not items:
            return None
        future = self._store.save(list(items.values()))
        future.add_done_callback(
            lambda done: self._saved(items, done.result(), on_complete_callback)
        )
        return [future]

    def _copies(
        self, pairs: Sequence[tuple[CacheEngineKey, MemoryObj]], layout: ChunkLayout
    ) -> dict[CacheEngineKey, ShardObject]:
        """Own copies of what is not on its way yet, within the write backlog.

        LMCache frees its memory at the end of the engine before it tells its backends, so nothing
        may point into it once a put has returned.
        """
        copies: dict[CacheEngineKey, ShardObject] = {}
        with self._lock:
            for key, thing in pairs:
                room = self._backlog_bytes - len(self._saving) * layout.num_bytes
                if key in self._saving or (self._saving and room < layout.num_bytes):
                    self._num_dropped += key not in self._saving
                    continue
                self._saving.add(key)
                name = self._names.of(key.model_name, self._text(layout), _identity(key))
                copies[key] = name.over(np.frombuffer(_bytes(thing), np.uint8).copy().data)
        return copies

    def _saved(
        self,
        items: Mapping[CacheEngineKey, ShardObject],
        outcomes: Sequence[WriteOutcome | None],
        tell: Callable[[CacheEngineKey], None] | None,
    ) -> None:
        with self._lock:
            self._saving.difference_update(items)
        for key, outcome in zip(items, outcomes, strict=True):
            if tell is not None and outcome in _IS_STORED:
                tell(key)

    # Reading ---------------------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The verified chunk in LMCache's memory; None for a miss."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """The verified chunks; None for each that is not there, corrupt or late."""
        things, future = self._load(keys)
        return _settled(things, future.result())

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The leading verified chunks."""
        things, future = self._load(keys)
        outcomes = await asyncio.wrap_future(future)
        answers = _settled(things, outcomes)
        leading = list(itertools.takewhile(lambda thing: thing is not None, answers))
        for thing in answers[len(leading) :]:
            if thing is not None:
                thing.ref_count_down()
        return leading

    def _load(
        self, keys: Sequence[CacheEngineKey]
    ) -> tuple[list[MemoryObj], Future[list[FetchOutcome | None]]]:
        """Memory for as many leading chunks as there is room for, and their outcomes to come."""
        things: list[MemoryObj] = []
        assert self.local_cpu_backend is not None, "a scheduler reads no chunks"
        for _ in keys:
            thing = self.local_cpu_backend.allocate(
                self.metadata.get_shapes(),
                self.metadata.get_dtypes(),
                fmt=self._format,
                busy_loop=False,
            )
            if thing is None:
                break
            things.append(thing)
        text = self._text(self._layout())
        items = [
            self._names.of(key.model_name, text, _identity(key)).over(_bytes(thing))
            for key, thing in zip(keys, things, strict=False)
        ]
        missing = len(keys) - len(things)
        future = self._store.load(items)
        return things + [None] * missing, future

    # The rest --------------------------------------------------------------------------------

    def pin(self, key: CacheEngineKey) -> bool:
        """False: a shared store pins nothing."""
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        """False: a shared store pins nothing."""
        return False

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk from the store, for everyone."""
        return self._store.remove(self._object_names([key])).result()[0]

    def touch_cache(self) -> None:
        """Nothing to do: the store ranks chunks by itself."""

    def get_allocator_backend(self) -> LocalCPUBackend | None:
        """Chunks are read into LMCache's host memory."""
        return self.local_cpu_backend

    def stats(self) -> dict[str, float]:
        """Totals of the store and of chunks."""
        totals = self._store.stats()
        return {**totals, "chunks_over_backlog": totals["chunks_over_backlog"] + self._num_dropped}

    def close(self) -> None:
        """Write what is queued, for a while, and let go of the storage."""
        self._store.close()

    def _layout(self) -> ChunkLayout:
        """Of a whole chunk; known for sure only once the engine has registered its caches."""
        return ChunkLayout.of(self.metadata.get_shapes(), self.metadata.get_dtypes())

    def _text(self, layout: ChunkLayout) -> str:
        return layout.text if self._layout_text is None else self._layout_text

    def _object_names(self, keys: Sequence[CacheEngineKey]) -> list[str]:
        text = self._text(self._layout())
        return [str(self._names.of(key.model_name, text, _identity(key))) for key in keys]


def _identity(key: CacheEngineKey) -> tuple[object, ...]:
    """What tells chunks of one model and layout apart."""
    layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else None
    tags = tuple(sorted((str(name), str(value)) for name, value in key.tags or ()))
    return key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), tags, layer


def _layout_of(thing: MemoryObj) -> ChunkLayout:
    return ChunkLayout.of(thing.get_shapes(), thing.get_dtypes())


def _bytes(thing: MemoryObj) -> memoryview:
    return memoryview(thing.byte_array).cast("B")


def _num_leading(found: Sequence[bool]) -> int:
    return len(list(itertools.takewhile(bool, found)))


def _settled(
    things: Sequence[MemoryObj | None], outcomes: Sequence[FetchOutcome | None]
) -> list[MemoryObj | None]:
    """What was read; memory of everything else is given back."""
    answers: list[MemoryObj | None] = []
    for thing, outcome in itertools.zip_longest(things, outcomes):
        is_read = outcome is FetchOutcome.OK
        if thing is not None and not is_read:
            thing.ref_count_down()
        answers.append(thing if is_read else None)
    return answers

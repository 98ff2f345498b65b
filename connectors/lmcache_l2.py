"""LMCache's server keeps its chunks in our stores: an L2 adapter for its ``plugin`` type.

The only file for LMCache's multi-process mode; imported by LMCache alone, in its environment.
"""

from __future__ import annotations

import itertools
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from vllm_hicache.storage import FetchOutcome, WriteOutcome
from vllm_hicache.storage_backends.chunk_store import ChunkStore
from vllm_hicache.storage_backends.lmcache_names import ChunkLayout, ChunkNames
from vllm_hicache.storage_backends.lmcache_options import BridgeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

    from vllm_hicache.storage import ShardObject
    from vllm_hicache.storage_backends.lmcache_names import ChunkName

logger = logging.getLogger(__name__)

_IS_STORED = (WriteOutcome.STORED, WriteOutcome.EXISTS)


class _Answers:
    """Results of one kind of task until LMCache takes them, and the event that tells it."""

    def __init__(self) -> None:
        self.notifier = create_event_notifier()
        self._results: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, task_id: int, result: Any) -> None:
        with self._lock:
            self._results[task_id] = result
            if not self._is_closed:
                self.notifier.notify()

    def take(self, task_id: int) -> Any:
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self.notifier.close()


class HiCacheL2Adapter(L2AdapterInterface):
    """Verified objects on files, Redis or S3 below LMCache's host memory.

    Chunks are found by other servers and after restarts when model, rank, layout, tokens and
    ``cache_id`` agree. Nothing is locked: a chunk that goes between lookup and load is a miss.
    Raises ConfigError when ``adapter_params`` cannot be right.
    """

    def __init__(self, params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        super().__init__()
        options = BridgeOptions.parse(params)
        self._layout = options.layout
        self._names = ChunkNames("server", options.cache_id)
        self._layouts: dict[tuple[str, int], set[ChunkLayout]] = {}
        self._task_ids = itertools.count()
        self._stores, self._lookups, self._loads = _Answers(), _Answers(), _Answers()
        self._store = ChunkStore(options.storage, load_timeout_s=options.load_timeout_s)
        logger.info("LMCache chunks are kept in %s", options.storage)

    # Events ----------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Readable when a store task has ended."""
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return self._loads.notifier.fileno()

    # Store -----------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store verified copies; ends when written, dropped or given up."""
        items = self._items(keys, objects)
        return self._start(self._store.save(items), partial(self._stored, keys, items))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """What became of store tasks; successful are those whose every chunk is in the store."""
        return self._stores.take_all()

    def _stored(
        self,
        keys: Sequence[ObjectKey],
        items: Sequence[ShardObject],
        task_id: int,
        outcomes: Sequence[WriteOutcome | None],
    ) -> None:
        fresh = [i for i, outcome in enumerate(outcomes) if outcome is WriteOutcome.STORED]
        sizes = [items[i].payload.nbytes for i in fresh]
        if fresh:
            self._notify_keys_stored([keys[i] for i in fresh], sizes)
        succeeded = all(outcome in _IS_STORED for outcome in outcomes)
        self._stores.put(task_id, L2StoreResult(succeeded, sum(sizes)))

    # Lookup ----------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Ask which chunks are stored in the layout that LMCache wants them in."""
        layouts = {
            group: ChunkLayout.of(layout.shapes, layout.dtypes)
            for group, layout in group_layout_descs.items()
        }
        named = [(i, key) for i, key in enumerate(keys) if key.object_group_id in layouts]
        names = [str(self._name(key, layouts[key.object_group_id])) for _, key in named]
        places = [i for i, _ in named]
        return self._start(self._store.find(names), partial(self._looked_up, keys, places))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """The chunks that are stored, once; None while unknown."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing to do: nothing was locked."""

    def _looked_up(
        self, keys: Sequence[ObjectKey], places: Sequence[int], task_id: int, found: Sequence[bool]
    ) -> None:
        hits = [i for i, is_there in zip(places, found, strict=True) if is_there]
        if hits:
            self._notify_keys_accessed([keys[i] for i in hits])
        self._lookups.put(task_id, _bitmap(len(keys), hits))

    # Load ------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Fill memory objects with verified bytes; the others are not touched."""
        items = self._items(keys, objects)
        return self._start(self._store.load(items), partial(self._loaded, keys))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """The objects that were filled, once; None while unknown."""
        return self._loads.take(task_id)

    def _loaded(
        self, keys: Sequence[ObjectKey], task_id: int, outcomes: Sequence[FetchOutcome | None]
    ) -> None:
        corrupt = [i for i, outcome in enumerate(outcomes) if outcome is FetchOutcome.CORRUPT]
        if corrupt:
            # Another server may have stored them, and LMCache counts the bytes of this one alone.
            self._notify_keys_deleted([keys[i] for i in corrupt], [0] * len(corrupt))
        loaded = [i for i, outcome in enumerate(outcomes) if outcome is FetchOutcome.OK]
        self._loads.put(task_id, _bitmap(len(keys), loaded))

    # The rest --------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove chunks in every layout that this server has seen of their model."""
        pairs = [
            (key, layout)
            for key in keys
            for layout in tuple(self._layouts.get((key.model_name, key.object_group_id), ()))
        ]
        gone = self._store.remove([str(self._name(key, layout)) for key, layout in pairs]).result()
        removed = [pair for pair, is_gone in zip(pairs, gone, strict=True) if is_gone]
        if removed:
            sizes = [layout.num_bytes for _, layout in removed]
            self._notify_keys_deleted([key for key, _ in removed], sizes)

    def report_status(self) -> dict[str, object]:
        """Health and totals, for LMCache's status page."""
        return {
            "type": "vllm-hicache",
            "is_healthy": self._store.is_healthy,
            **self._store.stats(),
        }

    def close(self) -> None:
        """Write what is queued, for a while, and let go of the storage."""
        self._store.close()
        for answers in (self._stores, self._lookups, self._loads):
            answers.close()

    def _name(self, key: ObjectKey, layout: ChunkLayout) -> ChunkName:
        self._layouts.setdefault((key.model_name, key.object_group_id), set()).add(layout)
        text = layout.text if self._layout is None else self._layout
        rest = (key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash)
        return self._names.of(key.model_name, text, rest)

    def _items(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[ShardObject]:
        return [
            self._name(key, ChunkLayout.of(thing.get_shapes(), thing.get_dtypes())).over(
                memoryview(thing.byte_array).cast("B")
            )
            for key, thing in zip(keys, objects, strict=True)
        ]

    def _start(self, future: Future[Any], tell: Callable[[int, Any], None]) -> int:
        task_id = next(self._task_ids)
        future.add_done_callback(lambda done: tell(task_id, done.result()))
        return task_id


def _bitmap(length: int, places: Sequence[int]) -> Bitmap:
    bits = Bitmap(length)
    for place in places:
        bits.set(place)
    return bits

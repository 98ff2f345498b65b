"""vLLM's device blocks in small: references, a free queue and a prefix cache."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random

from vllm_hicache.simulate.contents import Violation


class DevicePool:
    """``DeviceBlocks`` and ``DeviceQueue`` of the planner. Blocks that are cached are reused
    last."""

    def __init__(self, num_blocks: int, has_prefix_cache: bool) -> None:
        self.refs = [0] * num_blocks
        self.num_held = 0
        self.cached: dict[int, int] = {}
        self.num_reused = 0
        """Blocks that were taken from the prefix cache for something else."""
        self._has_prefix_cache = has_prefix_cache
        self._free = deque(range(num_blocks))
        self._keys: dict[int, int] = {}
        self._watchers: dict[int, Callable[[int], None]] = {}
        self._num_taken = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_readable_by_others(self, block_id: int) -> bool:
        """Whether more than one owner has it, or a newcomer would be given it as a hit."""
        return self.refs[block_id] != 1 or block_id in self._keys

    def allocate(self, count: int) -> list[int]:
        taken = [self._free.popleft() for _ in range(count)]
        self._num_taken += count
        for block_id in taken:
            self._tell_watcher(block_id)
            self._forget(block_id)
            self.refs[block_id] = 1
        return taken

    def watch(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        """Call ``on_reuse`` once, before a block is given to somebody else."""
        for block_id in block_ids:
            if not self.refs[block_id]:
                raise Violation(f"device block {block_id} is watched, although it is free")
            self._watchers[block_id] = on_reuse

    def next_reused(self, limit: int) -> Iterator[int]:
        return islice(self._free, limit)

    def take_num_taken(self) -> int:
        """Blocks that were given out since the last call."""
        number, self._num_taken = self._num_taken, 0
        return number

    def _tell_watcher(self, block_id: int) -> None:
        watcher = self._watchers.pop(block_id, None)
        if watcher is not None:
            watcher(block_id)

    def use(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self._free.remove(block_id)
            self.refs[block_id] += 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self.refs[block_id] -= 1
            if self.refs[block_id] < 0:
                raise Violation(f"device block {block_id} was given back once too often")
            if self.refs[block_id] == 0:
                put = self._free.append if block_id in self._keys else self._free.appendleft
                put(block_id)

    def hold(self, block_ids: Sequence[int]) -> None:
        """A reference of the planner."""
        self.use(block_ids)
        self.num_held += len(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self.give_back(block_ids)
        self.num_held -= len(block_ids)

    def cache(self, key: int, block_id: int) -> None:
        if self._has_prefix_cache and key not in self.cached and block_id not in self._keys:
            self.cached[key] = block_id
            self._keys[block_id] = key

    def forget_cached(self) -> None:
        self.cached.clear()
        self._keys.clear()

    def lose_cached(self, rng: Random, share: float) -> int:
        """Others needed blocks: a part of what nobody holds is gone. Returns how many."""
        free = [key for key, block_id in self.cached.items() if not self.refs[block_id]]
        lost = [key for key in free if rng.random() < share]
        for key in lost:
            del self._keys[self.cached.pop(key)]
        return len(lost)

    def _forget(self, block_id: int) -> None:
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self.cached[key]
            self.num_reused += 1

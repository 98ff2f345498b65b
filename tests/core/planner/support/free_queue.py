"""vLLM's device blocks as far as write_back sees them: contents, references, the free queue."""

from collections.abc import Callable, Iterator, Sequence


class FreeQueue:
    """Blocks with contents and a queue of free ones. ``DeviceQueue`` of the planner."""

    def __init__(self, num_blocks: int) -> None:
        self.contents: list[object] = [None] * num_blocks
        self.free = list(range(num_blocks))
        self.num_looks = 0
        self._refs = [0] * num_blocks
        self._watchers: dict[int, Callable[[int], None]] = {}

    def take(self, count: int) -> list[int]:
        """Give out blocks from the head; whoever watches one is told first."""
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            watcher = self._watchers.pop(block_id, None)
            if watcher is not None:
                watcher(block_id)
            self._refs[block_id] = 1
        return taken

    def use(self, block_ids: Sequence[int]) -> None:
        """Another request uses blocks that are in the prefix cache."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                self.free.remove(block_id)
            self._refs[block_id] += 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        """A request has ended: the end of its chain is reused first."""
        for block_id in reversed(block_ids):
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self.free.append(block_id)

    def watch(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        assert all(self._refs[block_id] > 0 for block_id in block_ids), "watched while free"
        self._watchers.update(dict.fromkeys(block_ids, on_reuse))

    def next_reused(self, limit: int) -> Iterator[int]:
        for block_id in self.free[:limit]:
            self.num_looks += 1
            yield block_id

"""The simulator's device pool as far as write_back sees it, with contents and counted looks."""

from collections.abc import Iterator

from vllm_hicache.simulate.device_pool import DevicePool


class FreeQueue(DevicePool):
    """Every block that is given out counts as cached: the end of a chain is reused first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, has_prefix_cache=True)
        self.contents: list[object] = [None] * num_blocks
        self.num_looks = 0

    @property
    def free(self) -> list[int]:
        return list(super().next_reused(self.num_free))

    def take(self, count: int) -> list[int]:
        """Give out blocks from the head; whoever watches one is told first."""
        taken = self.allocate(count)
        for block_id in taken:
            self.cache(block_id, block_id)
        return taken

    def next_reused(self, limit: int) -> Iterator[int]:
        for block_id in super().next_reused(limit):
            self.num_looks += 1
            yield block_id

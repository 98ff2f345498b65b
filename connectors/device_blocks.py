"""References on vLLM's device blocks, and the copies that a cache reset has to wait for."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PoolReferences:
    """Holds blocks of vLLM's pool while copies read them. Null blocks are never passed here."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        self.num_held = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, used or free."""
        return len(self.pool.blocks) if self.pool is not None else 0

    @property
    def num_free(self) -> int:
        """Blocks that vLLM can hand out now."""
        return self.pool.get_num_free_blocks() if self.pool is not None else 0

    def hold(self, block_ids: Sequence[int]) -> None:
        """Raise the reference count: vLLM does not reuse the blocks before ``release``."""
        if self.pool is None:
            raise RuntimeError("vLLM has not bound its block pool yet")
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])
        self.num_held += len(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give references back, last block first: vLLM reuses a chain from its end."""
        if self.pool is None:
            raise RuntimeError("vLLM has not bound its block pool yet")
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in reversed(block_ids))
        self.num_held -= len(block_ids)

    def forget_cached(self) -> None:
        """Take every block out of vLLM's prefix cache; who holds a block keeps it."""
        if self.pool is None:
            raise RuntimeError("vLLM has not bound its block pool yet")
        self.pool.evict_blocks(set(range(len(self.pool.blocks))))

    def watch(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        """Call ``on_reuse(block_id)`` once, before vLLM hands a block out or resets its cache.

        The blocks are in use, so that no place in the queue changes.
        """
        if self.pool is None:
            raise RuntimeError("vLLM has not bound its block pool yet")

        def reused(block: "KVCacheBlock") -> None:
            on_reuse(block.block_id)

        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        self.pool.unpin_blocks(blocks, reused)

    def next_reused(self, limit: int) -> Iterator[int]:
        """The first free blocks in the order in which vLLM hands them out. Nothing may be
        allocated or freed meanwhile."""
        if self.pool is None:
            raise RuntimeError("vLLM has not bound its block pool yet")
        queue = self.pool.free_block_queue
        block, end = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        while limit > 0 and block is not None and block is not end:
            yield block.block_id
            block = block.next_free_block
            limit -= 1


def drain_before_reset(manager: "KVCacheManager", drain: Callable[[], None]) -> None:
    """Call ``drain`` before every reset of vLLM's prefix cache.

    vLLM refuses a reset while any block is referenced and has no hook before it, so a reset
    right after an answer would fail for the milliseconds that its last copies take. This wraps
    the method of this one object; nothing of vLLM's classes is touched.
    """
    reset = manager.reset_prefix_cache

    def drained_reset() -> bool:
        drain()
        return reset()

    manager.reset_prefix_cache = drained_reset

"""References on vLLM's device blocks, and the copies that a cache reset has to wait for."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class PoolReferences:
    """Holds blocks of vLLM's pool while copies read them. Null blocks are never passed here."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        self.num_held = 0

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

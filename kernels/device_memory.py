"""How much device memory copies need, known from layouts alone: before vLLM sizes its KV cache."""

from collections.abc import Sequence

from vllm_hicache.kernels.dispatch import has_triton
from vllm_hicache.layout import PageLayout
from vllm_hicache.tiers import Direction

CUDA_CHUNK_BYTES = 32 << 20  # 0.6 ms on PCIe 5; smaller costs launches, larger device memory
UPLOAD_ROWS = 1 << 16  # units named to the device at once; 65,536 tokens in blocks of 16 are 4,096
ROW_BYTES = 4 * 8
_TABLE_BYTES = 2 << 20  # offsets of layers and heads, a few KiB a pool: torch's smallest segment


def pages_at_once(layout: PageLayout, chunk_bytes: int | None = None) -> int:
    """Pages that one staging buffer holds."""
    return max(1, (chunk_bytes or CUDA_CHUNK_BYTES) // layout.slot_stride)


def staging_bytes(layout: PageLayout, chunk_bytes: int | None = None) -> int:
    """Of one staging buffer for the pages of one pool."""
    return pages_at_once(layout, chunk_bytes) * layout.slot_stride


def device_bytes(layouts: Sequence[PageLayout], chunk_bytes: int | None = None) -> int:
    """Device memory that a worker's copies take at most, from start to end.

    layouts  of all pools of the worker

    >>> from vllm_hicache.layout import LayerSpan
    >>> page = PageLayout(256, LayerSpan(0, 32), 32, 0, 8, 8, 1, 512, 0)
    >>> device_bytes([page]) // 2**20 in (134, 198)
    True
    """
    buffers = 2 if has_triton() else 3  # torch gathers by way of a scratch as large
    largest = max(staging_bytes(layout, chunk_bytes) for layout in layouts)
    return len(Direction) * (buffers * largest + UPLOAD_ROWS * ROW_BYTES) + _TABLE_BYTES

"""Sizes of the buffers that copies pass on a device."""

from vllm_hicache.layout import PageLayout

CUDA_CHUNK_BYTES = 64 << 20
"""Of each staging buffer. To enqueue a chunk takes about 120 us of Python, which the thread that
launches the forward waits for where it launches kernel by kernel: 16 ms for 96 chunks (H200,
2026-11-30). And a relayout waits until the forward's kernels leave it an SM, about 1 ms beside a
prompt of 16,384 tokens: with chunks of 32 MiB, a load of 4.3 GB took 165 ms there and 83 ms alone
(`benchmarks/overlap.py`)."""
UPLOAD_ROWS = 1 << 16  # units named to the device at once; 65,536 tokens in blocks of 16 are 4,096
ROW_BYTES = 4 * 8


def pages_at_once(layout: PageLayout, chunk_bytes: int | None = None) -> int:
    """Pages that one staging buffer holds."""
    return max(1, (chunk_bytes or CUDA_CHUNK_BYTES) // layout.slot_stride)


def staging_bytes(layout: PageLayout, chunk_bytes: int | None = None) -> int:
    """Of one staging buffer for the pages of one pool."""
    return pages_at_once(layout, chunk_bytes) * layout.slot_stride

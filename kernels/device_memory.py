"""Sizes of the buffers that copies pass on a device."""

from vllm_hicache.layout import PageLayout

CUDA_CHUNK_BYTES = 32 << 20  # 0.6 ms on PCIe 5; smaller costs launches, larger device memory
BUFFERS = 4
"""Staging buffers of a direction. A relayout waits for an SM that the forward's kernels leave, with
a prompt of 16,384 tokens about 1 ms each time: with two buffers a load of 4.3 GB took 165 ms beside
one and 83 ms alone (H200, 2026-11-30, `benchmarks/overlap.py`)."""
UPLOAD_ROWS = 1 << 16  # units named to the device at once; 65,536 tokens in blocks of 16 are 4,096
ROW_BYTES = 4 * 8


def pages_at_once(layout: PageLayout, chunk_bytes: int | None = None) -> int:
    """Pages that one staging buffer holds."""
    return max(1, (chunk_bytes or CUDA_CHUNK_BYTES) // layout.slot_stride)


def staging_bytes(layout: PageLayout, chunk_bytes: int | None = None) -> int:
    """Of one staging buffer for the pages of one pool."""
    return pages_at_once(layout, chunk_bytes) * layout.slot_stride

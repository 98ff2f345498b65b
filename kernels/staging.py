"""Device memory that pages pass on their way between host slots and blocks, two buffers in turn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.kernels.batch_copy import driver_batch
from vllm_hicache.layout import registration_slots

_LEGACY_STREAM = 0  # takes no batches


def slot_runs(slots: np.ndarray, piece_slots: int) -> list[tuple[int, int]]:
    """Half-open ranges of positions whose slots follow one another within one pinned piece.

    >>> slot_runs(np.array([3, 4, 5, 6, 9]), piece_slots=5)
    [(0, 2), (2, 4), (4, 5)]
    """
    return list(pairwise(_run_ends(slots, piece_slots).tolist()))


def _run_ends(slots: np.ndarray, piece_slots: int) -> np.ndarray:
    """[runs + 1]: run i is the positions from ``ends[i]`` to ``ends[i + 1]``."""
    is_break = (np.diff(slots) != 1) | (slots[1:] % piece_slots == 0)
    return np.concatenate(([0], np.flatnonzero(is_break) + 1, [len(slots)]))


class Staging:
    """Two device buffers of ``num_bytes`` each, for one direction of copies of all pools.

    Transfers over the bus run on the current stream, relayouts on one of their own, so that the
    relayout of one buffer overlaps the transfer of the other. Events guard both uses of a buffer.
    ``num_rows`` units can be uploaded at once. Not thread-safe.
    """

    def __init__(self, num_bytes: int, num_rows: int, device: torch.device) -> None:
        self._buffers = torch.zeros((2, num_bytes), dtype=torch.uint8, device=device)
        self._rows = torch.empty((num_rows, 4), dtype=torch.int64, device=device)
        # From pageable memory an upload would wait on the host for all that the stream waits for.
        self._pinned_rows = torch.empty((num_rows, 4), dtype=torch.int64, pin_memory=True)
        self._end_of_rows = 0
        self._stream = torch.cuda.Stream(device, priority=-1)  # before the forward's next kernel
        self._batch = driver_batch(device)
        self._transferred = (torch.cuda.Event(), torch.cuda.Event())
        self._relaid = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order all relayouts inside after the current stream, and what follows after them."""
        current = torch.cuda.current_stream(self._buffers.device)
        self._stream.wait_stream(current)
        try:
            yield
        finally:
            current.wait_stream(self._stream)

    def upload(self, rows: np.ndarray) -> Tensor:
        """Copy [n, 4] int64 rows to the device, for relayouts only; at most ``num_rows`` of them.

        They stay there until as many others have come.
        """
        first, last = self._end_of_rows, self._end_of_rows + len(rows)
        if last > len(self._rows):
            self._stream.synchronize()  # what reads the rows before; nothing does in most cases
            first, last = 0, len(rows)
        self._end_of_rows = last
        pinned, uploaded = self._pinned_rows[first:last], self._rows[first:last]
        pinned.copy_(torch.from_numpy(rows))
        with torch.cuda.stream(self._stream):
            uploaded.copy_(pinned, non_blocking=True)
        return uploaded

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        """Copy (addresses and bytes, each [n] int64) past the buffers, inside ``ordered``."""
        if self._batch is None:
            raise InvariantBroken("this driver has no batches of copies")
        self._batch.enqueue(targets, sources, sizes, self._stream.cuda_stream)

    def run(
        self,
        relayout: Callable[[Tensor], None],
        host: Tensor,
        slots: np.ndarray,
        *,
        reads: bool,
        writes: bool,
    ) -> None:
        """Read ``slots`` of ``host`` into a buffer, relayout it, write it back; all enqueued only.

        ``slots`` ascend and fit into a buffer; its page i is ``slots[i]``.
        """
        current = torch.cuda.current_stream(self._buffers.device)
        num_pages, slot_stride = len(slots), host.shape[1]
        buffer = self._buffers[self._turn, : num_pages * slot_stride].view(num_pages, slot_stride)
        transferred, relaid = self._transferred[self._turn], self._relaid[self._turn]
        self._turn = 1 - self._turn
        if reads:
            current.wait_event(relaid)
            self._transfer(host, slots, buffer, to_host=False)
            transferred.record(current)
        self._stream.wait_event(transferred)
        with torch.cuda.stream(self._stream):
            relayout(buffer)
            relaid.record(self._stream)
        if writes:
            current.wait_event(relaid)
            self._transfer(host, slots, buffer, to_host=True)
            transferred.record(current)

    def _transfer(self, host: Tensor, slots: np.ndarray, buffer: Tensor, *, to_host: bool) -> None:
        """Copy pages between their slots and a buffer on the current stream, in few copies."""
        slot_stride = host.shape[1]
        ends = _run_ends(slots, registration_slots(slot_stride))
        stream = torch.cuda.current_stream(buffer.device).cuda_stream
        if self._batch is None or stream == _LEGACY_STREAM or len(ends) == 2:
            for first, last in pairwise(ends.tolist()):
                pages = host[slots[first] : slots[first] + last - first]
                staged = buffer[first:last]
                target, source = (pages, staged) if to_host else (staged, pages)
                target.copy_(source, non_blocking=True)
            return
        firsts = ends[:-1]
        in_host = host.data_ptr() + slots[firsts] * slot_stride
        in_buffer = buffer.data_ptr() + firsts * slot_stride
        targets, sources = (in_host, in_buffer) if to_host else (in_buffer, in_host)
        self._batch.enqueue(targets, sources, np.diff(ends) * slot_stride, stream)

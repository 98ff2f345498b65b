"""Device memory that pages pass on their way between host slots and blocks, two buffers in turn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vllm_hicache.layout import registration_slots


def slot_runs(slots: np.ndarray, piece_slots: int) -> list[tuple[int, int]]:
    """Half-open ranges of positions whose slots follow one another within one pinned piece.

    >>> slot_runs(np.array([3, 4, 5, 6, 9]), piece_slots=5)
    [(0, 2), (2, 4), (4, 5)]
    """
    is_break = (np.diff(slots) != 1) | (slots[1:] % piece_slots == 0)
    return list(pairwise([0, *(np.flatnonzero(is_break) + 1).tolist(), len(slots)]))


class Staging:
    """Two device buffers of ``num_bytes`` each, for one direction of copies of all pools.

    Transfers over the bus run on the current stream, relayouts on one of their own, so that the
    relayout of one buffer overlaps the transfer of the other. Events guard both uses of a buffer.
    Not thread-safe.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._buffers = torch.zeros((2, num_bytes), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
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

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy a small array to the device, for use by relayouts only."""
        with torch.cuda.stream(self._stream):
            return torch.from_numpy(array).to(self._buffers.device, non_blocking=True)

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
        runs = [
            (host[slots[first] : slots[first] + last - first], buffer[first:last])
            for first, last in slot_runs(slots, registration_slots(slot_stride))
        ]
        if reads:
            current.wait_event(relaid)
            for host_pages, staged in runs:
                staged.copy_(host_pages, non_blocking=True)
            transferred.record(current)
        self._stream.wait_event(transferred)
        with torch.cuda.stream(self._stream):
            relayout(buffer)
            relaid.record(self._stream)
        if writes:
            current.wait_event(relaid)
            for host_pages, staged in runs:
                host_pages.copy_(staged, non_blocking=True)
            transferred.record(current)

"""The loads of one step, which arrive span of layers by span of layers while its forward runs."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from vllm_hicache.errors import LayerLoadFailed
from vllm_hicache.plan import CopyList


class SpanEnd(Protocol):
    """The end of a span on a CUDA device: an event."""

    def wait(self) -> None:
        """Order what is enqueued next on the current stream behind it."""


LoadSpans = Callable[[Sequence[CopyList]], Iterator[SpanEnd | None]]
"""Copies one span after the other of all lists. Yields after each: on a CUDA device, where it was
only enqueued, its end; on a CPU None, where it has ended."""


class LayeredLoads:
    """Filled by the copy thread, waited for by the thread that launches the forward.

    op_ids  numbers of the loads, ascending
    copies  a copy list for each
    """

    def __init__(self, op_ids: Sequence[int], copies: Sequence[CopyList]) -> None:
        self.op_ids = tuple(op_ids)
        self._copies = copies
        self._changed = threading.Condition()  # guards what follows
        self._spans: list[SpanEnd | None] = []
        self._error: Exception | None = None

    @property
    def num_granules(self) -> int:
        return sum(map(len, self._copies))

    def run(self, load_spans: LoadSpans) -> None:
        """Copy everything, on the copy thread; what fails is raised there and for who waits."""
        try:
            for end in load_spans(self._copies):
                with self._changed:
                    self._spans.append(end)
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise

    def make_current_stream_wait(self, span: int, timeout_s: float) -> None:
        """Order what the caller enqueues next behind this span of all loads.

        Waits only until the span is enqueued on the device; on a CPU until it is done. Raises
        LayerLoadFailed when it failed before, or is not enqueued in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._spans) <= span:
                if self._error is not None:
                    raise LayerLoadFailed(f"it failed: {self._error!r}") from self._error
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LayerLoadFailed(f"it did not start in {timeout_s:g} s")
            end = self._spans[span]
        if end is not None:
            end.wait()

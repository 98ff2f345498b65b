"""What one process did, call by call, for the rank-consensus checker; and how it travels.

A process compares nothing: it keeps its events until its next report.
"""

from collections import deque
from typing import TypeAlias

import msgspec

from vllm_hicache.plain_values import Plain

Pairs: TypeAlias = tuple[tuple[str, Plain], ...]
"""What selectors found, each with the selector's name."""

MAX_UNTOLD = 1 << 16
"""Events that wait for a report. Reports go with every step; where none is taken any more,
memory must not grow, and the loss is told."""


class Event(msgspec.Struct, array_like=True, gc=False):
    """One call of one process. See ``checked_calls.Check``."""

    step: int
    """The process's step when the call began."""
    stream: str
    call: str
    in_step: bool
    key: Pairs
    arguments: Pairs
    result: Pairs | None
    """None while the call runs."""
    shown: Pairs


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one worker did since its last report."""

    number: int
    """1 for the first; a hole means that a report was lost."""
    step: int
    """Steps below this one are told completely."""
    events: tuple[Event, ...]


class EventRecorder:
    """Events of one process in the order in which their calls began.

    Any thread may record; one thread takes. The order within a stream is that of its thread.
    """

    def __init__(self) -> None:
        self.step = 0
        """Set by the call that begins a step."""
        self._events: deque[Event] = deque()
        self._num_batches = 0
        self._has_lost = False

    def begin(self, event: Event) -> None:
        """The event takes its place; it is told when its result is set."""
        if len(self._events) < MAX_UNTOLD:
            self._events.append(event)
        else:
            self._has_lost = True

    def take(self) -> tuple[Event, ...]:
        """All events before the first call that still runs; they are told once."""
        events = self._events
        taken = []
        while events and events[0].result is not None:
            taken.append(events.popleft())
        return tuple(taken)

    def take_batch(self) -> EventBatch:
        """What the next report carries."""
        step, events = self.step, self.take()
        if self._events:  # steps only grow, so all that is not told is of this step or later
            step = min(step, self._events[0].step)
        self._num_batches += 2 if self._has_lost else 1  # a hole tells of a loss
        self._has_lost = False
        return EventBatch(self._num_batches, step, events)


pack_batch = msgspec.msgpack.Encoder().encode
"""A batch as it travels: the same events give the same bytes."""
unpack_batch = msgspec.msgpack.Decoder(EventBatch).decode

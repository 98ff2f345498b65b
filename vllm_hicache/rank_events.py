"""What one process did, call by call, for the rank-consensus checker; and how it travels.

A process compares nothing: it keeps its events until its next report.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from vllm_hicache.plain_values import Plain

Pairs: TypeAlias = tuple[tuple[str, Plain], ...]
"""What selectors found, each with the selector's name."""

MAX_UNTOLD = 1 << 16
"""Events that wait for a report. Reports go with every step; where none is taken any more,
memory must not grow, and the loss is told."""


class Event(NamedTuple):
    """One call of one process. See ``checked_calls.Check``."""

    step: int
    """The process's step when the call began."""
    stream: str
    call: str
    in_step: bool
    key: Pairs
    arguments: Pairs
    result: Pairs
    shown: Pairs


class EventBatch(NamedTuple):
    """What one worker did since its last report."""

    number: int
    """1 for the first; a hole means that a report was lost."""
    step: int
    """Steps below this one are told completely."""
    events: tuple[Event, ...]


@dataclass(slots=True)
class Entry:
    """An event whose call may still run."""

    step: int
    stream: str
    call: str
    in_step: bool
    key: Pairs
    arguments: Pairs
    result: Pairs = ()
    shown: Pairs = ()
    has_ended: bool = False

    def event(self) -> Event:
        return Event(
            self.step,
            self.stream,
            self.call,
            self.in_step,
            self.key,
            self.arguments,
            self.result,
            self.shown,
        )


class EventRecorder:
    """Events of one process in the order in which their calls began.

    Any thread may record; one thread takes. The order within a stream is that of its thread.
    """

    def __init__(self) -> None:
        self.step = 0
        """Set by the call that begins a step."""
        self._entries: deque[Entry] = deque()
        self._num_batches = 0

    def begin(self, stream: str, call: str, in_step: bool, key: Pairs, arguments: Pairs) -> Entry:
        entry = Entry(self.step, stream, call, in_step, key, arguments)
        if len(self._entries) >= MAX_UNTOLD:
            self._entries.clear()
            self._num_batches += 1  # the hole tells that events are lost
        self._entries.append(entry)
        return entry

    def end(self, entry: Entry, result: Pairs) -> None:
        entry.result = result
        entry.has_ended = True

    def take(self) -> tuple[Event, ...]:
        """All events before the first call that still runs; they are told once."""
        entries = self._entries
        taken = []
        while entries and entries[0].has_ended:
            taken.append(entries.popleft().event())
        return tuple(taken)

    def take_batch(self) -> EventBatch:
        """What the next report carries."""
        step, events = self.step, self.take()
        if self._entries:  # steps only grow, so all that is not told is of this step or later
            step = min(step, self._entries[0].step)
        self._num_batches += 1
        return EventBatch(self._num_batches, step, events)

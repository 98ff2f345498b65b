"""Compares one stream of calls between all workers: by logical order, never by time.

A fast worker's events wait for those of the slowest one. What is compared is gone; after a
missing or additional event all workers are brought to the same place again.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from vllm_hicache.rank_events import Event, Pairs

Kind: TypeAlias = Literal["order", "arguments", "result"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place of a stream where workers differ."""

    kind: Kind
    stream: str
    step: int
    """Of the earliest of these events: of the one that is missing or additional, if any is."""
    call: str
    events: tuple[Event | None, ...]
    """By participant; None where the event is missing, or where the participant is not heard."""
    odd: tuple[int, ...]
    """Participants that differ from the scheduler or else from most; all where they are tied."""
    is_tied: bool
    """No side has a majority, and the scheduler has no such event."""

    @property
    def in_step(self) -> bool:
        return any(event is not None and event.in_step for event in self.events)


class StreamJoin:
    """One stream of ``num_workers`` workers and, where ``has_reference``, of the scheduler, which
    comes last and is right where it differs from a worker.

    >>> def call(key): return Event(1, "copies", "copy", False, (("op", key),), (), (), ())
    >>> join = StreamJoin("copies", 2)
    >>> join.add(0, [call(1), call(2)]); join.compare({})
    []
    >>> join.add(1, [call(1), call(3)]); [found.kind for found in join.compare({})]
    ['order']
    """

    def __init__(self, name: str, num_workers: int, *, has_reference: bool = False) -> None:
        self.name = name
        self._queues: list[deque[Event]] = [deque() for _ in range(num_workers + has_reference)]
        self._reference = num_workers if has_reference else None
        self._silent: set[int] = set()
        self._seeks_keys = False
        """After a loss events with keys have to find together first."""
        self._compared_step = -1
        """In-step events up to this step are compared, or given up after a missing one."""

    def add(self, participant: int, events: Iterable[Event]) -> None:
        """The participant's next events, in its order."""
        done = self._compared_step
        self._queues[participant].extend(e for e in events if not e.in_step or e.step > done)

    def agree(self, events: Sequence[Event]) -> bool:
        """All workers made these same calls next, while nothing of theirs waits here: whether the
        scheduler made them, too. Where it did they are compared; else nothing has changed."""
        if self._reference is None:
            return True
        queue = self._queues[self._reference]
        if len(queue) < len(events) or not all(map(_is_same, events, queue)):
            return False
        for _ in events:
            queue.popleft()
        return True

    @property
    def is_level(self) -> bool:
        """Whether no worker has made a call that is still to be compared."""
        workers = self._queues[: self._reference] if self._reference is not None else self._queues
        return not self._seeks_keys and not any(workers)

    def leave(self, participant: int) -> None:
        """Compare the others only, from now on."""
        self._silent.add(participant)
        self._queues[participant].clear()

    def restart(self, step: int) -> None:
        """Events were lost: those of steps up to ``step`` are not compared; where calls are
        numbered by keys, from the next key on that all have."""
        self._seeks_keys = True
        self._skip_step(step)

    def compare(self, told: dict[int, int]) -> list[Divergence]:
        """What differs among the events that can be compared by now. ``told`` is, for each
        worker, the step below which it has told everything."""
        active = [i for i in range(len(self._queues)) if i not in self._silent]
        queues = [self._queues[i] for i in active]
        found = []
        while any(queues):
            heads = [queue[0] if queue else None for queue in queues]
            if not self._can_judge(active, heads, told):
                break
            divergence = self._judge(active, heads)
            if divergence is not None and divergence.kind == "order":
                self._realign(queues, heads)
                if self._seeks_keys and not divergence.in_step:
                    continue
            else:
                self._seeks_keys = False
                for queue in queues:
                    queue.popleft()
            if divergence is not None:
                found.append(divergence)
        return found

    def _can_judge(
        self, active: Sequence[int], heads: Sequence[Event | None], told: dict[int, int]
    ) -> bool:
        """Whether every worker has its event, or will certainly never have it."""
        present = [head for head in heads if head is not None]
        if len(present) == len(heads):
            return True
        if not present[0].in_step:
            return False
        step = min(head.step for head in present)
        missing = [i for i, head in zip(active, heads, strict=True) if head is None]
        return all(told.get(i, 0) > step for i in missing)

    def _judge(self, active: Sequence[int], heads: Sequence[Event | None]) -> Divergence | None:
        first = heads[0]
        if first is not None and all(_is_same(first, head) for head in heads):
            return None
        places = [None if head is None else (head.call, head.key, _step(head)) for head in heads]
        if len(set(places)) > 1:
            return self._divergence("order", active, heads, places)
        arguments = [head.arguments if head is not None else None for head in heads]
        if len(set(arguments)) > 1:
            return self._divergence("arguments", active, heads, arguments)
        results = [head.result if head is not None else None for head in heads]
        return self._divergence("result", active, heads, results)

    def _divergence(
        self,
        kind: Kind,
        active: Sequence[int],
        heads: Sequence[Event | None],
        values: Sequence[object],
    ) -> Divergence:
        events: list[Event | None] = [None] * len(self._queues)
        for participant, head in zip(active, heads, strict=True):
            events[participant] = head
        right = self._right_value(active, values)
        odd = tuple(i for i, v in zip(active, values, strict=True) if right is _TIED or v != right)
        agreed = [h for h, v in zip(heads, values, strict=True) if h is not None and v == right]
        present = [head for head in heads if head is not None]
        if kind != "order" and agreed:
            present = agreed
        first = min(present, key=lambda head: head.step)
        is_tied = right is _TIED
        return Divergence(kind, self.name, first.step, first.call, tuple(events), odd, is_tied)

    def _right_value(self, active: Sequence[int], values: Sequence[object]) -> object:
        if self._reference is not None and self._reference in active:
            return values[active.index(self._reference)]
        ranked = Counter(values).most_common(2)
        is_tied = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
        return _TIED if is_tied else ranked[0][0]

    def _realign(self, queues: Sequence[deque[Event]], heads: Sequence[Event | None]) -> None:
        present = [head for head in heads if head is not None]
        if present[0].in_step:
            self._skip_step(min(head.step for head in present))
            return
        keys = [head.key for head in present]
        newest = max(keys, key=_numbers)
        if all(key == newest for key in keys):  # another call under the same key
            for queue in queues:
                queue.popleft()
        for queue in queues:
            while queue and _numbers(queue[0].key) < _numbers(newest):
                queue.popleft()

    def _skip_step(self, step: int) -> None:
        self._compared_step = max(self._compared_step, step)
        for queue in self._queues:
            while queue and queue[0].in_step and queue[0].step <= step:
                queue.popleft()


_TIED = object()


def _is_same(one: Event, other: Event | None) -> bool:
    return (
        other is not None
        and one.call == other.call
        and one.key == other.key
        and one.arguments == other.arguments
        and one.result == other.result
        and (one.step == other.step or not one.in_step)
    )


def _step(event: Event) -> int:
    return event.step if event.in_step else 0


def _numbers(key: Pairs) -> tuple[int, ...]:
    return tuple(value if isinstance(value, int) else 0 for _, value in key)

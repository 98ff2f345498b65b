"""The eviction policy `next_use`: what is expected to be used last, or never, leaves first."""

import heapq

from vllm_hicache.prefix_index import HostPage
from vllm_hicache.reuse_times import ReuseTimes

COMPACT_FROM = 64
"""Entries below which nothing is tidied up."""


class NextUseQueue:
    """Evictable pages. They leave in this order:

    1. pages of one use and pages that are overdue, the one first that was used longest ago
    2. pages used several times, the one first that is expected to be used last: conversations that
       take turns come back in the order in which they went, so the one that has just had its turn

    Being overdue proves little where the gaps before were short by chance, as while a device still
    held all: such pages leave no sooner than what nobody has asked for twice.

    O(log n) a page. Where all wait for their next turn and not all fit, the least recently used
    page is the one that is needed next; `lru` then loses each just before its turn.

    Whoever makes a page evictable calls ``offer``, whoever uses it ``used``; its earlier entries
    become void.
    """

    decides_alone = True
    """Protection has no say: pages of one use leave before others anyhow."""

    def __init__(self, times: ReuseTimes) -> None:
        self._times = times
        self._tickets: dict[HostPage, int] = {}
        self._next_ticket = 0
        self._overdue: list[tuple[int, int, HostPage]] = []
        self._single: list[tuple[int, int, HostPage]] = []
        self._reused: list[tuple[int, int, HostPage]] = []

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def num_entries(self) -> int:
        """Entries, void ones included; O(pages)."""
        return len(self._overdue) + len(self._single) + len(self._reused)

    def used(self, page: HostPage) -> None:
        """A page has been used: its place is another one now."""
        self.offer(page)

    def has(self, page: HostPage) -> bool:
        """Whether an entry of this page comes up in time."""
        return page in self._tickets

    def offer(self, page: HostPage) -> None:
        """Queue an evictable page by its uses so far."""
        if not page.is_evictable:
            self._tickets.pop(page, None)
            return
        ticket = self._tickets[page] = self._next_ticket
        self._next_ticket += 1
        if page.use_gap:
            heapq.heappush(self._overdue, (self._times.overdue_after(page), ticket, page))
            heapq.heappush(self._reused, (-(page.used_at + page.use_gap), -ticket, page))
        else:
            heapq.heappush(self._single, (page.last_use, ticket, page))
        if self.num_entries > COMPACT_FROM + 4 * len(self._tickets):
            self._compact()

    def pop(self, latest: int | None = None) -> HostPage | None:
        """The page to evict next; None when no page is evictable, or all that are have been used
        several times and are expected to be used again at ``latest`` on the clock, or before."""
        self._demote_overdue()
        return self._pop(self._single) or self._pop(
            self._reused, -latest if latest is not None else None
        )

    def _demote_overdue(self) -> None:
        """Move what has become overdue to the pages of one use."""
        reuses = self._times.reuses
        while self._overdue and self._overdue[0][0] < reuses:
            _, ticket, page = heapq.heappop(self._overdue)
            if self._tickets.get(page) == ticket:
                heapq.heappush(self._single, (page.last_use, ticket, page))

    def _pop(
        self, heap: list[tuple[int, int, HostPage]], before: int | None = None
    ) -> HostPage | None:
        while heap and (before is None or heap[0][0] < before):
            _, ticket, page = heapq.heappop(heap)
            if self._tickets.get(page) != abs(ticket):
                continue
            del self._tickets[page]
            if page.is_evictable:
                return page
        return None

    def _compact(self) -> None:
        for heap in (self._overdue, self._single, self._reused):
            heap[:] = [entry for entry in heap if self._tickets.get(entry[2]) == abs(entry[1])]
            heapq.heapify(heap)

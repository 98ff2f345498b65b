"""Which host page leaves first: pure choice of victims, leaf first, O(log n) per victim."""

import heapq
from collections.abc import Callable
from itertools import count

from vllm_hicache.prefix_index import HostPage

PROTECTED_USES = 2
"""Uses from which `slru` keeps a page in its protected segment."""

Order = tuple[int, int, int]


def _lru(page: HostPage) -> Order:
    return (page.is_protected, page.last_use, 0)


def _lfu(page: HostPage) -> Order:
    return (page.is_protected, page.num_uses, page.last_use)


def _slru(page: HostPage) -> Order:
    return (page.is_protected, page.num_uses >= PROTECTED_USES, page.last_use)


def _priority(page: HostPage) -> Order:
    return (page.priority, page.is_protected, page.last_use)


ORDERS: dict[str, Callable[[HostPage], Order]] = {
    "lru": _lru,
    "lfu": _lfu,
    "slru": _slru,
    "priority": _priority,
}
"""Policy name -> sort key; the page with the smallest key leaves first."""
NEXT_USE = "next_use"


class EvictionQueue:
    """Evictable pages in eviction order.

    A page has one entry at most as protected and one as unprotected. It is not moved when the
    page is used, such keys only grow: a popped entry whose key is out of date is pushed again,
    one whose page is pinned, gone or a parent is dropped. Whoever makes a page evictable
    (unpinned, lost its last child, added) or takes its protection away calls ``offer``.
    """

    def __init__(self, policy: str) -> None:
        self._order = ORDERS[policy]
        self.decides_alone = policy == "priority"
        """Whether the order counts even where it makes a protected page leave."""
        self._heap: list[tuple[Order, int, bool, HostPage]] = []
        self._ticket = count()

    def __len__(self) -> int:
        return len(self._heap)

    def used(self, page: HostPage) -> None:
        """Keys only grow with uses, and are looked at when popped: nothing to do."""

    def has(self, page: HostPage) -> bool:
        """Whether an entry of this page comes up in time."""
        return page.is_queued

    def offer(self, page: HostPage) -> None:
        if page.is_evictable and not page.is_queued:
            page.queued |= 1 << page.is_protected
            entry = (self._order(page), next(self._ticket), page.is_protected, page)
            heapq.heappush(self._heap, entry)

    def pop(self, latest: int | None = None) -> HostPage | None:
        """The page to evict next, or None when no page is evictable."""
        while self._heap:
            order, _, as_protected, page = heapq.heappop(self._heap)
            page.queued &= ~(1 << as_protected)
            if not page.is_evictable:
                continue
            if as_protected == page.is_protected and order == self._order(page):
                return page
            self.offer(page)
        return None

"""Pages that requests asked to keep in host for a while (hint ``pin_s``)."""

import heapq

from vllm_hicache.host_tier import HostTier
from vllm_hicache.metrics import Metrics
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.request_state import RequestState


class PinnedPages:
    """One pin a page, with a deadline: ``pin_s`` after a request that asked for it has ended.

    At most ``max_share`` of the slots that are ready are kept or waited for; what goes beyond is
    refused and counted. Nothing expires by itself: the caller brings the time.
    """

    def __init__(
        self, host: HostTier, metrics: Metrics, *, max_share: float, page_size: int
    ) -> None:
        self._host = host
        self._metrics = metrics
        self._max_share = max_share
        self._page_size = page_size
        self._deadlines: dict[bytes, float] = {}
        self._pages: dict[bytes, HostPage] = {}
        """Those of ``_deadlines`` that are in host; the others are pinned when they arrive."""
        self._heap: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._pages)

    def pinned_pages(self) -> list[HostPage]:
        """Pages that are kept in host, one entry a pin."""
        return list(self._pages.values())

    def keep(self, state: RequestState, first: int, last: int, now: float) -> None:
        """Keep pages ``[first, last)`` of a request with the hint, in host or on their way there,
        until ``pin_s`` from now at least."""
        deadline = now + state.pin_s
        max_pages = int(self._host.slots.num_ready * self._max_share)
        for page_hash in state.tokens.page_hashes(last)[first:last]:
            known = self._deadlines.get(page_hash)
            if known is not None:
                self._deadlines[page_hash] = max(known, deadline)
            elif len(self._deadlines) < max_pages:
                self._deadlines[page_hash] = deadline
                heapq.heappush(self._heap, (deadline, page_hash))
                page = self._host.index.get(page_hash)
                if page is not None:
                    self._pin(page)
            else:
                self._metrics.count("pin_refused_tokens", self._page_size)

    def arrived(self, pages: list[HostPage]) -> None:
        """These pages are in host now."""
        if self._deadlines:
            for page in pages:
                if page.page_hash in self._deadlines and page.page_hash not in self._pages:
                    self._pin(page)

    def expire(self, now: float) -> None:
        """Let go what is past its deadline. O(1) while nothing is."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, page_hash = heapq.heappop(heap)
            deadline = self._deadlines[page_hash]
            if deadline > now:  # extended since it was pushed
                heapq.heappush(heap, (deadline, page_hash))
                continue
            del self._deadlines[page_hash]
            page = self._pages.pop(page_hash, None)
            if page is not None:
                self._host.unpin([page])

    def drop_absent(self) -> None:
        """Pages were taken out of host: their slots need not wait for a deadline."""
        for page in [page for page in self._pages.values() if not page.is_present]:
            del self._pages[page.page_hash]
            self._host.unpin([page])

    def forget(self) -> None:
        """Reset: nothing is kept."""
        self._host.unpin(list(self._pages.values()))
        self._pages.clear()
        self._deadlines.clear()
        self._heap.clear()

    def _pin(self, page: HostPage) -> None:
        self._pages[page.page_hash] = page
        self._host.pin([page])

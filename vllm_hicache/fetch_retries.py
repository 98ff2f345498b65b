"""Storage is asked again for requests that still wait: after a while, or at once when pages
left host.

A retry is a guess. Nobody waits for its question, and the fetch before it keeps its place until
the retry has found something.
"""

from collections import deque

from vllm_hicache.fetch import Fetch, FetchStage
from vllm_hicache.metrics import Metrics
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.prefetch import Prefetcher
from vllm_hicache.request_state import RequestState

MAY_PASS = frozenset(("complete", "missing", "corrupt", "unavailable", "host_full", "tenant_limit"))
"""Endings after which another try may bring what host still lacks. A deadline is none of them:
it says nothing of what is stored, and a tier that is too slow is not asked more often."""
MAX_PER_STEP = 8
"""Questions that one step sends: requests that came together are due together. More would be felt
in the step, fewer would let hundreds of waiting requests stand in line."""


class FetchRetries:
    """When storage is asked again, for whom, and what becomes of the fetch before."""

    def __init__(self, prefetcher: Prefetcher, metrics: Metrics, options: PlannerOptions) -> None:
        self._prefetcher = prefetcher
        self._metrics = metrics
        self._options = options
        self._interval_s = options.fetch.retry_s
        self._max_retries = options.fetch.max_retries
        self._line: deque[tuple[float, RequestState]] = deque()
        """When who is looked at next; the interval is constant, so it is sorted."""

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    def line_up(self, state: RequestState, now: float) -> None:
        """Look after this request again when the interval is over, if it still waits then."""
        if self._interval_s and not state.is_in_line and not self._is_spent(state):
            state.is_in_line = True
            self._line.append((now + self._interval_s, state))

    def ask_due(self, namespace: str, now: float) -> None:
        """Ask for those whose time has come. O(1) while it has come for nobody."""
        line, num_asked = self._line, 0
        while line and num_asked < MAX_PER_STEP:
            due, state = line[0]
            is_over = state.is_admitted or state.is_finished
            if due > now and not is_over:
                return
            line.popleft()
            state.is_in_line = False
            if not is_over:
                num_asked += self._ask_again(state, namespace, now)

    def look_up(
        self, state: RequestState, num_pages: int, num_local: int, namespace: str, now: float
    ) -> None:
        """vLLM asks for the request, of which ``num_pages`` leading pages are in host and
        ``num_local`` tokens on the device. What has left since the last look is fetched again,
        and may be waited for: storage is expected to have it."""
        if state.retry is not None:
            self.settle(state)
        before, fetch = state.num_host_pages, state.fetch
        if num_pages >= before:
            state.num_host_pages = num_pages
            return
        if before * self._options.page_size <= num_local or self._is_spent(state):
            return
        if fetch is not None and fetch.is_running:
            return
        if state.retry is not None:
            self._drop(state, state.retry, "left")
        fetch = self._seek(state, namespace, now)
        self.line_up(state, now)
        if fetch is not None:
            self._metrics.count("fetch_retries", 1, "reissued")
            self._replace(state, fetch)

    def settle(self, state: RequestState) -> None:
        """Where the retry's question is answered, give it its place or drop it."""
        retry = state.retry
        if retry is None or retry.stage is FetchStage.QUERYING:
            return
        if retry.first_page + len(retry.found) > state.num_host_pages:
            state.retry = None
            self._metrics.count("fetch_retries", 1, "found")
            self._replace(state, retry)
        else:
            self._drop(state, retry, "nothing")

    def forget(self, state: RequestState) -> None:
        """Reset: what was asked for and what host loses is not asked for again."""
        state.why_no_fetch, state.num_host_pages = "reset", 0

    def _is_spent(self, state: RequestState) -> bool:
        return state.num_retries >= self._max_retries

    def _ask_again(self, state: RequestState, namespace: str, now: float) -> bool:
        """Begin a retry where there is reason to; whether a question was sent."""
        self.settle(state)
        fetch = state.fetch
        if state.retry is not None or (fetch is not None and fetch.is_running):
            self.line_up(state, now)
            return False
        reason = state.why_no_fetch or (fetch.reason if fetch is not None else "")
        if reason not in MAY_PASS or not state.may_load or self._is_spent(state):
            return False
        state.retry = self._seek(state, namespace, now)
        if state.retry is not None or state.why_no_fetch == "unavailable":
            self.line_up(state, now)
        if state.retry is None:
            return False
        self.settle(state)  # it may have joined a fetch that is being read
        return True

    def _seek(self, state: RequestState, namespace: str, now: float) -> Fetch | None:
        pages = self._options.wanted_pages(state.tokens.num_tokens)
        fetch = self._prefetcher.seek(state, pages, namespace, now)
        if fetch is not None or state.why_no_fetch == "unavailable":
            state.num_retries += 1
        if fetch is None and state.why_no_fetch == "unavailable":
            self._metrics.count("fetch_retries", 1, "nothing")
        return fetch

    def _replace(self, state: RequestState, fetch: Fetch) -> None:
        """The request waits for this fetch now. What the one before has found stays known, and
        its pages stay pinned."""
        before, state.fetch = state.fetch, fetch
        if before is None:
            return
        if before.found:
            state.earlier_fetches += (before,)
        else:
            self._prefetcher.let_go(before)

    def _drop(self, state: RequestState, retry: Fetch, outcome: str) -> None:
        state.retry = None
        self._metrics.count("fetch_retries", 1, outcome)
        self._prefetcher.let_go(retry)

"""Tokens that lookups have found and the device does not get: each booked once, with a reason."""

from vllm_hicache.fetch import Fetch
from vllm_hicache.metrics import Ledger
from vllm_hicache.refusals import Refusals
from vllm_hicache.request_state import RequestState


class Unserved:
    """Books what a request was not given when it is admitted or has ended."""

    def __init__(self, ledger: Ledger, *, page_size: int) -> None:
        self._ledger = ledger
        self._page_size = page_size

    def note_refusal(self, state: RequestState) -> None:
        """vLLM has not taken the last offer, and host may lose the pages until it does."""
        if state.num_offered_tokens and not state.is_admitted:
            end = state.num_local_tokens + state.num_offered_tokens
            state.refused.note(end, is_async=state.is_offer_async)
            state.num_offered_tokens = 0

    def book(self, state: RequestState, num_loaded: int, ended: str = "") -> None:
        """What lookups of this life have found and the device does not get, each token once:
        found by the last one, found in storage, offered earlier. ``ended`` is the reason where
        the request has ended, else each has its own."""
        in_reach = state.num_local_tokens + state.num_found_tokens
        withheld = state.num_found_tokens - num_loaded
        self._miss(state, "host", ended or state.withheld_reason, withheld)
        fetched, short, fetch = in_reach, 0, state.last_finding
        if fetch is not None:
            fetched = max(in_reach, fetch.first_page * self._page_size)
            short = self._num_unfetched(state, fetch, in_reach)
            reason = fetch.why_unfetched(state.is_over_budget)
            self._miss(state, "storage", ended or reason, short)
        refused = state.refused
        booked = max(0, min(refused.end, fetched + short) - fetched)
        self._miss(state, "host", ended or refused.reason, refused.end - in_reach - booked)
        state.num_found_tokens = 0
        if refused.end:
            state.refused = Refusals()

    def _num_unfetched(self, state: RequestState, fetch: Fetch, in_reach: int) -> int:
        """Tokens of the request that this fetch has found beyond the first ``in_reach``.

        Who joined the fetch of another request may have another end. O(log n).
        """
        first, page_size = fetch.first_page, self._page_size
        num_pages = state.tokens.num_tokens // page_size
        hashes = state.tokens.page_hashes(num_pages)
        low, high = 0, min(len(fetch.found), num_pages - first)
        while low < high:
            middle = (low + high + 1) // 2
            if fetch.found[middle - 1] == hashes[first + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return max(0, (first + low) * page_size - max(in_reach, first * page_size))

    def _miss(self, state: RequestState, tier: str, reason: str, num_tokens: int) -> None:
        if num_tokens > 0:
            self._ledger.found(state.request_id, tier, num_tokens)
            self._ledger.unserved(state.request_id, tier, reason, num_tokens)

"""Storage -> host while a request waits: one fetch from question to end.

    QUERYING -> READING -> ENDED        each with the owner of the slots in brackets
    QUERYING   [nobody]                 every worker counts its leading pages in storage
    READING    [operation -> index]     agreed pages are published as they arrive
    ENDED      [operation]              the rest waits for the last worker's release, then is freed

Deadlines belong to the scheduler; a worker only turns its own into a shorter answer.
"""

from collections import Counter
from dataclasses import replace

from vllm_hicache.fetch import Fetch, FetchPolicy, FetchStage
from vllm_hicache.host_tier import HostTier
from vllm_hicache.metrics import Metrics
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.request_state import RequestState
from vllm_hicache.storage_link import StorageLink, WorldAnswer
from vllm_hicache.storage_messages import (
    Cancel,
    Exists,
    ExistsResult,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    StorageTimes,
    pack_hashes,
    pack_slots,
)
from vllm_hicache.storage_messages import (
    Fetch as FetchMessage,
)
from vllm_hicache.tiers import Tier
from vllm_hicache.usable_pages import UsablePages
from vllm_hicache.worth import Verdict, Worth

PATIENCE = 0.1
"""Part of the time to compute its tokens that a request waits whatever is predicted."""
FetchEvent = ExistsResult | FetchProgress | FetchSettled | FetchReleased


class Prefetcher:
    """All fetches."""

    def __init__(
        self,
        host: HostTier,
        link: StorageLink,
        metrics: Metrics,
        worth: Worth,
        policy: FetchPolicy,
        *,
        page_size: int,
        usable: UsablePages | None = None,
    ) -> None:
        """``usable`` chooses pages where they may lack pools; None where they cannot."""
        self._usable = usable
        self._host = host
        self._link = link
        self._metrics = metrics
        self._worth = worth
        self._policy = policy
        self._page_size = page_size
        self._by_query: dict[int, Fetch] = {}
        self._by_read: dict[int, Fetch] = {}
        self._by_page: dict[bytes, Fetch] = {}
        self._awaited: set[Fetch] = set()
        self._num_slots = 0
        self._occupied: Counter[str] = Counter()
        self._published: list[HostPage] = []
        self._namespace = ""

    @property
    def num_querying(self) -> int:
        return len(self._by_query)

    @property
    def num_reading(self) -> int:
        return len(self._by_read)

    @property
    def num_slots(self) -> int:
        """Host slots that fetches own: neither published nor freed."""
        return self._num_slots

    @property
    def num_occupied(self) -> int:
        """Host pages that fetches fill, and those that they have filled for requests that wait."""
        return self._occupied.total()

    @property
    def num_awaited(self) -> int:
        """Fetches, running or ended, whose result some request has not taken yet."""
        return len(self._awaited)

    def slots(self) -> list[int]:
        """The host slots that fetches own."""
        fetches = self._by_read.values()
        return [slot for fetch in fetches for slot in fetch.slots[fetch.num_published :]]

    def pinned_pages(self) -> list[HostPage]:
        """Pages that fetches keep in host, one entry a pin."""
        anchors = [
            fetch.anchor
            for fetch in (*self._by_query.values(), *self._by_read.values())
            if fetch.anchor is not None
        ]
        return anchors + [page for fetch in self._awaited for page in fetch.pages]

    def use_times(self, times: StorageTimes) -> None:
        """Deadlines from now on are those of this storage."""
        self._policy = replace(
            self._policy, exists_timeout_s=times.exists_s, read_timeout_s=times.operation_s
        )

    def fetches(self) -> set[Fetch]:
        """Fetches that run, and ended ones whose result some request has not taken yet."""
        return {*self._by_query.values(), *self._by_read.values(), *self._awaited}

    def linked_fetches(self) -> list[Fetch]:
        """Fetches that a newcomer would join, one entry a page."""
        return list(self._by_page.values())

    def take_published(self) -> list[HostPage]:
        """Pages that became visible since the last call."""
        published, self._published = self._published, []
        return published

    # Beginning and end of a request's interest -----------------------------------------------

    def start(self, state: RequestState, num_pages: int, namespace: str, now: float) -> None:
        """Look in storage for what host lacks of the first ``num_pages`` pages; the request may
        wait for it."""
        state.fetch = self.seek(state, num_pages, namespace, now)

    def seek(self, state: RequestState, num_pages: int, namespace: str, now: float) -> Fetch | None:
        """A fetch of what host lacks of the first ``num_pages`` pages, on which the request
        counts until ``let_go``; None where there is none, and ``why_no_fetch`` says why.

        A request whose first missing page is already being fetched joins that fetch.
        """
        hashes = state.tokens.page_hashes(num_pages)
        first = state.num_host_pages = self._host.index.match(hashes, num_pages)
        self._namespace = namespace
        state.why_no_fetch = ""
        if (num_pages - first) * self._page_size < max(self._policy.min_tokens, 1):
            state.why_no_fetch = "complete"
            return None
        fetch = self._by_page.get(hashes[first])
        if fetch is None:
            verdict = self._worth.fetch((num_pages - first) * self._page_size)
            if verdict is not Verdict.NO:
                fetch = self._ask(state, first, num_pages, now)
            if fetch is None:
                refused = verdict is Verdict.NO
                state.why_no_fetch = "recompute_faster" if refused else "unavailable"
                self._metrics.count("fetch_ended", 1, state.why_no_fetch)
                return None
            fetch.is_probe = verdict is Verdict.PROBE
        fetch.num_waiting += 1
        self._awaited.add(fetch)
        return fetch

    def leave(self, state: RequestState) -> None:
        """The request was admitted or has ended: it counts on no fetch any more."""
        retry, state.retry = state.retry, None
        if retry is not None:
            self._metrics.count("fetch_retries", 1, "left")
            self.let_go(retry)
        fetch, state.fetch = state.fetch, None
        if fetch is not None:
            self.let_go(fetch)
        earlier, state.earlier_fetches = state.earlier_fetches, ()
        for fetch in earlier:
            self.let_go(fetch)

    def let_go(self, fetch: Fetch) -> None:
        """One request fewer counts on this fetch. The last one to leave stops it."""
        fetch.num_waiting -= 1
        if fetch.num_waiting:
            return
        self._awaited.discard(fetch)
        self._unpin_pages(fetch)
        self._free_occupancy(fetch)
        if fetch.is_running:
            self._link.broadcast(Cancel(fetch.op or fetch.query_op))
            if fetch.stage is FetchStage.QUERYING:
                self._end(fetch, "cancelled")
            else:
                self._unlink(fetch, fetch.hashes)  # it may end short: nobody shall join it

    def should_wait(self, state: RequestState, num_local_tokens: int, now: float) -> bool:
        """Whether the lookup of this request shall be asked again later."""
        fetch = state.fetch
        if fetch is None or not fetch.is_running:
            return False
        if num_local_tokens >= (fetch.first_page + len(fetch.hashes)) * self._page_size:
            return False
        if state.waiting_since is None:
            state.waiting_since = now
        if state.num_retries and now - state.waiting_since >= self._longest_wait(fetch):
            return False
        if fetch.stage is FetchStage.QUERYING:
            return self._may_wait_for_answer(fetch, now - fetch.asked_at)
        if self._policy.kind == "best_effort":
            return False
        if self._policy.kind == "wait_complete":
            return now - fetch.read_at < self._policy.read_timeout_s
        return self._may_wait(fetch, now - state.waiting_since, now)

    def _may_wait_for_answer(self, fetch: Fetch, waited: float) -> bool:
        recompute = self._worth.costs.recompute_s(len(fetch.hashes) * self._page_size)
        if fetch.is_probe and recompute is not None:
            return waited < min(PATIENCE * recompute, self._policy.query_s)
        return waited < self._policy.query_s

    def _longest_wait(self, fetch: Fetch) -> float:
        """For all fetches of one request together, however often storage is asked."""
        if self._policy.kind == "wait_complete":
            return 2 * self._policy.read_timeout_s
        return self._policy.query_s + self._budget(fetch)

    def _budget(self, fetch: Fetch) -> float:
        tokens = len(fetch.hashes) * self._page_size
        return self._policy.base_s + tokens / 1024 * self._policy.per_1k_tokens_s

    def _may_wait(self, fetch: Fetch, waited: float, now: float) -> bool:
        """Within the budget, and while the fetch is predicted to end before computing would."""
        budget = self._budget(fetch)
        recompute = self._worth.costs.recompute_s(len(fetch.hashes) * self._page_size)
        if recompute is None:
            return waited < budget
        if waited >= min(budget, recompute):
            return False
        if not self._worth.is_on or waited < PATIENCE * recompute:
            return True
        remaining = self._remaining_s(fetch, now)
        return remaining is None or waited + remaining < recompute

    def _remaining_s(self, fetch: Fetch, now: float) -> float | None:
        """When the rest will be there, by what came so far or else by earlier fetches."""
        elapsed = now - fetch.asked_at
        num_pages, done = len(fetch.hashes), fetch.num_published
        if done:
            per_page, line = elapsed / done, self._worth.costs.fetch_line()
            if line is not None:  # part of the time until now was latency
                per_page = min(per_page, line[1] * self._page_size)
            return per_page * (num_pages - done)
        total = self._worth.costs.fetch_s(num_pages * self._page_size)
        if total is None:
            return None
        return total - elapsed if elapsed < total else elapsed  # overdue: as long again

    # Answers of the storage processes --------------------------------------------------------

    def handle(self, worker_id: int, event: FetchEvent, now: float) -> bool:
        """Take one answer; False when the operation is unknown (late, or of another life)."""
        if isinstance(event, ExistsResult):
            return self._handle_exists(worker_id, event, now)
        fetch = self._by_read.get(event.op)
        if fetch is None or fetch.read is None:
            return False
        known = True
        if isinstance(event, FetchReleased):
            fetch.read.settle(worker_id, "cancelled")
            fetch.read.released.add(worker_id)
        else:
            known = fetch.read.advance(worker_id, event.num_pages)
            if isinstance(event, FetchSettled):
                fetch.read.settle(worker_id, event.reason)
        self._advance(fetch, now)
        return known

    def lose_worker(self, worker_id: int, now: float) -> None:
        """A storage process died: its part of every fetch ends here."""
        for fetch in list(self._by_query.values()):
            self._end(fetch, "unavailable")
        for fetch in list(self._by_read.values()):
            if fetch.read is not None:
                fetch.read.settle(worker_id, "unavailable")
                self._advance(fetch, now)

    def regain_worker(self, worker_id: int, now: float) -> None:
        """Its successor said hello: nobody writes to the old slots any more."""
        for fetch in list(self._by_read.values()):
            if fetch.read is not None:
                fetch.read.released.add(worker_id)
                self._advance(fetch, now)

    def forget(self) -> None:
        """Reset: nothing that is being fetched may become visible."""
        for fetch in self._awaited:
            self._unpin_pages(fetch)
        for fetch in [*self._by_query.values(), *self._by_read.values()]:
            fetch.is_stale = True
            if fetch.is_running:
                self._link.broadcast(Cancel(fetch.op or fetch.query_op))
                self._end(fetch, "reset")

    # Stages ------------------------------------------------------------------------------------

    def _ask(self, state: RequestState, first: int, last: int, now: float) -> Fetch | None:
        hashes = state.tokens.page_hashes(last)
        wanted = list(hashes[first:last])
        op = self._link.next_number()
        message = Exists(op, self._namespace, pack_hashes(wanted), self._policy.query_s)
        query = WorldAnswer(self._link.world_size)
        if not self._link.broadcast(message, query) or query.is_settled:
            return None
        parent_hash = hashes[first - 1] if first else None
        anchor = self._host.index.get(parent_hash) if parent_hash is not None else None
        fetch = Fetch(
            first_page=first,
            hashes=wanted,
            parent_hash=parent_hash,
            anchor=anchor,
            namespace=self._namespace,
            tokens=state.tokens,
            tenant=state.tenant,
            query=query,
            query_op=op,
            asked_at=now,
            max_tokens=max(state.tokens.num_tokens - 1, 0),
        )
        if anchor is not None:
            self._host.pin([anchor])
        self._by_query[op] = fetch
        self._by_page.update(dict.fromkeys(wanted, fetch))
        return fetch

    def _handle_exists(self, worker_id: int, event: ExistsResult, now: float) -> bool:
        fetch = self._by_query.get(event.op)
        if fetch is None:
            return False
        if not fetch.query.advance(worker_id, event.num_leading):
            return False
        fetch.query.note_parts(worker_id, event.parts)
        fetch.query.settle(worker_id, "missing" if event.ok else event.reason or "unavailable")
        if fetch.query.is_settled:
            del self._by_query[event.op]
            self._read(fetch, now)
        return True

    def _read(self, fetch: Fetch, now: float) -> None:
        found = min(fetch.query.agreed, len(fetch.hashes))
        if self._usable is not None:
            fetch.parts = fetch.query.agreed_parts(found)
            found = self._usable.num_found(fetch.parts)
        fetch.found = fetch.hashes[:found]
        if found * self._page_size < max(self._policy.min_tokens, 1):
            self._end(fetch, fetch.query.reason if found == 0 else "missing")
            return
        if self._usable is not None:
            usable = self._usable.of_fetch(fetch, fetch.parts[:found])
            fetch.is_cut = usable < found
            found = usable
            if found == 0:
                self._end(fetch, "missing_pool")
                return
        if not fetch.is_probe and self._worth.fetch(found * self._page_size) is Verdict.NO:
            self._end(fetch, "recompute_faster")
            return
        room = self._room(fetch.tenant)
        slots = self._host.allocate(max(0, min(found, room)))
        if not slots:
            self._end(fetch, "tenant_limit" if self._room("") > room <= 0 else "host_full")
            return
        self._unlink(fetch, fetch.hashes[len(slots) :])
        fetch.hashes = fetch.hashes[: len(slots)]
        op = self._link.next_number()
        message = FetchMessage(
            op,
            fetch.namespace,
            pack_hashes(fetch.hashes),
            pack_slots(slots),
            self._policy.read_timeout_s,
            bytes(fetch.parts[: len(slots)]),
        )
        read = WorldAnswer(self._link.world_size)
        if not self._link.broadcast(message, read) or read.is_settled:
            self._host.free(slots)
            self._end(fetch, "unavailable")
            return
        fetch.op, fetch.slots, fetch.read_at, fetch.read = op, slots, now, read
        fetch.stage = FetchStage.READING
        self._num_slots += len(slots)
        fetch.num_occupied = len(slots)
        self._occupied[fetch.tenant] += len(slots)
        self._by_read[op] = fetch

    def _room(self, tenant: str) -> int:
        """Host pages that this tenant's fetches may still fill."""
        num_slots, policy = self._host.slots.num_ready, self._policy
        room = int(num_slots * policy.max_share) - self._occupied.total()
        if tenant:
            of_tenant = int(num_slots * policy.max_tenant_share) - self._occupied[tenant]
            room = min(room, of_tenant)
        return room

    def _free_occupancy(self, fetch: Fetch) -> None:
        """Neither a worker nor a request is left that needs the pages where they are."""
        if fetch.num_occupied and not fetch.num_waiting and fetch.op not in self._by_read:
            self._occupied[fetch.tenant] -= fetch.num_occupied
            fetch.num_occupied = 0
            if not self._occupied[fetch.tenant]:
                del self._occupied[fetch.tenant]

    def _advance(self, fetch: Fetch, now: float) -> None:
        read = fetch.read
        if read is None:
            return
        self._publish(fetch, min(read.agreed, len(fetch.slots)))
        if read.is_settled and fetch.is_running:
            reason = "complete" if read.agreed == len(fetch.slots) else read.reason
            self._measure(read, now - fetch.asked_at)
            self._end(fetch, reason)
        if read.is_released and read.is_settled:
            del self._by_read[fetch.op]
            rest = fetch.slots[fetch.num_published :]
            self._host.free(rest)
            self._num_slots -= len(rest)
            self._free_occupancy(fetch)

    def _measure(self, read: WorldAnswer, seconds: float) -> None:
        """What this fetch says of storage, also one that was given up."""
        self._metrics.observe("fetch_seconds", seconds)
        if read.agreed:
            self._worth.costs.fetched(read.agreed * self._page_size, seconds)
        elif read.reason in ("deadline", "cancelled"):
            self._worth.costs.stalled(self._page_size, seconds)

    def _publish(self, fetch: Fetch, agreed: int) -> None:
        if fetch.is_stale:
            return
        while fetch.num_published < agreed:
            i = fetch.num_published
            page_hash = fetch.hashes[i]
            parent_hash = fetch.hashes[i - 1] if i else fetch.parent_hash
            parts = fetch.parts[i] if fetch.parts else 0
            user = fetch.tokens.request_id
            page = self._host.publish(page_hash, parent_hash, fetch.slots[i], parts, user)
            fetch.num_published += 1
            self._num_slots -= 1
            if page is not None:
                page.origin = Tier.STORAGE
                page.note = fetch.tokens.note(fetch.first_page + i)
                self._published.append(page)
            else:
                page = self._host.index.get(page_hash)  # saved meanwhile, or its parent has left
            if page is None:
                continue
            page.is_persisted = True
            if fetch.num_waiting:
                self._host.pin([page])
                fetch.pages.append(page)

    def _end(self, fetch: Fetch, reason: str) -> None:
        fetch.stage, fetch.reason = FetchStage.ENDED, reason
        self._by_query.pop(fetch.query_op, None)
        if fetch.anchor is not None:
            self._host.unpin([fetch.anchor])
            fetch.anchor = None
        self._unlink(fetch, fetch.hashes)
        self._metrics.count("fetch_ended", 1, reason)

    def _unlink(self, fetch: Fetch, hashes: list[bytes]) -> None:
        for page_hash in hashes:
            if self._by_page.get(page_hash) is fetch:
                del self._by_page[page_hash]

    def _unpin_pages(self, fetch: Fetch) -> None:
        self._host.unpin(fetch.pages)
        fetch.pages = []

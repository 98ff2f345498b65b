"""Every promise of DESIGN section 4, and "never wrong", checked against contents.

The rules that the planner's own records can tell are those of ``vllm_hicache.audit``; here they
meet what virtual memory really holds and what vLLM was really told.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from vllm_hicache.audit import check
from vllm_hicache.loads import RunningLoad
from vllm_hicache.planner import Match, Planner
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.request_state import RequestState
from vllm_hicache.simulate.channels import VirtualChannels
from vllm_hicache.simulate.contents import Violation
from vllm_hicache.simulate.device_pool import DevicePool
from vllm_hicache.simulate.requests import Request
from vllm_hicache.simulate.storage import Stores
from vllm_hicache.simulate.truth import Truth
from vllm_hicache.simulate.workers import VirtualWorker

TIERS = ("host", "storage")


class Invariants:
    """Raises ``Violation`` or ``InvariantBroken`` where a promise is broken."""

    def __init__(
        self,
        planner: Planner,
        pool: DevicePool,
        workers: list[VirtualWorker],
        truth: Truth,
        stores: Stores,
        channels: VirtualChannels | None,
    ) -> None:
        self._planner = planner
        self._pool = pool
        self._workers = workers
        self._truth = truth
        self._stores = stores
        self._channels = channels
        self._page = planner.options.page_size
        self._block = planner.options.block_size
        self._granule = min(self._page, self._block)
        self._checked: dict[int, HostPage] = {}
        self._stored: set[HostPage] = set()
        self._attachments: list[int] = []

    # After every step --------------------------------------------------------------------------

    def check_step(self, *, is_idle: bool = False) -> None:
        """All rules on records, then what changed in host memory since the last check."""
        check(self._planner, is_idle=is_idle, num_held_blocks=self._pool.num_held)
        self._check_ready_slots()
        changed: set[int] = set()
        for worker in self._workers:
            if worker.changed_slots:
                changed |= worker.changed_slots
                worker.changed_slots.clear()
        for slot in changed:
            self._checked.pop(slot, None)
        self._check_pages()

    def check_all(self, *, is_idle: bool) -> None:
        """The same, with everything in host memory looked at again."""
        self._checked.clear()
        self._stored.clear()
        self.check_step(is_idle=is_idle)

    def _check_ready_slots(self) -> None:
        """No slot is handed out before every worker has its memory."""
        offered, ready = self._planner.host.slots.num_ready, min(w.num_ready for w in self._workers)
        if offered > ready:
            raise Violation(f"{offered} host slots are handed out, {ready} have memory everywhere")

    def _check_pages(self) -> None:
        checked, stored = self._checked, self._stored
        if self._channels is not None and self._channels.attachments != self._attachments:
            self._attachments = list(self._channels.attachments)
            stored.clear()
        # While workers change storage one after the other, the last change decides.
        is_settled = len(set(self._attachments)) == 1
        for page in self._planner.host.index.pages():
            if checked.get(page.slot) is not page:
                self._check_page(page)
                checked[page.slot] = page
            if is_settled and page.is_persisted and page not in stored:
                self._check_stored(page)
                stored.add(page)

    def _check_page(self, page: HostPage) -> None:
        """Never wrong: a page in host holds the right bytes on every worker."""
        expected = list(self._truth.expected(self._planner.namespace, page.page_hash))
        for worker in self._workers:
            if worker.host[page.slot] != expected:
                raise Violation(
                    f"slot {page.slot} of worker {worker.worker_id} holds "
                    f"{worker.host[page.slot]}, its page should hold {expected}"
                )

    def _check_stored(self, page: HostPage) -> None:
        for worker, attachment in zip(self._workers, self._attachments, strict=True):
            key = (self._planner.namespace, page.page_hash, worker.worker_id)
            if key not in self._stores.ever[attachment]:
                raise Violation(
                    f"the page in slot {page.slot} counts as stored, but worker "
                    f"{worker.worker_id} never had it in storage {attachment}"
                )

    # What vLLM is told -------------------------------------------------------------------------

    def check_offer(self, request: Request, num_local: int, match: Match) -> None:
        """Never wrong: no token is claimed before every worker has the right bytes."""
        num_tokens = match.num_tokens or 0
        end = num_local + num_tokens
        if num_tokens % self._block or (match.is_async and not num_tokens):
            raise Violation(f"an offer of {num_tokens} tokens, asynchronous={match.is_async}")
        if not num_tokens:
            return
        if end >= request.tokens.num_tokens:
            raise Violation(f"an offer up to token {end} of {request.tokens.num_tokens}")
        last = -(-end // self._page)
        hashes = list(request.tokens.page_hashes(last))
        for page_hash in hashes[num_local // self._page : last]:
            page = self._planner.host.index.get(page_hash)
            if page is None:
                raise Violation(f"{request.request_id}: an offered page is not in host")
            self._check_page(page)

    def check_targets(self, load: RunningLoad) -> None:
        """Rule 5: nobody else can read the blocks that a load is going to write to."""
        for block_id in load.block_ids:
            if self._pool.is_readable_by_others(block_id):
                raise Violation(f"a load is planned into block {block_id}, others may read it")

    def check_device(self, request: Request) -> None:
        """Every worker's blocks hold what was loaded or computed, and the tokens add up."""
        width = self._block // self._granule
        for worker in self._workers:
            held = [tag for block_id in request.block_ids for tag in worker.device[block_id]]
            if held[: len(request.tags)] != request.tags:
                raise Violation(f"worker {worker.worker_id} has wrong KV of {request.request_id}")
        if len(request.tags) != request.num_computed * width // self._block:
            raise Violation(f"{request.request_id}: {len(request.tags)} tags, wrong number")
        parts = (request.num_local, request.num_external, request.num_forwarded)
        if sum(parts) != request.num_computed:
            raise Violation(
                f"{request.request_id}: local, external, computed {parts} do not add up to "
                f"{request.num_computed}"
            )

    def check_answer(self, request: Request) -> None:
        """An answer must have been computed on the right KV, on every worker."""
        self.check_device(request)

    def check_wait(self, request: Request, num_local: int, now: float) -> None:
        """Never in the way: waiting for a fetch has an end, whatever storage does."""
        hashes = request.tokens.hashes
        first = num_local // self._page
        if first < len(hashes) and self._planner.loads.is_landing(hashes[first]):
            request.deferred_at = None
            return
        if request.deferred_at is None:
            request.deferred_at = request.asked_at = now
        # An answer that came between two lookups is as old as the second one.
        request.longest_gap = max(request.longest_gap, now - request.asked_at)
        request.asked_at = now
        policy = self._planner.options.fetch
        if policy.kind == "wait_complete":
            limit = 2 * policy.read_timeout_s
        else:
            tokens = request.tokens.num_tokens / 1024 * policy.per_1k_tokens_s
            limit = policy.exists_timeout_s + policy.base_s + tokens
        if now - request.deferred_at > limit + request.longest_gap:
            raise Violation(
                f"{request.request_id} waits for storage since {now - request.deferred_at:.3f} s, "
                f"its policy {policy.kind} allows {limit:.3f} s"
            )

    def check_fetches(self, states: Iterable[RequestState]) -> None:
        """A fetch counts the requests that count on it; nobody does who needs nothing more."""
        prefetcher = self._planner.prefetcher
        if prefetcher is None:
            return
        counts: Counter[object] = Counter()
        for state in states:
            fetches = [*state.earlier_fetches, *filter(None, (state.fetch, state.retry))]
            if fetches and (state.is_admitted or state.is_finished):
                raise Violation(f"{state.request_id} needs nothing and counts on fetches")
            counts.update(fetches)
        for fetch in prefetcher.fetches():
            if fetch.num_waiting != counts.pop(fetch, 0):
                raise Violation(
                    f"fetch {fetch.query_op} counts {fetch.num_waiting} requests, wrong"
                )
        if counts:
            raise Violation(f"requests count on {len(counts)} fetches that are forgotten")

    @contextmanager
    def plan(self, waiting: Sequence[Request], others: Iterable[RequestState]) -> Iterator[None]:
        """Storage is asked again for requests that wait, and for nobody else; nor more often
        than the limit says, nor with more work than their questions need. (`write_back` looks at
        hashes of whom it saves for, and of those that wait after a preemption.)"""
        before = [(state, state.num_retries) for state in others]
        with ExitStack() as stack:
            for request in waiting if self._planner.write_back is None else ():
                stack.enter_context(self.work(request, 0))
            yield
        for state, num_retries in before:
            if state.num_retries != num_retries:
                raise Violation(f"storage is asked again for {state.request_id}, which waits not")
        for request in waiting:
            if request.state.num_retries > self._planner.options.fetch.max_retries:
                raise Violation(f"storage is asked too often for {request.request_id}")

    # The ledger and the work of a step ---------------------------------------------------------

    @contextmanager
    def admission(self, request: Request) -> Iterator[None]:
        """Rule 4: what an admission books as found is what host has beyond the local hit, and
        what it had when vLLM was offered it."""
        in_host = self._leading_pages(request) * self._page
        found = max(0, max(in_host, request.offered_end) - request.num_local)
        before = self.totals("found_tokens")
        yield
        booked = self.totals("found_tokens") - before
        if booked < found or request.num_local + booked > request.tokens.num_tokens:
            raise Violation(
                f"{request.request_id}: {found} tokens beyond {request.num_local} are in host, "
                f"{booked} are booked as found, of {request.tokens.num_tokens}"
            )

    @contextmanager
    def ending(self, request: Request) -> Iterator[None]:
        """Rule 4: what a request was offered and did not live to be given is booked as well."""
        was_admitted = request.state.is_admitted
        before = self.totals("unserved_tokens")
        yield
        booked = self.totals("unserved_tokens") - before
        if not was_admitted and booked < request.offered_end - request.num_local:
            raise Violation(
                f"{request.request_id} ended before it was admitted; it was offered tokens up to "
                f"{request.offered_end} beyond {request.num_local}, {booked} are booked"
            )

    @contextmanager
    def no_finding(self, request: Request) -> Iterator[None]:
        """Rule 4: a request that has its load is not booked as found once more."""
        before = self.totals("found_tokens")
        yield
        if self.totals("found_tokens") != before:
            raise Violation(f"{request.request_id} is booked as found twice")

    @contextmanager
    def work(self, request: Request, last_page: int) -> Iterator[None]:
        """Rule 7: hashes looked at are as many as the pages that host lacks, and a few; a page
        is counted, or pinned, once for each request that uses it. Without a ``last_page`` pages
        that host lacks are looked at only where storage is asked again."""
        state = request.state
        hashes = request.tokens.hashes
        pages = last_page or request.tokens.num_tokens // self._page
        missing = max(0, pages - self._leading_pages(request))
        before, num_used, num_saved = hashes.num_reads, state.num_used_pages, state.num_saved_pages
        num_retries = state.num_retries
        yield
        num_new = missing if last_page or state.num_retries > num_retries else 0
        num_new += state.num_used_pages - num_used
        num_new += state.num_saved_pages - num_saved if state.pin_s else 0
        limit = 4 * num_new + 2 * len(hashes).bit_length() + 6
        if hashes.num_reads - before > limit:
            raise Violation(
                f"{request.request_id}: {hashes.num_reads - before} hashes were looked at for "
                f"{num_new} missing or newly used pages of {len(hashes)}"
            )

    def check_ledger(self, num_local: int, num_landed: int) -> None:
        """Per tier: found = served + the sum of reasons; served is what vLLM really got."""
        totals = self._planner.metrics.totals()
        for tier in TIERS:
            found, served = totals[f"found_tokens/{tier}"], totals[f"served_tokens/{tier}"]
            missed = totals[f"unserved_tier_tokens/{tier}"]
            if found != served + missed:
                raise Violation(f"{tier}: {found} tokens found, {served} served, {missed} not")
        reasons, missed = self.totals("unserved_tokens"), self.totals("unserved_tier_tokens")
        if reasons != missed:
            raise Violation(f"{missed} found tokens were not served, {reasons} have a reason")
        if self.totals("served_tokens") != num_landed:
            raise Violation(f"{self.totals('served_tokens')} served, {num_landed} have landed")
        if totals["local_tokens"] != num_local:
            raise Violation(f"{totals['local_tokens']} local tokens counted, {num_local} were")

    def totals(self, name: str) -> int:
        """A series summed over its labels."""
        totals = self._planner.metrics.totals()
        return int(sum(v for key, v in totals.items() if key.startswith(f"{name}/")))

    def _leading_pages(self, request: Request) -> int:
        index, number = self._planner.host.index, 0
        pages = request.tokens.num_tokens // self._page
        hashes = request.tokens.page_hashes(pages)
        for page_hash in hashes:
            if page_hash not in index or number == pages:
                break
            number += 1
        return number

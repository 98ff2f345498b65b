"""The scheduler's decisions: what a request may skip, what is copied, what becomes of it.

Every method is a question or a commit on the scheduler's thread; none blocks, and the caller
brings the time. Order within one step of vLLM:

    add_request, match, begin_load, collect_saves ... plan_step      (scheduler, before the step)
    settle_copies, settle_storage                                    (when workers have answered)
    admit, finish                                                    (a request's life)
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from vllm_hicache.copied_bytes import CopiedBytes
from vllm_hicache.cost_model import CostModel
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.fetch_retries import FetchRetries
from vllm_hicache.gauges import Gauges
from vllm_hicache.host_tier import HostTier
from vllm_hicache.loads import Loads, RunningLoad
from vllm_hicache.metrics import Ledger, Metrics
from vllm_hicache.persists import Persists
from vllm_hicache.pins import PinnedPages
from vllm_hicache.plan import Direction, StepPlan
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.prefetch import Prefetcher
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.progress import Outcome, ProgressJoin
from vllm_hicache.refusals import Refusals
from vllm_hicache.request_state import DeviceBlocks, DeviceQueue, RequestState
from vllm_hicache.saves import Saves
from vllm_hicache.settled import NOTHING_SETTLED, Settled
from vllm_hicache.storage_answers import StorageAnswers
from vllm_hicache.storage_link import StorageLink
from vllm_hicache.unserved import Unserved
from vllm_hicache.usable_pages import UsablePages
from vllm_hicache.worth import Verdict, Worth
from vllm_hicache.write_back import WriteBack


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of a lookup: tokens beyond vLLM's own hit, or None for "ask again"."""

    num_tokens: int | None
    is_async: bool = False


NO_MATCH = Match(0)
ASK_AGAIN = Match(None)


class Planner:
    """One engine's cache. Not thread-safe: it lives on the scheduler's thread."""

    def __init__(
        self,
        options: PlannerOptions,
        blocks: DeviceBlocks,
        metrics: Metrics,
        *,
        link: StorageLink | None,
        namespace: str,
        on_evict: Callable[[HostPage], None] | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        self.options = options
        self.metrics = metrics
        self.namespace = namespace
        self.link = link
        self.ledger = Ledger(metrics)
        self.costs = CostModel()
        self.worth = Worth(
            self.costs,
            max(options.page_bytes) / options.page_size,
            is_on=options.skip_slow_loads,
        )
        self.join = ProgressJoin(len(options.page_bytes), options.first_slots)
        self._blocks = blocks
        self.host = HostTier(
            options.num_host_slots, options.eviction, on_evict, num_ready=options.first_slots
        )
        page_size, groups = options.page_size, options.kv_groups
        rules = options.hit_rules()
        self.usable = UsablePages(
            rules,
            self.host.index,
            self.costs,
            page_size=page_size,
            draft_miss=options.draft_miss,
            has_required=any(group.bit is None for group in groups),
        )
        self.saves = Saves(
            self.host,
            blocks,
            metrics,
            page_size=page_size,
            groups=groups,
            uses=options.page_uses(),
            min_uses=options.min_uses_to_save,
        )
        self.write_back = WriteBack.create(options, self.saves, self.host, queue, metrics)
        self.pins = PinnedPages(
            self.host, metrics, max_share=options.max_pinned_share, page_size=page_size
        )
        self.loads = Loads(self.host, metrics, self.ledger, page_size=page_size, groups=groups)
        self.unserved = Unserved(self.ledger, page_size=options.page_size)
        self.prefetcher: Prefetcher | None = None
        self.retries: FetchRetries | None = None
        self.persists: Persists | None = None
        self.answers: StorageAnswers | None = None
        if link is not None:
            self.prefetcher = Prefetcher(
                self.host,
                link,
                metrics,
                self.worth,
                options.fetch,
                page_size=page_size,
                usable=None if rules.is_trivial else self.usable,
            )
            if options.fetch.max_retries:
                self.retries = FetchRetries(self.prefetcher, metrics, options)
            self.persists = Persists(
                self.host,
                link,
                metrics,
                page_size=page_size,
                deadline_s=options.persist_timeout_s,
                has_parts=not rules.is_trivial,
            )
            self.answers = StorageAnswers(link, self.persists, self.prefetcher, metrics)
        self._finished_saves: deque[Outcome] = deque()
        self._plan_numbers = count(1)
        self._failed_requests: list[str] = []
        self._deferred_blocks = 0
        self._was_busy = False
        self._num_busy_steps = 0
        self._copy_seconds = 0.0
        self._bytes = CopiedBytes(options)
        self.gauges = Gauges(self)

    # A request's life --------------------------------------------------------------------------

    def add_request(self, state: RequestState, now: float) -> None:
        """Arrival: start looking in storage for what host lacks."""
        self.metrics.count("lookups")
        self.metrics.count("lookup_tokens", state.tokens.num_tokens)
        if state.may_load and self.prefetcher is not None:
            pages = self.options.wanted_pages(state.tokens.num_tokens)
            if pages:
                self.prefetcher.start(state, pages, self.namespace, now)
                if self.retries is not None:
                    self.retries.line_up(state, now)

    def match(self, state: RequestState, num_local_tokens: int, now: float) -> Match:
        """How many tokens beyond vLLM's own hit are in host on every worker.

        Idempotent: vLLM repeats it every step until the request gets blocks.
        """
        self.unserved.note_refusal(state)
        state.num_local_tokens, state.num_offered_tokens = num_local_tokens, 0
        state.is_outdated = False  # who is looked up holds no blocks
        answer = self._match(state, num_local_tokens, now)
        if answer.num_tokens is None:
            self.metrics.count("deferred_lookups")
        else:
            state.num_offered_tokens, state.is_offer_async = answer.num_tokens, answer.is_async
        return answer

    def _match(self, state: RequestState, num_local: int, now: float) -> Match:
        page_size, block_size = self.options.page_size, self.options.block_size
        num_pages = state.tokens.num_tokens // page_size
        hashes = state.tokens.page_hashes(num_pages)
        in_host = self.host.index.match(hashes, num_pages) * page_size
        state.num_found_tokens = max(0, in_host - num_local)
        if not state.may_load:
            state.withheld_reason = state.why_not
            return NO_MATCH
        state.withheld_reason = "cap"
        can_defer = self._can_defer(num_local)
        waits_for_fetch = self._waits_for_fetch(state, in_host, num_local, now)
        if waits_for_fetch and can_defer:
            return self._defer(num_local)
        state.is_over_budget = waits_for_fetch
        cap = self.options.usable_tokens(state.tokens.num_tokens)
        within = min(in_host, cap) - self.options.num_unsure_tokens
        usable = self.usable.in_host(hashes, in_host // page_size, within)
        usable = usable // block_size * block_size
        if usable < within // block_size * block_size:
            state.withheld_reason = "missing_pool"
        if usable <= num_local:
            return NO_MATCH
        if self._is_landing(hashes[num_local // page_size]) and can_defer:
            return self._defer(num_local)
        num_tokens = usable - num_local
        is_async = not self._is_quick(num_tokens)
        if state.verdict is None or state.verdict[0] != num_tokens:
            state.verdict = num_tokens, self.worth.load(num_tokens, is_async=is_async)
        if state.verdict[1] is Verdict.NO:
            state.withheld_reason = "recompute_faster"
            return NO_MATCH
        if is_async and self._is_shut_out(state, num_tokens, now):
            state.withheld_reason = "no_blocks"
            return NO_MATCH
        if is_async and self.loads.is_prefix_in_doubt(hashes, num_local):
            # Should that load fail, vLLM has one of the two compute the shared blocks, not both.
            state.withheld_reason = "deferred_budget"
            return self._defer(num_local) if can_defer else NO_MATCH
        return Match(num_tokens, is_async)

    def _waits_for_fetch(
        self, state: RequestState, in_host: int, num_local: int, now: float
    ) -> bool:
        if self.prefetcher is None:
            return False
        if self.retries is not None:
            num_pages = in_host // self.options.page_size
            self.retries.look_up(state, num_pages, num_local, self.namespace, now)
        return self.prefetcher.should_wait(state, num_local, now)

    def admit(self, state: RequestState) -> None:
        """The request got its blocks and needs nothing more of host: what was found and not
        offered gets its reason, what was kept for it is let go."""
        self._admit(state, 0)

    def _admit(self, state: RequestState, num_loaded: int) -> None:
        if state.is_admitted:
            return
        state.is_admitted = True
        self.metrics.count("local_tokens", state.num_local_tokens)
        if self.retries is not None:
            self.retries.settle(state)
        self.unserved.book(state, num_loaded)
        if self.prefetcher is not None:
            self.prefetcher.leave(state)

    def begin_load(
        self,
        state: RequestState,
        num_tokens: int,
        block_ids: list[int],
        now: float,
        other_tables: Sequence[Sequence[int]] = (),
    ) -> RunningLoad:
        """vLLM gave blocks for ``num_tokens`` of the last offer: plan the copy. The tables are
        those of the whole request, ``other_tables`` of KV cache groups behind the first one."""
        if num_tokens > state.num_offered_tokens:
            raise InvariantBroken(
                f"request {state.request_id}: vLLM expects {num_tokens} tokens, "
                f"the last lookup offered {state.num_offered_tokens}"
            )
        if self.write_back is not None:
            self.write_back.count_taken(len(block_ids))
        load = self.loads.begin(state, num_tokens, (block_ids, *other_tables), now)
        load.num_busy_steps = self._num_busy_steps
        self._admit(state, load.num_tokens)
        return load

    def collect_saves(self, state: RequestState, num_tokens: int, now: float) -> None:
        """The first ``num_tokens`` are on the device after this step: save what host lacks."""
        had_pages = state.num_saved_pages
        self.saves.collect(state, num_tokens, now, self.loads.doubts(state.block_ids))
        if state.pin_s and state.num_saved_pages > had_pages:
            self.pins.keep(state, had_pages, state.num_saved_pages, now)
        if self.persists is None or had_pages or not state.num_saved_pages:
            return
        hashes = state.tokens.page_hashes(state.num_saved_pages)
        present = self.host.index.match(hashes, state.num_saved_pages)
        page = self.host.index.get(hashes[present - 1]) if present else None
        if page is not None:
            self.persists.catch_up(page, self.namespace, now)

    def preempt(self, state: RequestState) -> None:
        """vLLM took the blocks back; running copies hold theirs and go on."""
        state.block_ids, state.other_tables = [], ()
        state.num_saved_pages = 0
        state.is_admitted = state.lacks_draft_state = False
        state.verdict = None
        state.num_offered_tokens, state.refused = 0, Refusals()
        state.waiting_since = None  # another stay in the queue, with a budget of its own

    def finish(self, state: RequestState, now: float) -> None:
        """The request has ended. A running load goes on until every worker has answered."""
        state.is_finished = True
        if self.retries is not None:
            self.retries.settle(state)
        if not state.is_admitted:
            self.unserved.book(state, 0, "aborted")
        if state.pin_s and state.num_saved_pages:
            self.pins.keep(state, 0, state.num_saved_pages, now)
        if self.prefetcher is not None:
            self.prefetcher.leave(state)
        if state.load is None:
            self.ledger.close(state.request_id, "aborted")

    # Steps -------------------------------------------------------------------------------------

    def plan_step(self, *, is_busy: bool, now: float) -> StepPlan:
        """Everything that was decided since the last step, numbered."""
        if self.write_back is not None:
            self.write_back.plan(now)
        if self.retries is not None:
            self.retries.ask_due(self.namespace, now)
        self._deferred_blocks = 0
        self._was_busy = is_busy
        self._num_busy_steps += is_busy
        if self.loads.has_failed_lately:
            self._blocks.forget_cached()
        sync_loads, loads = self.loads.take_planned()
        failed, self._failed_requests = tuple(self._failed_requests), []
        return StepPlan(
            number=next(self._plan_numbers),
            sync_loads=sync_loads,
            loads=loads,
            saves=self.saves.take_planned(),
            failed_requests=failed,
        )

    @property
    def holds_device_blocks(self) -> bool:
        """Whether steps must go on although no request runs: copies are acknowledged in steps."""
        running = self.saves.num_running + self.loads.num_running
        return running > 0 or bool(self._failed_requests)

    def settle_slots(self) -> None:
        """Use host slots that have got their memory on every worker."""
        if self.join.has_new_slots:
            num_ready, num_refused = self.join.take_slots()
            self.host.make_ready(num_ready, self.options.num_host_slots - num_refused)
            self.gauges.show_slots()

    def settle_copies(self, now: float) -> Settled:
        """Consume what all workers have finished, in order."""
        self.settle_slots()
        self.pins.expire(now)
        num_failed = self.loads.num_failed_visibly
        self.loads.distrust(self.join.failures(Direction.LOAD))
        loaded, failed = self._settle_loads(now)
        if self.loads.num_failed_visibly > num_failed:
            self._blocks.forget_cached()  # before the next lookup
        published = self._settle_saves(now)
        if not (loaded or failed or published):
            return NOTHING_SETTLED
        return Settled(tuple(loaded), tuple(failed), tuple(published))

    def _settle_saves(self, now: float) -> list[HostPage]:
        """In order; one that was computed on top of a load waits for that load's outcome."""
        published: list[HostPage] = []
        finished = self._finished_saves
        finished += self.join.consume(Direction.SAVE)
        while finished and self.saves.can_settle(finished[0].op_id):
            outcome = finished.popleft()
            pages = self.saves.settle(outcome, now)
            self.metrics.count("saved_bytes", self._bytes.of_pages(pages))
            if pages and self.persists is not None:
                self.persists.start(pages, self.namespace, now)
            self.pins.arrived(pages)
            published += pages
        completed = self.saves.take_completed()
        if completed and self.persists is not None:
            self.persists.start(completed, self.namespace, now)
        return published

    def _settle_loads(self, now: float) -> tuple[list[RunningLoad], list[RunningLoad]]:
        loaded: list[RunningLoad] = []
        failed: list[RunningLoad] = []
        num_tokens = 0
        for outcome in self.join.consume(Direction.LOAD):
            load = self._settle_load(outcome, now)
            num_tokens += load.num_tokens
            is_usable = outcome.is_ok and not load.is_stale
            (loaded if is_usable or load.state.is_finished else failed).append(load)
        if num_tokens:
            busy = self.join.busy_seconds(Direction.LOAD)
            slowest_bytes = num_tokens * max(self.options.page_bytes) // self.options.page_size
            self.costs.copied(slowest_bytes, busy - self._copy_seconds)
            self._copy_seconds = busy
        return loaded, failed

    def _settle_load(self, outcome: Outcome, now: float) -> RunningLoad:
        load = self.loads.settle(outcome, now)
        num_bytes = self._bytes.of_copies((load.copies, *load.other_copies))
        self.metrics.count("loaded_bytes", num_bytes, "async" if load.is_async else "sync")
        state = load.state
        is_beside_steps = load.num_busy_steps != self._num_busy_steps
        if load.is_async and outcome.is_ok and not is_beside_steps:
            num_bytes = load.num_tokens * max(self.options.page_bytes) // self.options.page_size
            self.costs.loaded(num_bytes, now - load.started_at)
        if not outcome.is_ok:
            self.pins.drop_absent()
            # The same pages would fail again: this request computes the rest itself.
            state.may_load, state.why_not = False, "load_failed"
        if load.is_async and not state.is_finished and (load.is_stale or not outcome.is_ok):
            self._failed_requests.append(state.request_id)
            self.preempt(state)
            state.is_outdated = True  # until vLLM hears of it, it takes the blocks for filled
        if state.is_finished and state.load is None:
            self.ledger.close(state.request_id, "aborted")
        return load

    # Storage -----------------------------------------------------------------------------------

    def settle_storage(self, now: float) -> None:
        """Take what the storage processes said since the last call."""
        if self.answers is not None:
            self.answers.settle(now)

    # Whole cache -------------------------------------------------------------------------------

    def reset(self, namespace: str, requests: Iterable[RequestState] = ()) -> None:
        """Forget host and everything under way; storage is used under ``namespace`` from now on.
        What ``requests`` (all that live) have on the device is not saved until it is recomputed.

        Copies that run keep their slots and blocks until they are acknowledged.
        """
        self.saves.forget()
        self.loads.forget()
        self.pins.forget()
        if self.write_back is not None:
            self.write_back.forget()
        for state in requests:
            self.unserved.note_refusal(state)
            state.refused = Refusals(state.refused.end, "reset")
            state.is_outdated |= state.is_admitted or bool(state.block_ids)
            if self.retries is not None:
                self.retries.forget(state)
        if self.prefetcher is not None:
            self.prefetcher.forget()
        if self.persists is not None:
            self.persists.forget()
        self.host.clear()
        self.namespace = namespace
        self.metrics.count("resets")

    def take_fetched(self) -> list[HostPage]:
        """Pages from storage that became visible since the last call."""
        pages = self.prefetcher.take_published() if self.prefetcher is not None else []
        if pages:
            self.pins.arrived(pages)
            self.metrics.count("fetched_bytes", self._bytes.of_pages(pages))
        return pages

    def take_persisted(self) -> list[HostPage]:
        """Pages that storage holds since the last call."""
        return self.persists.take_stored() if self.persists is not None else []

    @property
    def num_storage_changes(self) -> int:
        """How often a worker's storage was attached, detached or replaced since the start."""
        return self.answers.num_changes if self.answers is not None else 0

    def take_near_misses(self) -> list[bytes]:
        """Records of namespaces that storage found close to this engine's, since the last call."""
        return self.answers.take_near_misses() if self.answers is not None else []

    # Pure questions ----------------------------------------------------------------------------

    def _is_landing(self, page_hash: bytes) -> bool:
        return self.options.shares_device_pages and self.loads.is_landing(page_hash)

    def _is_shut_out(self, state: RequestState, num_tokens: int, now: float) -> bool:
        """Whether vLLM will not take the load for long, and has blocks for computing instead."""
        needed = sum(
            -(-state.tokens.num_tokens // group.block_size)
            - state.num_local_tokens // group.block_size
            for group in self.options.kv_groups
        )
        return state.refused.is_shut_out(
            has_room=needed <= self._blocks.num_free,
            recompute_s=self.costs.recompute_s(num_tokens),
            now=now,
        )

    def _can_defer(self, num_local_tokens: int) -> bool:
        """Each "ask again" makes vLLM repeat its own lookup of the cached blocks."""
        blocks = num_local_tokens // self.options.block_size
        return self._deferred_blocks + blocks <= self.options.defer_max_blocks

    def _defer(self, num_local_tokens: int) -> Match:
        self._deferred_blocks += num_local_tokens // self.options.block_size + 1
        return ASK_AGAIN

    def _is_quick(self, num_tokens: int) -> bool:
        """Whether a copy is better waited for than scheduled around."""
        if self.options.loads_by_layer:
            return True
        if self.options.sync_load_max_s <= 0 or len(self.options.kv_groups) > 1:
            return False  # vLLM takes no failed blocks where ids mean something in a group only
        if self.loads.num_running:
            return False  # it would stand in line behind a longer copy
        if not self._was_busy:
            return True
        num_bytes = num_tokens * max(self.options.page_bytes) // self.options.page_size
        return self.costs.load_s(num_bytes) <= self.options.sync_load_max_s

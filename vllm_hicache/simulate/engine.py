"""A small vLLM around a real planner: scheduler, prefix cache, block pool, requests.

It calls the planner as ``connectors/scheduler_side.py`` does, in vLLM's order of hooks.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

from vllm_hicache.planner import Planner
from vllm_hicache.request_state import RequestState
from vllm_hicache.simulate.clock import Clock
from vllm_hicache.simulate.contents import Violation, namespace_of, next_tag, pure_tags
from vllm_hicache.simulate.device_pool import DevicePool
from vllm_hicache.simulate.invariants import Invariants
from vllm_hicache.simulate.requests import Request, Status, Tokens
from vllm_hicache.simulate.steps import Item, Step

IGNORED_OFFERS = 0.05
"""How often vLLM does not take what it was offered."""


class VirtualEngine:
    """Scheduler and requests."""

    def __init__(
        self,
        planner: Planner,
        pool: DevicePool,
        clock: Clock,
        rng: Random,
        step_tokens: int,
        invariants: Invariants,
        counts: Counter[str],
    ) -> None:
        self.planner = planner
        self.pool = pool
        self.clock = clock
        self.weights = 1
        self.requests: dict[str, Request] = {}
        self.steps: deque[Step] = deque()
        self.num_local_tokens = 0
        self.num_landed_tokens = 0
        self._page, self._block = planner.options.page_size, planner.options.block_size
        self._granule = min(self._page, self._block)
        self._num_workers = len(planner.options.page_bytes)
        self._rng = rng
        self._step_tokens = step_tokens
        self._invariants = invariants
        self._counts = counts
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._preempted: list[str] = []
        self._ended: list[RequestState] = []

    # Requests ----------------------------------------------------------------------------------

    def add(self, tokens: Tokens, max_tokens: int, state: RequestState) -> Request:
        request = Request(tokens, state, max_tokens + tokens.num_tokens)
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.planner.settle_slots()
        self.planner.settle_storage(self.clock.now)
        with self._invariants.work(request, tokens.num_tokens // self._page):
            self.planner.add_request(state, self.clock.now)
        return request

    def abort(self, request: Request) -> None:
        self._counts[f"aborted while {request.status.value}"] += 1
        self._finish(request)

    @property
    def live(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is not Status.FINISHED]

    @property
    def has_work(self) -> bool:
        """As vLLM's ``has_requests``: also finished requests whose blocks are still loaded to."""
        return bool(self.requests or self.steps or self.planner.holds_device_blocks)

    def _finish(self, request: Request) -> None:
        was_loading = request.status is Status.LOADING
        state = request.state
        if state.load is None and request.block_ids:
            num_blocks = -(-request.num_computed // self._block)
            state.block_ids = request.block_ids[:num_blocks]
            certain = min(request.num_computed, request.tokens.num_tokens - 1)
            self._collect(request, certain)
        with self._invariants.ending(request):
            self.planner.finish(state, self.clock.now)
        self._unlist(request)
        request.status = Status.FINISHED
        self._ended.append(state)
        if not was_loading or request.request_id in self._received:
            self._free(request)
            self._received.discard(request.request_id)
            self._failed.discard(request.request_id)
            del self.requests[request.request_id]

    def _unlist(self, request: Request) -> None:
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)

    def _free(self, request: Request) -> None:
        self.pool.give_back(request.block_ids)
        request.block_ids, request.tags, request.num_computed = [], [], 0
        request.num_local = request.num_external = request.num_forwarded = request.num_cached = 0
        request.offered_end = 0

    def _collect(self, request: Request, certain: int) -> None:
        with self._invariants.work(request, certain // self._page):
            self.planner.collect_saves(request.state, certain, self.clock.now)

    # A step ------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        budget = self._step_tokens
        scheduled: dict[str, int] = {}
        preempted = len(self._preempted)
        for request in list(self._running):
            if request.status is Status.RUNNING and budget:
                count = self._grow(request, budget)
                if count:
                    scheduled[request.request_id] = count
                    budget -= count
        scheduled = {r: n for r, n in scheduled.items() if r not in self._preempted}
        if len(self._preempted) == preempted:
            # Who holds blocks already comes first.
            for request in sorted(self._waiting, key=lambda r: not r.block_ids):
                if budget <= 0:
                    break
                admitted = self._try_admit(request, budget)
                if admitted is None:
                    break
                if admitted:
                    scheduled[request.request_id] = admitted
                    budget -= admitted
        return self._build(scheduled)

    def _grow(self, request: Request, budget: int) -> int:
        """Blocks for the next tokens of a running request, at the cost of the last one."""
        count = min(budget, request.tokens.num_tokens - request.num_computed)
        if count <= 0:
            return 0
        needed = -(-(request.num_computed + count) // self._block) - len(request.block_ids)
        while needed > self.pool.num_free:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        request.block_ids += self.pool.allocate(max(0, needed))
        return count

    def _preempt(self, request: Request) -> None:
        self._counts["preempted"] += 1
        self._free(request)
        request.epoch += 1
        request.num_in_flight = 0
        request.status = Status.WAITING
        self._running.remove(request)
        self._waiting.insert(0, request)
        self._preempted.append(request.request_id)

    def _try_admit(self, request: Request, budget: int) -> int | None:
        """Tokens to compute now; 0 where it has to wait; None where no block is left."""
        if request.status is Status.LOADING:
            if request.request_id not in self._received:
                return 0
            self._promote(request)
        hit: list[int] = []
        num_external, is_async = 0, False
        if request.num_computed == 0:
            hit = self._local_hit(request)
            offer = self._look_up(request, len(hit) * self._block)
            if offer is None:
                return 0
            num_external, is_async = offer
        computed = request.num_computed or len(hit) * self._block + num_external
        count = 0 if is_async else min(budget, request.tokens.num_tokens - computed)
        if not is_async and count <= 0:
            raise Violation(f"{request.request_id}: nothing is left to compute without a load")
        needed = -(-(computed + count) // self._block) - len(hit) - len(request.block_ids)
        if not self._has_room(request, hit, needed, is_async):
            return None
        if request.num_computed == 0:
            self._allocate(request, hit, needed, num_external, is_async)
        else:
            request.block_ids += self.pool.allocate(needed)
            with self._invariants.no_finding(request):
                self.planner.admit(request.state)
        if is_async:
            return 0
        self._waiting.remove(request)
        self._running.append(request)
        request.status = Status.RUNNING
        return count

    def _look_up(self, request: Request, num_local: int) -> tuple[int, bool] | None:
        """(tokens of the offer that is taken, whether they are loaded in the background)."""
        now = self.clock.now
        self.planner.settle_storage(now)
        request.num_local = num_local
        with self._invariants.work(request, 0):
            match = self.planner.match(request.state, num_local, now)
        if match.num_tokens is None:
            self._counts["deferred"] += 1
            self._invariants.check_wait(request, num_local, now)
            return None
        request.deferred_at = None
        self._invariants.check_offer(request, num_local, match)
        if match.num_tokens:
            request.offered_end = max(request.offered_end, num_local + match.num_tokens)
        if match.num_tokens and self._rng.random() < IGNORED_OFFERS:
            self._counts["offer ignored"] += 1
            return 0, False
        return match.num_tokens, match.is_async

    def _has_room(self, request: Request, hit: Sequence[int], needed: int, is_async: bool) -> bool:
        free = self.pool.num_free - sum(self.pool.refs[b] == 0 for b in hit)
        if not request.block_ids:
            free -= sum(self._missing_blocks(other) for other in self._waiting if other.block_ids)
        return (self._missing_blocks(request) - len(hit) if is_async else needed) <= free

    def _missing_blocks(self, request: Request) -> int:
        """Blocks that it needs until its first token. Loads cannot be preempted: vLLM starts
        one only where this many are left over."""
        return max(0, request.tokens.num_tokens // self._block + 1 - len(request.block_ids))

    def _allocate(
        self, request: Request, hit: list[int], needed: int, num_external: int, is_async: bool
    ) -> None:
        num_local = len(hit) * self._block
        self.pool.use(hit)
        request.block_ids = hit + self.pool.allocate(needed)
        request.weights = self.weights
        request.num_computed = num_local + num_external
        request.num_local, request.num_external = num_local, num_external
        request.num_cached = len(hit)
        pure = pure_tags(request.tokens.ids, self._granule, self.weights)
        request.tags = pure[: request.num_computed // self._granule]
        self.num_local_tokens += num_local
        with self._invariants.admission(request):
            if not num_external:
                self.planner.admit(request.state)
                return
            self._counts["loads begun"] += 1
            self._counts["asynchronous loads" if is_async else "synchronous loads"] += 1
            blocks = list(request.block_ids)
            load = self.planner.begin_load(request.state, num_external, blocks, self.clock.now)
        request.offered_end = 0
        self._invariants.check_targets(load)
        if is_async:
            request.status = Status.LOADING

    def _promote(self, request: Request) -> None:
        self._received.remove(request.request_id)
        request.status = Status.WAITING
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            self._free(request)
        else:
            self._invariants.check_device(request)
            self._cache_blocks(request, request.num_computed)

    def _local_hit(self, request: Request) -> list[int]:
        hit = []
        for key in self._block_keys(request)[: (request.tokens.num_tokens - 1) // self._block]:
            if key not in self.pool.cached:
                break
            hit.append(self.pool.cached[key])
        return hit

    def _block_keys(self, request: Request) -> list[int]:
        return pure_tags(request.tokens.ids, self._block, 0)

    def _cache_blocks(self, request: Request, num_tokens: int) -> None:
        if request.weights != self.weights:
            return  # vLLM's cache was reset; what it holds of old weights is not used again
        first, last = request.num_cached, num_tokens // self._block
        if first >= last:
            return
        request.num_cached = last
        keys = self._block_keys(request)[first:last]
        for key, block_id in zip(keys, request.block_ids[first:last], strict=True):
            self.pool.cache(key, block_id)

    def _build(self, scheduled: dict[str, int]) -> Step:
        planner = self.planner
        planner.settle_storage(self.clock.now)
        preempted, self._preempted = self._preempted, []
        for request_id in preempted:
            if request_id in self.requests:
                planner.preempt(self.requests[request_id].state)
        items = []
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            state = request.state
            state.block_ids = list(request.block_ids)
            certain = min(request.num_computed + count, request.tokens.num_tokens)
            if certain >= (state.num_saved_pages + 1) * self._page:
                self._collect(request, certain)
            items.append(self._item(request, count))
        self._counts["idle steps"] += not scheduled
        if planner.write_back is not None:
            planner.write_back.count_taken(self.pool.take_num_taken())
        waiting = [r for r in self._waiting if r.status is Status.WAITING and not r.block_ids]
        others = self._ended + [r.state for r in self.requests.values() if r not in waiting]
        with self._invariants.plan(waiting, others):
            step = Step(planner.plan_step(is_busy=bool(scheduled), now=self.clock.now), items)
        self.steps.append(step)
        return step

    def _item(self, request: Request, count: int) -> Item:
        first = request.num_computed // self._granule
        request.num_computed += count
        request.num_forwarded += count
        last = request.num_computed // self._granule
        ids = request.tokens.ids
        for granule in range(len(request.tags), last):
            piece = tuple(ids[granule * self._granule : (granule + 1) * self._granule])
            previous = request.tags[-1] if request.tags else 0
            request.tags.append(next_tag(previous, piece, self.weights))
        self._cache_blocks(request, request.num_computed)
        request.num_in_flight += 1
        blocks, tags = list(request.block_ids), list(request.tags)
        return Item(request, request.epoch, blocks, tags, first, last, count)

    # Its output --------------------------------------------------------------------------------

    def finish_step(self, report: Callable[[], None]) -> None:
        """Take the output of the oldest step; ``report`` brings what workers say meanwhile."""
        step = self.steps.popleft()
        finished_recving = set(step.plan.failed_requests)
        for request_id in finished_recving:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                request.num_computed = 0
                self._failed.add(request_id)
        affected = self._truncate(step.invalid_blocks)
        for item in step.items:
            self._take_output(item, affected)
        report()
        finished_recving |= self.settle_copies()
        for request_id in sorted(finished_recving):
            self._receive(request_id)
        self.planner.settle_storage(self.clock.now)

    def settle_copies(self) -> set[str]:
        """Consume what all workers have done; requests whose background load is over."""
        settled = self.planner.settle_copies(self.clock.now)
        loaded = [load.state.request_id for load in settled.loaded if load.is_async]
        self.num_landed_tokens += sum(
            load.num_tokens
            for load in settled.loaded
            if load.is_ok and not (load.is_stale or (load.is_async and load.state.is_finished))
        )
        self._counts["loads failed or outdated"] += len(settled.failed)
        self._counts["pages published"] += len(settled.published)
        if len(set(loaded)) != len(loaded):
            raise Violation(f"a load is reported twice: {loaded}")
        return set(loaded)

    def _receive(self, request_id: str) -> None:
        """vLLM's ``finished_recving``: the request waits for it, or has been aborted."""
        request = self.requests[request_id]
        if request_id in self._received:
            raise Violation(f"{request_id} is told to vLLM as received twice")
        if request.status is Status.LOADING:
            # Who has its load already goes on after a reset as running requests do.
            if request_id not in self._failed and request.weights != self.weights:
                raise Violation(f"{request_id} uses a load from before a reset")
            self._received.add(request_id)
            return
        if request.status is not Status.FINISHED:
            raise Violation(f"{request_id} is told as received while {request.status.value}")
        self._counts["load outlived its request"] += 1
        self._free(request)
        self._failed.discard(request_id)
        del self.requests[request_id]

    def _truncate(self, invalid: set[int]) -> set[str]:
        """Tokens in blocks that a synchronous load did not fill are computed again."""
        affected = set()
        for request in self._running:
            bad = [i for i, block_id in enumerate(request.block_ids) if block_id in invalid]
            if not bad or bad[0] * self._block >= request.num_computed:
                continue
            self._counts["truncated"] += 1
            affected.add(request.request_id)
            kept = request.num_computed = bad[0] * self._block
            request.num_local = min(request.num_local, kept)
            request.num_external = min(request.num_external, kept - request.num_local)
            request.num_forwarded = kept - request.num_local - request.num_external
            del request.tags[request.num_computed // self._granule :]
            request.epoch += 1
            request.num_in_flight = 0
        return affected

    def _take_output(self, item: Item, affected: set[str]) -> None:
        request = item.request
        if request.epoch != item.epoch or request.status is not Status.RUNNING:
            return
        request.num_in_flight -= 1
        if request.request_id in affected or request.num_in_flight:
            return
        if request.num_computed < request.tokens.num_tokens:
            return
        if request.tokens.num_tokens >= request.max_tokens:
            self._counts["finished"] += 1
            self._invariants.check_answer(request)
            self._finish(request)
            return
        request.tokens.ids.append(self._rng.randrange(3))

    # Whole cache -------------------------------------------------------------------------------

    def reset(self, *, preempts: bool, keeps_namespace: bool) -> None:
        """New weights, or the same under the same namespace. Running requests go on with old KV
        unless they are preempted."""
        self.planner.saves.cancel_planned()
        if preempts:
            for request in list(self._running):
                self._preempt(request)
        self.pool.forget_cached()
        if not keeps_namespace:
            self.weights += 1
        self.planner.reset(namespace_of(self.weights), [r.state for r in self.live])

"""A small vLLM around a real planner: block pool, prefix cache, scheduler, requests.

It calls the planner as ``connectors/scheduler_side.py`` does, in vLLM's order of hooks.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from virtual_workers import Item, Step, next_tag

from vllm_hicache.hashing import PageHashChain, chain_root
from vllm_hicache.planner import Planner
from vllm_hicache.request_state import RequestState

ROOT = chain_root()


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


def namespace_of(weights: int) -> str:
    return f"hc1-{weights:016x}"


class Tokens:
    """A request's token source with growing tokens."""

    def __init__(self, request_id: str, token_ids: Sequence[int], page_size: int) -> None:
        self.request_id = request_id
        self.page_size = page_size
        self.ids = list(token_ids)
        self._chain = PageHashChain(page_size, ROOT)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def page_hashes(self, num_pages: int) -> Sequence[bytes]:
        if len(self._chain.hashes) < num_pages:
            self._chain.extend(self.ids, num_pages * self._chain.page_size)
        return self._chain.hashes

    def note(self, page_index: int) -> object:
        return (self.request_id, page_index)


@dataclass(eq=False)
class Request:
    """vLLM's side of a request."""

    tokens: Tokens
    state: RequestState
    max_tokens: int
    status: Status = Status.WAITING
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    """What the granules of ``block_ids`` hold, as far as they are computed or loaded."""
    weights: int = 0
    """Version of the weights when its first block was allocated."""
    epoch: int = 0
    """Outputs of steps that were scheduled in an earlier epoch are dropped."""
    num_in_flight: int = 0
    is_preempted: bool = False

    @property
    def request_id(self) -> str:
        return self.tokens.request_id


class BlockPool:
    """Device blocks with reference counts and a prefix cache. ``DeviceBlocks`` of the planner."""

    def __init__(self, num_blocks: int, has_prefix_cache: bool) -> None:
        self.refs = [0] * num_blocks
        self.num_held = 0
        self.cached: dict[int, int] = {}
        self._has_prefix_cache = has_prefix_cache
        self._free = deque(range(num_blocks))
        self._keys: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        taken = [self._free.popleft() for _ in range(count)]
        for block_id in taken:
            self.forget(block_id)
            self.refs[block_id] = 1
        return taken

    def use(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self._free.remove(block_id)
            self.refs[block_id] += 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self.refs[block_id] -= 1
            assert self.refs[block_id] >= 0
            if self.refs[block_id] == 0:
                put = self._free.append if block_id in self._keys else self._free.appendleft
                put(block_id)

    def hold(self, block_ids: Sequence[int]) -> None:
        self.use(block_ids)
        self.num_held += len(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self.give_back(block_ids)
        self.num_held -= len(block_ids)

    def cache(self, key: int, block_id: int) -> None:
        if self._has_prefix_cache and key not in self.cached and block_id not in self._keys:
            self.cached[key] = block_id
            self._keys[block_id] = key

    def forget(self, block_id: int) -> None:
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self.cached[key]

    def forget_cached(self) -> None:
        self.cached.clear()
        self._keys.clear()


class VirtualEngine:
    """Scheduler and requests. ``now`` is moved by the driver."""

    def __init__(
        self,
        planner: Planner,
        pool: BlockPool,
        *,
        num_workers: int,
        step_tokens: int,
        sample: Callable[[], int],
        ignores_offer: Callable[[], bool],
        examine: Callable[[Request], None],
    ) -> None:
        self.planner = planner
        self.pool = pool
        self.now = 0.0
        self.weights = 1
        self.requests: dict[str, Request] = {}
        self.steps: deque[Step] = deque()
        self.counts: Counter[str] = Counter()
        self._page, self._block = planner.options.page_size, planner.options.block_size
        self._granule = min(self._page, self._block)
        self._num_workers = num_workers
        self._step_tokens = step_tokens
        self._sample = sample
        self._ignores_offer = ignores_offer
        self._examine = examine
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._preempted: list[str] = []

    # Requests ----------------------------------------------------------------------------------

    def add(self, tokens: Tokens, max_tokens: int, state: RequestState) -> Request:
        request = Request(tokens, state, max_tokens + tokens.num_tokens)
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.planner.settle_storage(self.now)
        self.planner.add_request(state, self.now)
        return request

    def abort(self, request: Request) -> None:
        self.counts[f"aborted while {request.status.value}"] += 1
        self._finish(request)

    @property
    def live(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is not Status.FINISHED]

    @property
    def has_work(self) -> bool:
        """As vLLM's ``has_requests``: also finished requests whose blocks are still loaded to."""
        return bool(self.requests or self.steps or self.planner.holds_device_blocks)

    def pure_tags(self, token_ids: Sequence[int], weights: int) -> list[int]:
        """Tags of all whole granules of these tokens under one version of the weights."""
        tags: list[int] = []
        for start in range(0, len(token_ids) - self._granule + 1, self._granule):
            piece = tuple(token_ids[start : start + self._granule])
            tags.append(next_tag(tags[-1] if tags else None, piece, weights))
        return tags

    def _finish(self, request: Request) -> None:
        was_loading = request.status is Status.LOADING
        state = request.state
        if state.load is None and request.block_ids:
            num_blocks = -(-request.num_computed // self._block)
            state.block_ids = request.block_ids[:num_blocks]
            certain = min(request.num_computed, request.tokens.num_tokens - 1)
            self.planner.collect_saves(state, certain, self.now)
        self.planner.finish(state)
        self._unlist(request)
        request.status = Status.FINISHED
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
                count = self._try_admit(request, budget)
                if count is None:
                    break
                if count:
                    scheduled[request.request_id] = count
                    budget -= count
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
        self.counts["preempted"] += 1
        self._free(request)
        request.epoch += 1
        request.num_in_flight = 0
        request.is_preempted = True
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
        num_local, is_async, num_external = 0, False, 0
        hit: list[int] = []
        if request.num_computed == 0:
            hit = self._local_hit(request)
            num_local = len(hit) * self._block
            self.planner.settle_storage(self.now)
            match = self.planner.match(request.state, num_local, self.now)
            if match.num_tokens is None:
                self.counts["deferred"] += 1
                return 0
            num_external, is_async = match.num_tokens, match.is_async
            assert not is_async or num_external > 0
            assert num_external % self._block == 0
            if self._ignores_offer():
                num_external, is_async = 0, False
        computed = request.num_computed or num_local + num_external
        count = 0 if is_async else min(budget, request.tokens.num_tokens - computed)
        assert is_async or count > 0, "nothing is left to compute for a request without a load"
        needed = -(-(computed + count) // self._block) - len(hit) - len(request.block_ids)
        free = self.pool.num_free - sum(self.pool.refs[b] == 0 for b in hit)
        if not request.block_ids:
            free -= sum(self._missing_blocks(other) for other in self._waiting if other.block_ids)
        if (self._missing_blocks(request) - len(hit) if is_async else needed) > free:
            return None
        if request.num_computed == 0:
            self._allocate(request, hit, needed, num_external, is_async)
        else:
            request.block_ids += self.pool.allocate(needed)
            self.planner.admit(request.state)
        if is_async:
            return 0
        self._waiting.remove(request)
        self._running.append(request)
        request.status = Status.RUNNING
        return count

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
        pure = self.pure_tags(request.tokens.ids, self.weights)
        request.tags = pure[: request.num_computed // self._granule]
        self.counts["local tokens"] += num_local
        if not num_external:
            self.planner.admit(request.state)
            return
        self.counts["asynchronous loads" if is_async else "synchronous loads"] += 1
        blocks = list(request.block_ids)
        self.planner.begin_load(request.state, num_external, blocks, self.now)
        if is_async:
            request.status = Status.LOADING

    def _promote(self, request: Request) -> None:
        self._received.remove(request.request_id)
        request.status = Status.WAITING
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            self._free(request)
        else:
            self._cache_blocks(request, request.num_computed)

    def _local_hit(self, request: Request) -> list[int]:
        hit = []
        for key in self._block_keys(request)[: (request.tokens.num_tokens - 1) // self._block]:
            if key not in self.pool.cached:
                break
            hit.append(self.pool.cached[key])
        return hit

    def _block_keys(self, request: Request) -> list[int]:
        keys, previous = [], 0
        ids = request.tokens.ids
        for start in range(0, len(ids) - self._block + 1, self._block):
            previous = hash((previous, tuple(ids[start : start + self._block])))
            keys.append(previous)
        return keys

    def _cache_blocks(self, request: Request, num_tokens: int) -> None:
        if request.weights != self.weights:
            return  # vLLM's cache was reset; what it holds of old weights is not used again
        keys = self._block_keys(request)[: num_tokens // self._block]
        for key, block_id in zip(keys, request.block_ids, strict=False):
            self.pool.cache(key, block_id)

    def _build(self, scheduled: dict[str, int]) -> Step:
        planner = self.planner
        planner.settle_storage(self.now)
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
                planner.collect_saves(state, certain, self.now)
            items.append(self._item(request, count))
        plan = planner.plan_step(is_busy=bool(scheduled))
        step = Step(plan, items)
        self.steps.append(step)
        return step

    def _item(self, request: Request, count: int) -> Item:
        first = request.num_computed // self._granule
        request.num_computed += count
        last = request.num_computed // self._granule
        ids = request.tokens.ids
        for granule in range(len(request.tags), last):
            piece = tuple(ids[granule * self._granule : (granule + 1) * self._granule])
            previous = request.tags[-1] if request.tags else None
            request.tags.append(next_tag(previous, piece, self.weights))
        self._cache_blocks(request, request.num_computed)
        request.num_in_flight += 1
        blocks, tags = list(request.block_ids), list(request.tags)
        return Item(request, request.epoch, blocks, tags, first, last, count)

    # Its output --------------------------------------------------------------------------------

    def finish_step(self, report: Callable[[], None]) -> None:
        """Take the output of the oldest step; ``report`` brings what workers say meanwhile."""
        step = self.steps.popleft()
        assert step.runs == self._num_workers
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
        finished_recving |= self._settle_copies()
        for request_id in sorted(finished_recving):
            self._receive(request_id)
        self.planner.settle_storage(self.now)

    def _settle_copies(self) -> set[str]:
        settled = self.planner.settle_copies(self.now)
        loaded = [load.state.request_id for load in settled.loaded if load.is_async]
        self.counts["failed loads"] += len(settled.failed)
        assert len(set(loaded)) == len(loaded)
        return set(loaded)

    def _receive(self, request_id: str) -> None:
        """vLLM's ``finished_recving``: the request waits for it, or has been aborted."""
        request = self.requests[request_id]
        assert request_id not in self._received
        if request.status is Status.LOADING:
            self._received.add(request_id)
            return
        assert request.status is Status.FINISHED
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
            self.counts["truncated"] += 1
            affected.add(request.request_id)
            request.num_computed = bad[0] * self._block
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
            self.counts["finished"] += 1
            self._examine(request)
            self._finish(request)
            return
        request.tokens.ids.append(self._sample())

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

"""A planner whose partners say what a test tells them to say."""

from collections import Counter
from collections.abc import Sequence

from vllm_hicache.audit import check
from vllm_hicache.fetch import FetchPolicy
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import StepPlan
from vllm_hicache.planner import Match, Planner
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.pools import KVGroup
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.progress import WorkerProgress
from vllm_hicache.request_state import DeviceQueue, RequestState
from vllm_hicache.settled import Settled
from vllm_hicache.simulate.requests import Tokens
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_link import StorageLink
from vllm_hicache.storage_messages import (
    Command,
    Event,
    ExistsResult,
    Fetch,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReleased,
    unpack_slots,
)

NAMESPACE = "hc1-0123456789abcdef"


def _shares(groups: Sequence[KVGroup], page: int, page_bytes: int) -> tuple[int, ...]:
    """Every KV cache group has as much of a page; a state has its share whole."""
    share = page_bytes // max(1, len(groups))
    return tuple(share if group.is_state else share // page for group in groups)


class HeldBlocks:
    """References on device blocks, and whether the prefix cache was emptied."""

    def __init__(self) -> None:
        self.refs: Counter[int] = Counter()
        self.releases: list[tuple[int, ...]] = []
        self.num_forgotten = 0
        self.num_free = 1 << 20

    @property
    def num_held(self) -> int:
        return self.refs.total()

    def hold(self, block_ids: Sequence[int]) -> None:
        self.refs.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self.refs.subtract(block_ids)
        assert min(self.refs.values()) >= 0
        self.releases.append(tuple(block_ids))

    def forget_cached(self) -> None:
        self.num_forgotten += 1


class ScriptedChannels:
    """Takes every message of the scheduler and brings what the test has put in."""

    def __init__(self, num_workers: int) -> None:
        self.sent: list[list[Command]] = [[] for _ in range(num_workers)]
        self.inbox: list[tuple[int, Event | ChannelUp | ChannelDown]] = []
        self.refusing: set[int] = set()

    def send(self, worker_id: int, message: Command) -> bool:
        if worker_id in self.refusing:
            return False
        self.sent[worker_id].append(message)
        return True

    def poll(self) -> list[tuple[int, Event | ChannelUp | ChannelDown]]:
        events, self.inbox = self.inbox, []
        return events

    def last(self, kind: type, worker_id: int = 0):
        """The newest message of this kind to a worker."""
        return next(m for m in reversed(self.sent[worker_id]) if isinstance(m, kind))

    def count(self, kind: type, worker_id: int = 0) -> int:
        return sum(isinstance(message, kind) for message in self.sent[worker_id])


class Rig:
    """A planner with ``num_workers`` workers; time stands still unless a test moves ``now``."""

    def __init__(
        self,
        *,
        page: int = 4,
        block: int = 4,
        num_slots: int = 16,
        num_workers: int = 1,
        has_storage: bool = False,
        fetch: dict[str, object] | None = None,
        queue: DeviceQueue | None = None,
        **options: object,
    ) -> None:
        self.now = 0.0
        self.page, self.block = page, block
        self.num_workers = num_workers
        self.blocks = HeldBlocks()
        self.channels = ScriptedChannels(num_workers)
        self.link = StorageLink(self.channels, num_workers) if has_storage else None
        policy = {
            "kind": "timeout",
            "base_s": 1.0,
            "per_1k_tokens_s": 0.0,
            "min_tokens": 0,
            "exists_timeout_s": 0.05,
            "read_timeout_s": 10.0,
        }
        chosen = {
            "page_size": page,
            "block_size": block,
            "num_host_slots": num_slots,
            "page_bytes": (1 << 20,) * num_workers,
            "eviction": "lru",
            "fetch": FetchPolicy(**policy | (fetch or {})),
            "persist_timeout_s": 30.0,
            "sync_load_max_s": 0.0,
            "defer_max_blocks": 1000,
            "shares_device_pages": True,
            "bytes_per_token": _shares(options.get("groups", ()), page, num_workers << 20),
        }
        self.metrics = Metrics()
        self.planner = Planner(
            PlannerOptions(**chosen | options),
            self.blocks,
            self.metrics,
            link=self.link,
            namespace=NAMESPACE,
            queue=queue,
        )
        self._next_block = 0
        self._planned = {"saves": 0, "loads": 0}
        self._saves_done = [0] * num_workers
        self._loads_done = [0] * num_workers
        self._failed: dict[str, list[list[int]]] = {
            "saves": [[] for _ in range(num_workers)],
            "loads": [[] for _ in range(num_workers)],
        }
        if has_storage:
            self.say(*(ChannelUp(1) for _ in range(num_workers)))

    # Requests ----------------------------------------------------------------------------------

    def request(self, request_id: str, token_ids: Sequence[int], **fields: object) -> RequestState:
        """A request that has arrived."""
        state = RequestState(Tokens(request_id, token_ids, self.page), **fields)
        self.planner.add_request(state, self.now)
        return state

    def match(self, state: RequestState, num_local: int = 0) -> Match:
        return self.planner.match(state, num_local, self.now)

    def new_blocks(self, num_tokens: int) -> list[int]:
        first, self._next_block = self._next_block, self._next_block - (-num_tokens // self.block)
        return list(range(first, self._next_block))

    def compute(self, state: RequestState, num_tokens: int) -> None:
        """The next step computes the request up to ``num_tokens``."""
        missing = num_tokens - len(state.block_ids) * self.block
        if missing > 0:
            state.block_ids = state.block_ids + self.new_blocks(missing)
        self.planner.admit(state)
        self.planner.collect_saves(state, num_tokens, self.now)

    def begin_load(self, state: RequestState, num_local: int = 0):
        """Look up, get blocks, and plan the load that was offered."""
        match = self.match(state, num_local)
        assert match.num_tokens, f"nothing was offered to {state.request_id}"
        blocks = self.new_blocks(num_local + match.num_tokens)
        return self.planner.begin_load(state, match.num_tokens, blocks, self.now)

    def fill_host(
        self, token_ids: Sequence[int], name: str = "writer", *, priority: int = 0
    ) -> RequestState:
        """Bring the whole pages of these tokens to host, by a request that then ends."""
        state = self.request(
            name, token_ids, may_load=False, why_not="skip_reading", priority=priority
        )
        self.compute(state, len(token_ids))
        self.plan()
        self.finish_saves()
        self.planner.finish(state, self.now)
        self.settle_storage()
        return state

    # Workers -----------------------------------------------------------------------------------

    def plan(self, *, is_busy: bool = True) -> StepPlan:
        plan = self.planner.plan_step(is_busy=is_busy, now=self.now)
        for op in plan.saves:
            self._planned["saves"] = op.op_id
        for op in (*plan.sync_loads, *plan.loads):
            self._planned["loads"] = op.op_id
        self.audit()
        return plan

    def finish_saves(
        self, up_to: int | None = None, *, failed: Sequence[int] = (), workers: Sequence[int] = ()
    ) -> Settled:
        """These workers (all) have done all saves up to a number (everything planned)."""
        return self._finish("saves", self._saves_done, up_to, failed, workers)

    def finish_loads(
        self, up_to: int | None = None, *, failed: Sequence[int] = (), workers: Sequence[int] = ()
    ) -> Settled:
        return self._finish("loads", self._loads_done, up_to, failed, workers)

    def _finish(
        self,
        what: str,
        done: list[int],
        up_to: int | None,
        failed: Sequence[int],
        workers: Sequence[int],
    ) -> Settled:
        last = self._planned[what] if up_to is None else up_to
        for worker_id in workers or range(self.num_workers):
            done[worker_id] = max(done[worker_id], last)
            self._failed[what][worker_id] += failed
            self.report(worker_id)
        settled = self.planner.settle_copies(self.now)
        self.audit()
        return settled

    def report(self, worker_id: int) -> None:
        self.planner.join.update(
            worker_id,
            WorkerProgress(
                saves_done=self._saves_done[worker_id],
                loads_done=self._loads_done[worker_id],
                failed_saves=tuple(self._failed["saves"][worker_id]),
                failed_loads=tuple(self._failed["loads"][worker_id]),
            ),
        )

    # Storage -----------------------------------------------------------------------------------

    def say(self, *events: Event | ChannelUp | ChannelDown | None) -> None:
        """Worker i's storage process says event i; None says nothing."""
        self.channels.inbox += [(i, event) for i, event in enumerate(events) if event is not None]
        self.settle_storage()

    def settle_storage(self) -> None:
        self.planner.settle_storage(self.now)
        self.audit()

    def answer_query(self, *num_leading: int) -> Fetch | None:
        """All workers answer the newest question; the fetch that follows, if any."""
        op = self.planner.link and next(reversed(self._queries()))
        before = self.channels.count(Fetch)
        self.say(*(ExistsResult(op, n, ok=True) for n in num_leading))
        return self.channels.last(Fetch) if self.channels.count(Fetch) > before else None

    def _queries(self) -> list[int]:
        return [m.op for m in self.channels.sent[0] if type(m).__name__ == "Exists"]

    def end_fetch(self, op: int, *num_pages: int, reason: str = "complete") -> None:
        self.say(*(FetchSettled(op, n, reason) for n in num_pages))
        self.say(*(FetchReleased(op) for _ in num_pages))

    def end_persists(self) -> None:
        """Everything that was sent to storage is stored."""
        for message in self.channels.sent[0]:
            if isinstance(message, Persist):
                num_pages = len(unpack_slots(message.slots))
                done = PersistDone(message.op, num_pages, 0, 0, "complete")
                self.say(*([done] * self.num_workers))
                self.say(*([PersistReleased(message.op)] * self.num_workers))

    # What is seen ------------------------------------------------------------------------------

    def audit(self, *, is_idle: bool = False) -> None:
        check(self.planner, is_idle=is_idle, num_held_blocks=self.blocks.num_held)

    def in_host(self, state: RequestState) -> int:
        """Leading pages of the request that are in host."""
        num_pages = state.tokens.num_tokens // self.page
        return self.planner.host.index.match(state.tokens.page_hashes(num_pages), num_pages)

    def page_of(self, state: RequestState, number: int) -> HostPage:
        page = self.planner.host.index.get(state.tokens.page_hashes(number + 1)[number])
        assert page is not None
        return page

    def total(self, key: str) -> int:
        return int(self.metrics.totals()[key])

"""Host -> device: loads that are planned or running, and who waits for them."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hicache.block_tables import PageBlocks, Tables
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_tier import HostTier
from vllm_hicache.metrics import Ledger, Metrics
from vllm_hicache.plan import CopyList, CopyOp, group_copies
from vllm_hicache.pools import KVGroup
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.progress import Outcome
from vllm_hicache.request_state import RequestState
from vllm_hicache.tiers import Tier

DOUBT_STEPS = 32
"""Steps until a failed synchronous load is forgotten. More than vLLM ever has in flight, so that
every request that computed on top of it has been told by then; fewer would save garbage."""
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningLoad:
    """A load that some worker has not acknowledged. Its pages are pinned.

    Tokens ``[first_token, last_token)`` go to blocks that were allocated for it. Other requests
    may read the blocks of a synchronous load from this step on, those of an asynchronous one
    when it has landed.
    """

    state: RequestState
    is_async: bool
    pages: tuple[HostPage, ...]
    first_token: int
    last_token: int
    copies: CopyList
    other_copies: tuple[CopyList, ...]
    """Of the KV cache groups behind the first one."""
    block_ids: frozenset[int]
    num_storage_tokens: int
    started_at: float
    num_busy_steps: int = 0
    """Steps with work that the engine had planned before it."""
    is_ok: bool | None = None
    """None until every worker has acknowledged it; a synchronous one is False at once when some
    worker has failed."""
    forget_at: int = 0
    """Step from which a failed synchronous load is no longer in doubt."""
    is_stale: bool = False
    """A reset came between: its pages belong to a cache that is gone."""

    @property
    def num_tokens(self) -> int:
        return self.last_token - self.first_token


class Loads:
    """All running loads, in the order of their numbers."""

    def __init__(
        self,
        host: HostTier,
        metrics: Metrics,
        ledger: Ledger,
        *,
        page_size: int,
        groups: Sequence[KVGroup],
    ) -> None:
        self._host = host
        self._metrics = metrics
        self._ledger = ledger
        self._page_size = page_size
        self._page_blocks = PageBlocks(groups, page_size)
        self._next_op = 1
        self._planned: list[RunningLoad] = []
        self._running: dict[int, RunningLoad] = {}
        self._landing: dict[bytes, RunningLoad] = {}
        self._in_doubt: list[RunningLoad] = []
        self.num_failed_visibly = 0
        """Synchronous loads that failed: others may have seen their blocks."""
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        """Loads that are planned or not yet acknowledged by every worker."""
        return len(self._planned) + len(self._running)

    def is_landing(self, page_hash: bytes) -> bool:
        """Whether an asynchronous load of this page is under way for some request."""
        return page_hash in self._landing

    def running(self) -> list[RunningLoad]:
        """Loads that are planned or not yet acknowledged by every worker."""
        return [*self._planned, *self._running.values()]

    def landing(self) -> list[RunningLoad]:
        """Loads that others may wait for, one entry a page."""
        return list(self._landing.values())

    def doubts(self, block_ids: Sequence[int]) -> tuple[RunningLoad, ...]:
        """Synchronous loads into these blocks that are not acknowledged, or failed a few steps
        ago: what a forward computes on top of them may be garbage."""
        return tuple(load for load in self._in_doubt if not load.block_ids.isdisjoint(block_ids))

    def is_prefix_in_doubt(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether the first ``num_tokens`` of this chain, as the device has them, hold what an
        unacknowledged synchronous load brings. O(such loads)."""
        for load in self._in_doubt:
            page = load.first_token // self._page_size
            reaches = load.is_ok is None and load.first_token < num_tokens and page < len(hashes)
            if reaches and hashes[page] == load.pages[0].page_hash:
                return True
        return False

    @property
    def has_failed_lately(self) -> bool:
        """Whether a synchronous load failed a few steps ago. vLLM offers its blocks, and those
        computed on top of it, to others from the step on in which it allocates them."""
        return any(load.is_ok is False for load in self._in_doubt)

    def begin(
        self,
        state: RequestState,
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        now: float,
    ) -> RunningLoad:
        """Plan the load that the last lookup offered: ``num_tokens`` after the local hit, to the
        blocks of the request's whole ``tables``.

        The pages are in host: nothing can have left since the lookup, which was in the
        same call of the scheduler.
        """
        page = self._page_size
        first, last = state.num_local_tokens, state.num_local_tokens + num_tokens
        hashes = state.tokens.page_hashes(-(-last // page))[first // page : -(-last // page)]
        pages = tuple(self._host.index.pages_of(hashes))
        targets = self._targets(tables, first, last)
        parts = [p.parts for p in pages]
        copies = group_copies(
            first,
            last,
            page_size=page,
            groups=self._page_blocks.groups,
            slots=np.asarray([p.slot for p in pages]),
            tables=targets,
            parts=parts,
        )
        load = RunningLoad(
            state=state,
            is_async=state.is_offer_async,
            pages=pages,
            first_token=first,
            last_token=last,
            copies=copies[0],
            other_copies=tuple(copies[1:]),
            block_ids=frozenset(self._page_blocks.blocks(targets)),
            num_storage_tokens=self._storage_tokens(pages, first, last),
            started_at=now,
        )
        if not self._fills(load.block_ids, copies):
            logger.error(
                "HiCache: request %s: vLLM wants blocks filled that host has no part of; "
                "the tokens are computed",
                state.request_id,
            )
            load.is_stale = True
        state.lacks_draft_state |= bool(pages[-1].gaps & self._page_blocks.draft_bits)
        self._host.pin(pages)
        self._host.touch(pages[-1], user=state.request_id)
        self._planned.append(load)
        if load.is_async:
            self._landing.update(dict.fromkeys(hashes, load))
        else:
            self._in_doubt.append(load)
        state.load = load
        self._ledger.found(state.request_id, "storage", load.num_storage_tokens)
        self._ledger.found(state.request_id, "host", load.num_tokens - load.num_storage_tokens)
        return load

    def _targets(self, tables: Sequence[Sequence[int]], first: int, last: int) -> Tables:
        """The blocks of tokens ``[first, last)``, both multiples of every group's block."""
        groups = self._page_blocks.groups
        return tuple(
            tuple(table[first // group.block_size : last // group.block_size])
            for group, table in zip(groups, tables, strict=True)
        )

    def _fills(self, block_ids: frozenset[int], copies: list[CopyList]) -> bool:
        """Whether every block that vLLM takes for filled is written to."""
        if not self._page_blocks.has_parts:
            return True
        written = {block for rows in copies for block in rows[:, 2].tolist()}
        return written == block_ids

    def take_planned(self) -> tuple[tuple[CopyOp, ...], tuple[CopyOp, ...]]:
        """(synchronous, asynchronous) loads for this step's plan, numbered in this order."""
        self._num_steps += 1
        if self._in_doubt:
            self._in_doubt = [load for load in self._in_doubt if not self._is_past(load)]
        if not self._planned:
            return (), ()
        planned = sorted(self._planned, key=lambda load: load.is_async)
        self._planned = []
        first, self._next_op = self._next_op, self._next_op + len(planned)
        self._running.update(enumerate(planned, start=first))
        numbered = [
            (CopyOp(first + i, load.copies, load.other_copies), load)
            for i, load in enumerate(planned)
        ]
        return (
            tuple(op for op, load in numbered if not load.is_async),
            tuple(op for op, load in numbered if load.is_async),
        )

    def distrust(self, op_ids: Iterable[int]) -> None:
        """Some worker has failed in these loads; others may not have finished them."""
        for op_id in op_ids:
            load = self._running.get(op_id)
            if load is not None:
                self._fail(load)

    def _fail(self, load: RunningLoad) -> None:
        if load.is_ok is None and not load.is_async:
            load.is_ok = False
            load.forget_at = self._num_steps + DOUBT_STEPS
            self.num_failed_visibly += 1

    def settle(self, outcome: Outcome, now: float) -> RunningLoad:
        """Every worker has finished this load. Pages of a failed one are in doubt and leave."""
        load = self._running.pop(outcome.op_id, None)
        if load is None:
            raise InvariantBroken(f"load {outcome.op_id} is reported, but it is not running")
        if not outcome.is_ok:
            self._fail(load)
        load.is_ok = outcome.is_ok
        for page in load.pages:
            if self._landing.get(page.page_hash) is load:
                del self._landing[page.page_hash]
        self._host.unpin(load.pages)
        state = load.state
        if state.load is load:
            state.load = None
        num_storage = load.num_storage_tokens
        num_host = load.num_tokens - num_storage
        if load.is_stale or not outcome.is_ok:
            self._metrics.count("copy_failures", int(not outcome.is_ok))
            reason = "load_failed" if not outcome.is_ok else "reset"
            self._ledger.unserved(state.request_id, "storage", reason, num_storage)
            self._ledger.unserved(state.request_id, "host", reason, num_host)
            if load.pages[0].is_present:
                self._host.discard(load.pages[0])
            return load
        self._metrics.observe("load_seconds", now - load.started_at)
        if load.is_async and state.is_finished:
            self._ledger.unserved(state.request_id, "storage", "aborted", num_storage)
            self._ledger.unserved(state.request_id, "host", "aborted", num_host)
            return load
        self._ledger.served(state.request_id, "storage", num_storage)
        self._ledger.served(state.request_id, "host", num_host)
        return load

    def forget(self) -> None:
        """Reset: what is being loaded must not be used."""
        self._landing.clear()
        for load in [*self._planned, *self._running.values()]:
            load.is_stale = True

    def _is_past(self, load: RunningLoad) -> bool:
        if load.is_ok is False:
            return self._num_steps >= load.forget_at
        return load.is_ok is True

    def _storage_tokens(self, pages: tuple[HostPage, ...], first: int, last: int) -> int:
        """Tokens of this load whose page came from storage and was not served before."""
        page_size = self._page_size
        total = 0
        for number, page in enumerate(pages, start=first // page_size):
            if page.origin is Tier.STORAGE:
                page.origin = Tier.HOST
                start, stop = number * page_size, (number + 1) * page_size
                total += min(stop, last) - max(start, first)
        return total

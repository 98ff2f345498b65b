"""write_back: pages stay on the device alone until vLLM is about to reuse their blocks.

vLLM takes blocks from the head of its free queue, tails of chains first. Before they get there,
whole pages are copied to host, ancestors first. The blocks are not held: vLLM keeps its order and
its room, and a page whose block is handed out while it is read is dropped when the copy is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_tier import HostTier
from vllm_hicache.loads import RunningLoad
from vllm_hicache.metrics import Metrics
from vllm_hicache.page_runs import PageRun
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.request_state import DeviceQueue, RequestState
from vllm_hicache.saves import MAX_PAGES_PER_SAVE, Saves


@dataclass(frozen=True, slots=True, eq=False)
class _DevicePage:
    """A whole page on the device that host lacked when a request used it."""

    hashes: Sequence[bytes]
    """Of its chain, this page included."""
    number: int
    block_ids: tuple[int, ...]
    note: object
    priority: int
    doubts: tuple[RunningLoad, ...]

    @property
    def page_hash(self) -> bytes:
        return self.hashes[self.number]


class WriteBack:
    """Which pages are on the device alone, and when they are saved.

    Until a page's block is handed out by vLLM, which ``DeviceQueue`` tells before it happens, its
    bytes are what the request computed.
    """

    def __init__(
        self,
        host: HostTier,
        saves: Saves,
        queue: DeviceQueue,
        metrics: Metrics,
        *,
        page_size: int,
        block_size: int,
        num_ahead_blocks: int,
    ) -> None:
        self._host = host
        self._saves = saves
        self._queue = queue
        self._metrics = metrics
        self._page_size = page_size
        self._block_size = block_size
        self._num_ahead = num_ahead_blocks
        self._num_clean = self._look_below = 0
        self._pages: dict[bytes, _DevicePage] = {}
        self._by_block: dict[int, list[_DevicePage]] = {}

    @classmethod
    def create(
        cls,
        options: PlannerOptions,
        saves: Saves,
        host: HostTier,
        queue: DeviceQueue | None,
        metrics: Metrics,
    ) -> "WriteBack | None":
        """Have ``saves`` wait, where that is the policy; without a prefix cache vLLM keeps nothing
        that could be saved later."""
        if options.write_policy != "write_back" or not options.shares_device_pages:
            return None
        if queue is None:
            raise InvariantBroken("write_back needs to know which blocks vLLM reuses next")
        saves.write_back = cls(
            host,
            saves,
            queue,
            metrics,
            page_size=options.page_size,
            block_size=options.block_size,
            num_ahead_blocks=options.num_ahead_blocks,
        )
        return saves.write_back

    def __len__(self) -> int:
        return len(self._pages)

    def remember(
        self, state: RequestState, first: int, last: int, doubts: tuple[RunningLoad, ...]
    ) -> None:
        """Pages ``[first, last)`` of this request are on the device and host lacks them."""
        hashes = state.tokens.page_hashes(last)
        page, block = self._page_size, self._block_size
        watched: set[int] = set()
        for number in range(first, last):
            if hashes[number] in self._pages or self._saves.is_in_flight(hashes[number]):
                continue
            start, stop = number * page // block, -(-(number + 1) * page // block)
            block_ids = tuple(state.block_ids[start:stop])
            note = state.tokens.note(number)
            known = _DevicePage(hashes, number, block_ids, note, state.priority, doubts)
            self._pages[hashes[number]] = known
            for block_id in block_ids:
                self._by_block.setdefault(block_id, []).append(known)
            watched.update(block_ids)
        if watched:
            self._queue.watch(sorted(watched), self._lose_block)

    def count_taken(self, num_blocks: int) -> None:
        """vLLM has taken about so many blocks from its free queue."""
        self._num_clean -= num_blocks

    def plan(self, now: float) -> None:
        """Save what vLLM reuses next. Looks at nothing until half of the blocks that were found
        clean have been taken, so that the work is O(blocks taken)."""
        if not self._pages or self._num_clean > self._look_below:
            return
        budget, num_seen = MAX_PAGES_PER_SAVE, 0
        for block_id in self._queue.next_reused(self._num_ahead):
            num_seen += 1
            for page in self._by_block.get(block_id, [])[::-1]:  # the deepest one first
                while self._pages.get(page.page_hash) is page:
                    num_planned = self._save_chain(page, budget, now)
                    if num_planned is None:
                        return  # host has no room
                    budget -= num_planned
                    if budget <= 0:
                        return  # the rest in the next step
        self._num_clean, self._look_below = num_seen, num_seen // 2

    def forget(self) -> None:
        """Reset: what is on the device is not saved any more."""
        self._pages.clear()
        self._by_block.clear()

    def _lose_block(self, block_id: int) -> None:
        self._saves.lose_block(block_id)
        for page in tuple(self._by_block.get(block_id, ())):
            self._drop(page)
            if page.page_hash not in self._host.index:
                self._metrics.count("save_skipped_tokens", self._page_size, "reused")

    def _drop(self, page: _DevicePage) -> None:
        if self._pages.get(page.page_hash) is page:
            del self._pages[page.page_hash]
        for block_id in page.block_ids:
            others = self._by_block.get(block_id)
            if others is not None and page in others:
                others.remove(page)
                if not others:
                    del self._by_block[block_id]

    def _save_chain(self, tail: _DevicePage, budget: int, now: float) -> int | None:
        """Save this page and what host lacks of its ancestors, the first ones first. Returns how
        many pages were planned, None where host has no room for a single one."""
        hashes = tail.hashes
        first = self._host.index.match(hashes, tail.number + 1)
        while first <= tail.number and self._saves.is_in_flight(hashes[first]):
            first += 1
        if first > tail.number:
            self._drop(tail)
            return 0
        chain = self._chain(hashes, first, min(tail.number, first + budget - 1))
        if not chain:
            self._metrics.count("save_skipped_tokens", self._page_size, "chain_broken")
            self._drop(tail)
            return 0
        num_planned = self._saves.plan(self._run_of(chain), now, holds_blocks=False)
        for page in chain[:num_planned]:
            self._drop(page)
        return num_planned or None

    def _chain(self, hashes: Sequence[bytes], first: int, last: int) -> list[_DevicePage]:
        """Pages ``first`` to ``last`` as far as they are on the device, one after the other."""
        chain: list[_DevicePage] = []
        for number in range(first, last + 1):
            page = self._pages.get(hashes[number])
            if page is None:
                break
            if any(load.is_ok is False for load in page.doubts):
                self._drop(page)
                break
            if chain and not self._fits(chain[-1], page):
                break
            chain.append(page)
        return chain

    def _fits(self, page: _DevicePage, after: _DevicePage) -> bool:
        """Whether two pages can be saved at once: pages of one block must lie in one block."""
        shares = after.number * self._page_size % self._block_size != 0
        return not shares or page.block_ids == after.block_ids

    def _run_of(self, chain: list[_DevicePage]) -> PageRun:
        first = chain[0]
        block_ids: list[int] = []
        for page in chain:
            is_same_block = page.number * self._page_size % self._block_size != 0
            if not block_ids or not is_same_block:
                block_ids += page.block_ids
        doubts = {id(load): load for page in chain for load in page.doubts if load.is_ok is None}
        parent_hash = first.hashes[first.number - 1] if first.number else None
        return PageRun(
            hashes=tuple(page.page_hash for page in chain),
            parent_hash=parent_hash,
            first=first.number,
            tables=(tuple(block_ids),),
            parts=(0,) * len(chain),
            notes=tuple(page.note for page in chain),
            priority=max(page.priority for page in chain),
            user="",
            use_gap=self._host.expected_gap(first.page_hash, parent_hash),
            doubts=tuple(doubts.values()),
        )

"""Device -> host: which pages are saved, and what becomes of them."""

from dataclasses import dataclass

import numpy as np

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_tier import HostTier
from vllm_hicache.loads import RunningLoad
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import CopyList, CopyOp, copy_list
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.progress import Outcome
from vllm_hicache.request_state import DeviceBlocks, RequestState

MAX_PAGES_PER_SAVE = 64
"""Pages become visible one operation at a time; larger operations are seen later, smaller ones
cost more messages. 64 pages of 256 tokens are one prefill of 16,384 tokens."""


@dataclass(slots=True, eq=False)
class _Save:
    """A save that some worker has not acknowledged. Owns its slots; holds its blocks."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    copies: CopyList
    notes: tuple[object, ...]
    priority: int
    doubts: tuple[RunningLoad, ...]
    """Loads that its bytes were computed on top of and that were not acknowledged then."""
    started_at: float
    is_stale: bool = False
    """A reset came between: the bytes belong to a cache that is gone."""


class Saves:
    """Saves that are planned or running.

    A page is saved only under a page that is in host or on its way there. Copies complete in
    order, so a page is published after its parent, or not at all where the parent was lost.
    """

    def __init__(
        self,
        host: HostTier,
        blocks: DeviceBlocks,
        metrics: Metrics,
        *,
        page_size: int,
        block_size: int,
    ) -> None:
        self._host = host
        self._blocks = blocks
        self._metrics = metrics
        self._page_size = page_size
        self._block_size = block_size
        self._next_op = 1
        self._planned: list[_Save] = []
        self._running: dict[int, _Save] = {}
        self._in_flight: dict[bytes, _Save] = {}

    @property
    def num_running(self) -> int:
        """Saves that are planned or not yet acknowledged by every worker."""
        return len(self._planned) + len(self._running)

    @property
    def num_held_blocks(self) -> int:
        return sum(len(save.block_ids) for save in self._all())

    @property
    def num_slots(self) -> int:
        """Host slots that saves own."""
        return sum(len(save.slots) for save in self._all())

    def slots(self) -> list[int]:
        """The host slots that saves own."""
        return [slot for save in self._all() for slot in save.slots]

    def held_blocks(self) -> list[int]:
        """Device blocks that saves read, one entry a reference."""
        return [block_id for save in self._all() for block_id in save.block_ids]

    @property
    def num_pages_in_flight(self) -> int:
        """Pages that nobody saves again because they are on their way."""
        return len(self._in_flight)

    def lost_pages(self) -> list[bytes]:
        """Pages that count as on their way although no save has them; there are none."""
        running = set(self._all())
        return [page for page, save in self._in_flight.items() if save not in running]

    def _all(self) -> list[_Save]:
        return [*self._planned, *self._running.values()]

    def collect(
        self,
        state: RequestState,
        num_tokens: int,
        now: float,
        doubts: tuple[RunningLoad, ...] = (),
    ) -> None:
        """Plan saves for the whole pages among the first ``num_tokens`` that host lacks.

        Their KV is on the device once this step's forward is done, and the blocks are
        allocated. Where it was computed on top of ``doubts``, it is used only if all of them
        turn out well. O(new pages).
        """
        if any(load.is_ok is False for load in doubts):
            return  # vLLM has not taken the tokens back yet
        last = min(num_tokens, len(state.block_ids) * self._block_size) // self._page_size
        if last <= state.num_saved_pages:
            return
        if state.is_outdated:
            state.num_saved_pages = last
            return
        hashes = state.tokens.page_hashes(last)
        first = self._host.index.match(hashes, last)
        if not state.may_save:
            skipped = last - max(first, state.num_saved_pages)
            self._metrics.count("save_skipped_tokens", skipped * self._page_size, "not_wanted")
            state.num_saved_pages = last
            return
        if first and not state.num_saved_pages:
            used = self._host.index.pages_of(hashes[first - 1 : first])[0]
            self._host.touch(used, state.priority)
        while first < last and hashes[first] in self._in_flight:
            first += 1
        state.num_saved_pages = last
        while first < last:
            stop = min(first + MAX_PAGES_PER_SAVE, last)
            saved = self._plan(state, first, stop, now, doubts)
            first += saved
            if first < stop:
                skipped = (last - first) * self._page_size
                self._metrics.count("save_skipped_tokens", skipped, "host_full")
                break

    def _plan(
        self,
        state: RequestState,
        first: int,
        stop: int,
        now: float,
        doubts: tuple[RunningLoad, ...],
    ) -> int:
        hashes = tuple(state.tokens.page_hashes(stop)[first:stop])
        parent_hash = state.tokens.page_hashes(stop)[first - 1] if first else None
        parent = self._host.index.get(parent_hash) if parent_hash is not None else None
        anchor = [parent] if parent is not None else []
        self._host.pin(anchor)
        slots = self._host.allocate(len(hashes))
        self._host.unpin(anchor)
        if not slots:
            return 0
        hashes = hashes[: len(slots)]
        page, block = self._page_size, self._block_size
        start, end = first * page, (first + len(slots)) * page
        block_ids = state.block_ids[start // block : -(-end // block)]
        copies = copy_list(
            start,
            end,
            page_size=page,
            block_size=block,
            slots=np.asarray(slots),
            block_ids=np.asarray(block_ids),
        )
        save = _Save(
            hashes=hashes,
            parent_hash=parent_hash,
            slots=tuple(slots),
            block_ids=tuple(block_ids),
            copies=copies,
            notes=tuple(state.tokens.note(first + i) for i in range(len(slots))),
            priority=state.priority,
            doubts=doubts,
            started_at=now,
        )
        self._blocks.hold(save.block_ids)
        self._in_flight.update(dict.fromkeys(hashes, save))
        self._planned.append(save)
        return len(slots)

    def take_planned(self) -> tuple[CopyOp, ...]:
        """Saves for this step's plan; from here on only their acknowledgement ends them."""
        planned, self._planned = self._planned, []
        first, self._next_op = self._next_op, self._next_op + len(planned)
        self._running.update(enumerate(planned, start=first))
        return tuple(CopyOp(first + i, save.copies) for i, save in enumerate(planned))

    def cancel_planned(self) -> None:
        """Drop saves that no worker knows of yet."""
        planned, self._planned = self._planned, []
        for save in planned:
            save.is_stale = True
            self._release(save)
            self._give_up(save, "reset")

    def can_settle(self, op_id: int) -> bool:
        """Whether it is known what this finished save's bytes are worth."""
        save = self._running.get(op_id)
        return save is None or all(load.is_ok is not None for load in save.doubts)

    def settle(self, outcome: Outcome, now: float) -> list[HostPage]:
        """Every worker has finished this save: blocks go back, pages become visible."""
        save = self._running.pop(outcome.op_id, None)
        if save is None:
            raise InvariantBroken(f"save {outcome.op_id} is reported, but it is not running")
        self._release(save)
        is_sound = outcome.is_ok and all(load.is_ok for load in save.doubts)
        if save.is_stale or not is_sound:
            self._give_up(save, "reset" if save.is_stale else "copy_failed")
            self._metrics.count("copy_failures", int(not outcome.is_ok))
            return []
        self._metrics.observe("save_seconds", now - save.started_at)
        return self._publish(save)

    def forget(self) -> None:
        """Reset: what is being saved must not become visible."""
        self._in_flight.clear()
        for save in self._all():
            save.is_stale = True

    def _release(self, save: _Save) -> None:
        self._blocks.release(save.block_ids)
        for page_hash in save.hashes:
            if self._in_flight.get(page_hash) is save:
                del self._in_flight[page_hash]

    def _give_up(self, save: _Save, reason: str) -> None:
        self._host.free(save.slots)
        self._metrics.count("save_skipped_tokens", len(save.slots) * self._page_size, reason)

    def _publish(self, save: _Save) -> list[HostPage]:
        parent_hash = save.parent_hash
        published = []
        for page_hash, slot, note in zip(save.hashes, save.slots, save.notes, strict=True):
            page = self._host.publish(page_hash, parent_hash, slot)
            if page is not None:
                page.note = note
                page.priority = save.priority
                published.append(page)
            parent_hash = page_hash
        self._metrics.count("saved_tokens", len(published) * self._page_size)
        lost = len(save.slots) - len(published)
        if lost:
            self._metrics.count("save_skipped_tokens", lost * self._page_size, "chain_broken")
        return published

"""Device -> host: which pages are saved, and what becomes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_hicache.block_tables import PageBlocks
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_tier import HostTier
from vllm_hicache.loads import RunningLoad
from vllm_hicache.metrics import Metrics
from vllm_hicache.page_runs import PageRun
from vllm_hicache.page_uses import PageUses
from vllm_hicache.plan import CopyList, CopyOp, group_copies
from vllm_hicache.pools import KVGroup
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.progress import Outcome
from vllm_hicache.request_state import DeviceBlocks, RequestState

if TYPE_CHECKING:
    from vllm_hicache.write_back import WriteBack

MAX_PAGES_PER_SAVE = 64
"""Pages become visible one operation at a time; larger operations are seen later, smaller ones
cost more messages. 64 pages of 256 tokens are one prefill of 16,384 tokens."""


@dataclass(slots=True, eq=False)
class _Save:
    """A save that some worker has not acknowledged. Owns its slots."""

    run: PageRun
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    """All that are read, group by group."""
    copies: list[CopyList]
    started_at: float
    holds_blocks: bool
    num_intact: int
    """Leading pages whose blocks nobody else got while they were read; all of them where the
    save holds its blocks."""
    is_stale: bool = False
    """A reset came between: the bytes belong to a cache that is gone."""
    completes: tuple[HostPage, ...] = ()
    """Pages in host that get parts; their slots are theirs, pinned, and nobody reads the parts."""

    @property
    def owned_slots(self) -> tuple[int, ...]:
        """Host slots that belong to the save."""
        return () if self.completes else self.slots

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return self.run.hashes[: len(self.slots)]


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
        groups: Sequence[KVGroup],
        uses: PageUses | None = None,
        min_uses: int = 1,
    ) -> None:
        self._host = host
        self._blocks = blocks
        self._uses = uses
        self._min_uses = min_uses
        self._metrics = metrics
        self._page_size = page_size
        self._block_size = groups[0].block_size
        self._page_blocks = PageBlocks(groups, page_size)
        self._next_op = 1
        self._completing: dict[bytes, int] = {}
        self._completed: list[HostPage] = []
        self._planned: list[_Save] = []
        self._running: dict[int, _Save] = {}
        self._in_flight: dict[bytes, _Save] = {}
        self._unheld: dict[int, list[_Save]] = {}
        self.write_back: WriteBack | None = None
        """Who saves pages later than when they are computed."""

    @property
    def num_running(self) -> int:
        """Saves that are planned or not yet acknowledged by every worker."""
        return len(self._planned) + len(self._running)

    @property
    def num_held_blocks(self) -> int:
        return sum(len(save.block_ids) for save in self._all() if save.holds_blocks)

    @property
    def num_slots(self) -> int:
        """Host slots that saves own."""
        return sum(len(save.owned_slots) for save in self._all())

    def slots(self) -> list[int]:
        """The host slots that saves own."""
        return [slot for save in self._all() for slot in save.owned_slots]

    def pinned_pages(self) -> list[HostPage]:
        """Pages in host that saves complete, one entry a pin."""
        return [page for save in self._all() for page in save.completes]

    def take_completed(self) -> list[HostPage]:
        """Pages in host that have got parts since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def held_blocks(self) -> list[int]:
        """Device blocks that saves hold, one entry a reference."""
        saves = [save for save in self._all() if save.holds_blocks]
        return [block_id for save in saves for block_id in save.block_ids]

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
        num_tokens = min(num_tokens, self._page_blocks.num_tokens(state.tables))
        last = num_tokens // self._page_size
        if last <= state.num_saved_pages:
            return
        if state.is_outdated:
            state.num_saved_pages = last
            return
        hashes = state.tokens.page_hashes(last)
        first = self._host.index.match(hashes, last)
        if not state.may_save:
            skipped = last - max(first, state.num_saved_pages)
            self._skip(skipped, "not_wanted")
            state.num_saved_pages = last
            return
        if first and not state.num_saved_pages:
            used = self._host.index.pages_of(hashes[first - 1 : first])[0]
            self._host.touch(used, state.priority, state.request_id)
        stop = self._note_uses(state, hashes, first, last)
        had_pages, state.num_saved_pages = state.num_saved_pages, last
        if self._page_blocks.has_parts and had_pages < first:
            self._complete(state, had_pages, min(first, last), now, doubts)
        if self.write_back is not None:
            self.write_back.remember(state, max(first, had_pages), last, doubts)
            return
        while first < stop and hashes[first] in self._in_flight:
            first += 1
        saved = self._save_all(state, first, stop, now, doubts)
        if saved < stop:
            reason = "not_admitted" if self._host.has_spared else "host_full"
            self._skip(stop - max(saved, had_pages), reason)

    def _note_uses(
        self, state: RequestState, hashes: Sequence[bytes], first: int, last: int
    ) -> int:
        """Count this request as a user of the pages that are new to it, protect those of them
        in host that others have used, too, and return up to where pages are worth a save."""
        uses = self._uses
        if uses is None:
            return last
        start, present = state.num_used_pages, min(first, last)
        state.num_used_pages = max(start, last)
        if start < present:
            deepest = self._host.index.pages_of(hashes[present - 1 : present])[0]
            if self._host.is_well_protected(deepest):
                start = present
        counts = uses.note(hashes[start:last])
        num_shared = uses.num_shared(hashes[start:present])
        if num_shared:
            self._host.protect(self._host.index.pages_of(hashes[start : start + num_shared]))
        if self._min_uses <= 1:
            return last
        stop = start + len(counts)
        while stop > start and counts[stop - 1 - start] < self._min_uses:
            stop -= 1
        skipped = last - max(first, stop, start)
        self._skip(skipped, "too_few_uses")
        return stop if stop > start else 0

    def _save_all(
        self,
        state: RequestState,
        first: int,
        last: int,
        now: float,
        doubts: tuple[RunningLoad, ...],
    ) -> int:
        """Save pages ``[first, last)`` as far as there is room; returns up to where."""
        if first >= last:
            return first
        gap = self._use_gap(state.tokens.page_hashes(first + 1), first)
        while first < last:
            stop = min(first + MAX_PAGES_PER_SAVE, last)
            first += self.plan(self._run_of(state, first, stop, doubts, gap), now)
            if first < stop:
                break
        return first

    def _use_gap(self, hashes: Sequence[bytes], first: int) -> int:
        """Requests until this chain is expected back, its page ``first`` being new to host."""
        above = self._in_flight.get(hashes[first - 1]) if first else None
        if above is not None:
            return above.run.use_gap
        return self._host.expected_gap(hashes[first], hashes[first - 1] if first else None)

    def _run_of(
        self,
        state: RequestState,
        first: int,
        stop: int,
        doubts: tuple[RunningLoad, ...],
        use_gap: int = 0,
    ) -> PageRun:
        hashes = state.tokens.page_hashes(stop)
        tables = self._page_blocks.of_pages(state.tables, first, stop)
        without = self._page_blocks.draft_bits if state.lacks_draft_state else 0
        return PageRun(
            hashes=tuple(hashes[first:stop]),
            parent_hash=hashes[first - 1] if first else None,
            first=first,
            tables=tables,
            parts=tuple(have & ~without for have in self._page_blocks.parts(tables, first, stop)),
            notes=tuple(state.tokens.note(i) for i in range(first, stop)),
            priority=state.priority,
            user=state.request_id,
            use_gap=use_gap,
            doubts=doubts,
        )

    def is_in_flight(self, page_hash: bytes) -> bool:
        """Whether this page is on its way to host."""
        return page_hash in self._in_flight

    def plan(self, run: PageRun, now: float, *, holds_blocks: bool = True) -> int:
        """Save as many leading pages of ``run`` as find a slot; returns how many.

        Without ``holds_blocks`` vLLM may reuse the blocks at any time: whoever learns of it calls
        ``lose_block``, before the block is written.
        """
        slots = self._take_slots(run)
        if not slots:
            return 0
        save = self._new_save(run, slots, run.parts[: len(slots)], now, holds_blocks=holds_blocks)
        if not holds_blocks:
            for block_id in save.block_ids:
                self._unheld.setdefault(block_id, []).append(save)
        self._in_flight.update(dict.fromkeys(save.hashes, save))
        return len(slots)

    def _new_save(
        self,
        run: PageRun,
        slots: Sequence[int],
        parts: Sequence[int],
        now: float,
        *,
        holds_blocks: bool = True,
        completes: tuple[HostPage, ...] = (),
    ) -> _Save:
        """Plan the copies of the leading pages of ``run``, as many as there are slots."""
        tables = self._page_blocks.leading(run.tables, run.first, len(slots))
        copies = group_copies(
            run.first * self._page_size,
            (run.first + len(slots)) * self._page_size,
            page_size=self._page_size,
            groups=self._page_blocks.groups,
            slots=np.asarray(slots),
            tables=tables,
            parts=parts,
        )
        if completes:  # only what the pages lack is written
            for i, group in enumerate(self._page_blocks.groups):
                copies[i] = copies[i] if group.bit is not None else copies[i][:0]
        save = _Save(
            run=run,
            slots=tuple(slots),
            block_ids=self._page_blocks.blocks(tables),
            copies=copies,
            started_at=now,
            holds_blocks=holds_blocks,
            num_intact=len(slots),
            completes=completes,
        )
        if holds_blocks:
            self._blocks.hold(save.block_ids)
        self._planned.append(save)
        return save

    def _complete(
        self,
        state: RequestState,
        first: int,
        stop: int,
        now: float,
        doubts: tuple[RunningLoad, ...],
    ) -> None:
        """Pages ``[first, stop)`` are in host: save the parts that they lack there and that the
        device has."""
        run = self._run_of(state, first, stop, doubts)
        pages = self._host.index.pages_of(run.hashes)
        draft_bits = self._page_blocks.draft_bits  # zeros may have been loaded in their place
        lacking = [
            have & ~page.parts & ~self._completing.get(page.page_hash, 0) & ~draft_bits
            for page, have in zip(pages, run.parts, strict=True)
        ]
        start = 0
        while start < len(pages):
            if not lacking[start]:
                start += 1
                continue
            end = start
            while end < len(pages) and lacking[end] and end - start < MAX_PAGES_PER_SAVE:
                end += 1
            self._complete_run(
                self._run_of(state, first + start, first + end, doubts),
                tuple(pages[start:end]),
                lacking[start:end],
                now,
            )
            start = end

    def _complete_run(
        self, run: PageRun, pages: tuple[HostPage, ...], parts: list[int], now: float
    ) -> None:
        self._host.pin(pages)
        for page, missing in zip(pages, parts, strict=True):
            self._completing[page.page_hash] = self._completing.get(page.page_hash, 0) | missing
        run = replace(run, parts=tuple(parts))
        self._new_save(run, [page.slot for page in pages], parts, now, completes=pages)

    def _take_slots(self, run: PageRun) -> list[int]:
        """Slots for the leading pages; they may not take the place of pages of more worth."""
        parent = self._host.index.get(run.parent_hash) if run.parent_hash is not None else None
        anchor = [parent] if parent is not None else []
        num_shared = self._uses.num_shared(run.hashes) if self._uses is not None else None
        self._host.pin(anchor)
        slots = self._host.allocate(len(run.hashes), num_shared, run.use_gap)
        self._host.note_refused(run.hashes[len(slots) :])
        self._host.unpin(anchor)
        return slots

    def lose_block(self, block_id: int) -> None:
        """vLLM gives this block to somebody else: what is read from it from now on is not kept."""
        for save in self._unheld.pop(block_id, ()):
            start = save.run.first * self._page_size // self._block_size
            token = (start + save.block_ids.index(block_id)) * self._block_size
            page = max(0, token // self._page_size - save.run.first)
            save.num_intact = min(save.num_intact, page)

    def take_planned(self) -> tuple[CopyOp, ...]:
        """Saves for this step's plan; from here on only their acknowledgement ends them."""
        planned, self._planned = self._planned, []
        first, self._next_op = self._next_op, self._next_op + len(planned)
        self._running.update(enumerate(planned, start=first))
        return tuple(
            CopyOp(first + i, save.copies[0], tuple(save.copies[1:]))
            for i, save in enumerate(planned)
        )

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
        return save is None or all(load.is_ok is not None for load in save.run.doubts)

    def settle(self, outcome: Outcome, now: float) -> list[HostPage]:
        """Every worker has finished this save: blocks go back, pages become visible."""
        save = self._running.pop(outcome.op_id, None)
        if save is None:
            raise InvariantBroken(f"save {outcome.op_id} is reported, but it is not running")
        self._release(save)
        is_sound = outcome.is_ok and all(load.is_ok for load in save.run.doubts)
        if save.is_stale or not is_sound:
            self._give_up(save, "reset" if save.is_stale else "copy_failed")
            self._metrics.count("copy_failures", int(not outcome.is_ok))
            return []
        self._metrics.observe("save_seconds", now - save.started_at)
        if save.completes:
            self._add_parts(save)
            return []
        return self._publish(save)

    def forget(self) -> None:
        """Reset: what is being saved must not become visible."""
        self._in_flight.clear()
        self._completing.clear()
        for save in self._all():
            save.is_stale = True

    def _release(self, save: _Save) -> None:
        if save.holds_blocks:
            self._blocks.release(save.block_ids)
        else:
            self._stop_watching(save)
        if save.completes:
            self._host.unpin(save.completes)
            for page, parts in zip(save.completes, save.run.parts, strict=True):
                rest = self._completing.pop(page.page_hash, 0) & ~parts
                if rest:
                    self._completing[page.page_hash] = rest
            return
        for page_hash in save.hashes:
            if self._in_flight.get(page_hash) is save:
                del self._in_flight[page_hash]

    def _stop_watching(self, save: _Save) -> None:
        for block_id in save.block_ids:
            readers = self._unheld.get(block_id)
            if readers is not None and save in readers:
                readers.remove(save)
                if not readers:
                    del self._unheld[block_id]

    def _add_parts(self, save: _Save) -> None:
        for page, parts in zip(save.completes, save.run.parts, strict=True):
            if page.is_present:
                self._host.index.add_parts(page, parts)
                page.is_persisted = False
                self._completed.append(page)

    def _give_up(self, save: _Save, reason: str) -> None:
        if save.completes:
            return
        self._host.free(save.slots)
        self._skip(len(save.slots), reason)

    def _publish(self, save: _Save) -> list[HostPage]:
        run, intact = save.run, save.num_intact
        self._host.free(save.slots[intact:])
        self._skip(len(save.slots) - intact, "reused")
        parent_hash = run.parent_hash
        published = []
        for page_hash, slot, parts, note in zip(
            run.hashes, save.slots[:intact], run.parts, run.notes, strict=False
        ):
            page = self._host.publish(page_hash, parent_hash, slot, parts, run.user)
            if page is not None:
                page.note = note
                page.priority = run.priority
                published.append(page)
            parent_hash = page_hash
        if self._uses is not None:
            num_shared = self._uses.num_shared(page.page_hash for page in published)
            self._host.protect(published[:num_shared])
        self._metrics.count("saved_tokens", len(published) * self._page_size)
        self._skip(intact - len(published), "chain_broken")
        return published

    def _skip(self, num_pages: int, reason: str) -> None:
        if num_pages > 0:
            self._metrics.count("save_skipped_tokens", num_pages * self._page_size, reason)

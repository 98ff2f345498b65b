"""The host tier: slots, index, protection and eviction behind six verbs."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.eviction import NEXT_USE, EvictionQueue
from vllm_hicache.host_slots import HostSlots
from vllm_hicache.next_use_queue import NextUseQueue
from vllm_hicache.prefix_index import HostPage, PrefixIndex
from vllm_hicache.reuse_times import ReuseTimes
from vllm_hicache.tiers import SlotOwner

PROTECTED_SHARE = 0.8
"""Most of the pool that may be protected. The rest is where pages stand the test whether they
are used again: less would lose a conversation before its next turn, more is open to scans."""
FRESH_SHARE = 0.125
"""A page is not protected anew before so many of those that may be protected were."""


class HostTier:
    """Which pages are in host memory, where, and which may leave.

    Ownership of a slot:
      allocate()          FREE      -> OPERATION   caller owns the slot until it publishes or frees
      publish()           OPERATION -> INDEX       bytes complete on every worker
      free()              OPERATION -> FREE        no worker touches the slot any more
      eviction, clear()   INDEX     -> FREE        only for pages without pins
    A pinned page that ``clear`` forgets keeps its slot until its last pin is gone.

    Slots may get ready one by one. Until all are, no page is evicted for want of a slot that is
    about to come.
    """

    def __init__(
        self,
        num_slots: int,
        policy: str,
        on_evict: Callable[[HostPage], None] | None = None,
        *,
        num_ready: int | None = None,
    ) -> None:
        self.slots = HostSlots(num_slots, num_ready)
        self.is_growing = self.slots.num_ready < num_slots
        """Whether more slots get ready."""
        self._num_coming = num_slots - self.slots.num_ready
        """Slots without memory yet, less those that somebody waited for."""
        self.index = PrefixIndex()
        self.num_pinned = 0
        self._policy = policy
        self._times = ReuseTimes(num_slots if policy == NEXT_USE else 0)
        self._queue = self._new_queue()
        self._protections = 0
        self._protected: OrderedDict[HostPage, None] = OrderedDict()
        self.max_protected = int(self.slots.num_ready * PROTECTED_SHARE)
        self._on_evict = on_evict
        self._clock = 0
        self.has_spared = False
        """Whether the last allocation fell short of a protected page, not of evictable ones."""

    @property
    def num_queued(self) -> int:
        """Entries of the eviction queue; at most two a page."""
        return len(self._queue)

    def is_queued(self, page: HostPage) -> bool:
        """Whether the eviction queue has an entry that finds this page in time."""
        return self._queue.has(page)

    @property
    def num_protected(self) -> int:
        return len(self._protected)

    def protected_pages(self) -> list[HostPage]:
        """Protected pages, the one that loses its protection next first."""
        return list(self._protected)

    def make_ready(self, num_slots: int, num_expected: int) -> None:
        """Slots below ``num_slots`` can be used; in the end it will be ``num_expected``."""
        self.slots.make_ready(num_slots)
        self.max_protected = int(num_slots * PROTECTED_SHARE)
        self.is_growing = num_slots < num_expected
        self._num_coming = max(0, num_expected - num_slots)

    def allocate(
        self, count: int, num_proven: int | None = None, use_gap: int | None = None
    ) -> list[int]:
        """Up to ``count`` slots, evicting pages where none is free.

        num_proven  only the first so many may take the place of a protected page; where the
                    policy is ``priority`` or ``next_use``, that decides alone
        use_gap     with ``next_use``: requests until what comes is expected to be used. It takes
                    the place of reused pages only that are expected later; with 0 of none

        Gives less than it could while slots are about to come.
        """
        taken = self.slots.take(count)
        self.has_spared = False
        if self._num_coming and len(taken) < count and self._may_wait(count - len(taken)):
            return taken
        spares = num_proven is not None and not self._queue.decides_alone
        latest = self._times.expected_at(use_gap) if use_gap is not None else None
        while len(taken) < count:
            page = self._queue.pop(latest)
            if page is None:
                self.has_spared = bool(len(self._queue))
                break
            if spares and page.is_protected and len(taken) >= (num_proven or 0):
                self._queue.offer(page)
                self.has_spared = True
                break
            self._evict(page)
            taken += self.slots.take(1)
        return taken

    def expected_gap(self, page_hash: bytes, parent_hash: bytes | None) -> int:
        """Requests until a page that is not in host is expected to be used, if it comes; 0 where
        nothing tells."""
        parent = self.index.get(parent_hash) if parent_hash is not None else None
        return self._times.expected_gap(page_hash, parent)

    def note_refused(self, hashes: Sequence[bytes]) -> None:
        """Pages of one chain that were used and found no slot: remember it."""
        self._times.refused(hashes)

    def publish(
        self,
        page_hash: bytes,
        parent_hash: bytes | None,
        slot: int,
        parts: int = 0,
        user: str = "",
    ) -> HostPage | None:
        """Make a complete page visible, with these parts, brought by the request ``user``. Where
        it cannot hang (already present, or its parent has left) the slot is freed and None
        returned."""
        page = self.index.add(page_hash, parent_hash, slot, parts)
        if page is None:
            self.slots.release(slot)
            return None
        self.slots.give_to_index(slot)
        self._times.came(page)
        self._use(page, user)
        self._queue.offer(page)
        return page

    def free(self, slots: Iterable[int]) -> None:
        """Return slots of an operation whose copies have all ended."""
        for slot in slots:
            if self.slots.owner(slot) != SlotOwner.OPERATION:
                raise InvariantBroken(f"slot {slot} freed by an operation that does not own it")
            self.slots.release(slot)

    def touch(self, page: HostPage, priority: int = 0, user: str = "") -> None:
        """Record a use by the request ``user``, which counts once. Ancestors inherit it, and the
        priority, when their last child leaves."""
        self._use(page, user)
        page.priority = max(page.priority, priority)
        self._queue.used(page)

    def protect(self, pages: Sequence[HostPage]) -> None:
        """Several requests have used these pages of one chain, in its order. Unprotected pages
        leave before them; beyond a share of the pool, those used longest ago lose protection."""
        self._protections += len(pages)
        for page in reversed(pages):  # so that the deepest loses it first
            page.is_protected = True
            page.protected_at = self._protections
            self._protected[page] = None
            self._protected.move_to_end(page)
        while len(self._protected) > self.max_protected:
            page, _ = self._protected.popitem(last=False)
            page.is_protected = False
            self._queue.offer(page)

    def is_well_protected(self, page: HostPage) -> bool:
        """Whether protecting it again would change little: it and its ancestors are far from
        losing it. Spares a burst of requests for one prefix the work."""
        age = self._protections - page.protected_at
        return page.is_protected and age < self.max_protected * FRESH_SHARE

    def pin(self, pages: Iterable[HostPage]) -> None:
        for page in pages:
            if page.pins == 0:
                self.num_pinned += 1
            page.pins += 1

    def unpin(self, pages: Sequence[HostPage]) -> None:
        """Release pins, deepest page first so that leaves become evictable."""
        for page in reversed(pages):
            if page.pins <= 0:
                raise InvariantBroken(f"host page in slot {page.slot} unpinned without a pin")
            page.pins -= 1
            if page.pins:
                continue
            self.num_pinned -= 1
            if page.is_present:
                self._queue.offer(page)
            else:
                self.slots.release(page.slot)

    def discard(self, page: HostPage) -> int:
        """Remove a page whose bytes are in doubt with everything below it. Returns how many.

        Pinned pages leave the index at once and give their slot back with their last pin.
        """
        children: dict[HostPage, list[HostPage]] = {}
        for other in self.index.pages():
            if other.parent is not None:
                children.setdefault(other.parent, []).append(other)
        doomed = [page]
        for victim in doomed:
            doomed += children.get(victim, ())
        for victim in reversed(doomed):
            self._remove(victim)
            if victim.pins == 0:
                self.slots.release(victim.slot)
        if page.parent is not None:
            self._queue.offer(page.parent)
        return len(doomed)

    def forget_stored(self) -> None:
        """Storage is another one now: nothing counts as stored there."""
        for page in self.index.pages():
            page.is_persisted = False

    def clear(self) -> int:
        """Forget all pages. Returns how many there were."""
        pages = self.index.clear()
        for page in pages:
            page.num_children = 0
            page.parent = None
            if page.pins == 0:
                self.slots.release(page.slot)
        self._queue = self._new_queue()
        self._protected.clear()
        return len(pages)

    def _may_wait(self, num_slots: int) -> bool:
        """Whether so many slots come soon, beside those for all who waited since the last came.
        Who waits is saved or fetched when it is used again; who is evicted is lost."""
        if num_slots > self._num_coming:
            return False
        self._num_coming -= num_slots
        return True

    def _new_queue(self) -> EvictionQueue | NextUseQueue:
        if self._policy == NEXT_USE:
            return NextUseQueue(self._times)
        return EvictionQueue(self._policy)

    def _use(self, page: HostPage, user: str) -> None:
        self._clock += 1
        page.last_use = self._clock
        self._times.used(page, user)

    def _evict(self, page: HostPage) -> None:
        parent = page.parent
        self._remove(page)
        self.slots.release(page.slot)
        self._times.left(page)
        if parent is not None:
            parent.last_use = max(parent.last_use, page.last_use)
            parent.priority = max(parent.priority, page.priority)
            self._queue.offer(parent)

    def _remove(self, page: HostPage) -> None:
        self.index.remove(page)
        if page.is_protected:
            del self._protected[page]
            page.is_protected = False
        if self._on_evict is not None:
            self._on_evict(page)

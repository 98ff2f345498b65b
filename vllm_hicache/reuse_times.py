"""When a page is expected to be used again, told in uses of others: the clock of `next_use`."""

from collections import OrderedDict
from collections.abc import Sequence

from vllm_hicache.prefix_index import HostPage

POOLS_REMEMBERED = 4
"""Pages that left are remembered until so many host pools of others have left after them. With
one, the reuse in a conversation trace was seen half as often."""
OVERDUE = 2
"""A page that was not used for so many of its usual gaps is taken for finished with. 1.5 is better
for strict turns and worse for recorded conversations, 3 the other way round."""
NEVER = 1 << 62
USERS_REMEMBERED = 1024
"""More requests than run at once."""


class ReuseTimes:
    """Counts reuses and keeps, for each page, how many lie between two uses of it.

    The clock counts requests that use pages which were used before. A scan, whose pages nobody
    used, does not move it, and neither does time without work: nothing becomes overdue meanwhile.

    >>> times, page = ReuseTimes(8), HostPage(b"a", None, 0)
    >>> for user in ("first", "second", "second"): times.used(page, user)
    >>> page.num_uses, page.use_gap, times.is_overdue(page)
    (2, 1, False)
    """

    def __init__(self, num_slots: int) -> None:
        self.clock = 0
        self._max_left = num_slots * POOLS_REMEMBERED
        self._reusing: OrderedDict[str, None] = OrderedDict()
        self._left: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()

    def used(self, page: HostPage, user: str) -> None:
        """A request uses this page, maybe not for the first time: that counts once. Without a
        name, each call is another request."""
        if user and user == page.last_user:
            page.used_at = self.clock
            return
        page.last_user = user
        if page.num_uses:
            self._tick(user)
            gap = max(1, self.clock - page.used_at)
            page.use_gap = max(1, (page.use_gap + gap) // 2) if page.use_gap else gap
        page.num_uses += 1
        page.used_at = self.clock

    def _tick(self, user: str) -> None:
        """One more request reuses something; what else it reuses is part of the same."""
        if user in self._reusing:
            return
        self.clock += 1
        if user:
            self._reusing[user] = None
            if len(self._reusing) > USERS_REMEMBERED:
                self._reusing.popitem(last=False)

    def left(self, page: HostPage) -> None:
        """Remember a page that leaves host, and tell its parent, now a leaf, of its uses."""
        self._remember(page.page_hash, (page.num_uses, page.used_at, page.use_gap))
        parent = page.parent
        if parent is not None:
            parent.num_uses = max(parent.num_uses, page.num_uses)
            parent.used_at = max(parent.used_at, page.used_at)
            # Whoever uses a page uses its parent, so the parent's gap is the smaller one.
            gaps = [gap for gap in (parent.use_gap, page.use_gap) if gap]
            parent.use_gap = min(gaps, default=0)

    def _remember(self, page_hash: bytes, uses: tuple[int, int, int]) -> None:
        self._left[page_hash] = uses
        self._left.move_to_end(page_hash)
        while len(self._left) > self._max_left:
            self._left.popitem(last=False)

    def came(self, page: HostPage) -> None:
        """A page has entered host: what is remembered of it holds on."""
        known = self._left.pop(page.page_hash, None)
        if known is not None:
            page.num_uses, page.used_at, page.use_gap = known
        elif page.parent is not None and page.parent.num_children == 1:
            page.use_gap = page.parent.use_gap

    def refused(self, hashes: Sequence[bytes]) -> None:
        """Pages of one chain were used and did not enter host."""
        for page_hash in reversed(hashes):  # so that a tail is forgotten before its prefix
            known = self._left.get(page_hash)
            uses, gap = (known[0] + 1, self._gap_of(known)) if known is not None else (1, 0)
            self._remember(page_hash, (uses, self.clock, gap))

    def expected_gap(self, page_hash: bytes, parent: HostPage | None) -> int:
        """Reuses until a page that is not in host is used, if it enters now: from its earlier
        uses; as its parent's, if it is the only one to continue the chain, as the next turn of a
        conversation does; else 0."""
        known = self._left.get(page_hash)
        if known is not None:
            return self._gap_of(known)
        return parent.use_gap if parent is not None and not parent.num_children else 0

    def expected_at(self, use_gap: int) -> int:
        """Clock at which what is used now and has this gap is used again; 0 counts as never."""
        return self.clock + use_gap if use_gap else NEVER

    def _gap_of(self, known: tuple[int, int, int]) -> int:
        _, used_at, gap = known
        return gap or max(1, self.clock - used_at)

    def is_overdue(self, page: HostPage) -> bool:
        """Whether a page that was used again and again has not been for long."""
        return self.due_at(page) < self.clock

    def due_at(self, page: HostPage) -> int:
        """Clock from which a reused page is overdue."""
        return page.used_at + OVERDUE * page.use_gap

"""When a page is expected to be used again, told in requests: the clocks of `next_use`."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from vllm_hicache.prefix_index import HostPage

POOLS_REMEMBERED = 4
"""Pages that left are remembered until so many host pools of others have left after them. With
one, the reuse in a conversation trace was seen half as often."""
OVERDUE = 2
"""A page that was not used for so many of its usual gaps is taken for finished with. 1.5 is better
for strict turns and worse for recorded conversations, 3 the other way round."""
USERS_REMEMBERED = 1024
"""More requests than run at once."""
NEVER = 1 << 62


class _Uses(NamedTuple):
    """What is kept of a page that is not in host."""

    num_uses: int
    used_at: int
    reuses_then: int
    gap: int
    reuse_gap: int


class ReuseTimes:
    """Counts requests and keeps, for each page, how many lie between two uses of it.

    ``clock`` counts all requests that use host, ``reuses`` those that use what was used before. A
    page becomes overdue by ``reuses``: neither a scan, whose pages nobody used, nor time without
    work makes it so.

    >>> times, page = ReuseTimes(8), HostPage(b"a", None, 0)
    >>> for user in ("first", "other", "second"): times.used(page, user)
    >>> page.num_uses, page.use_gap, times.reuses
    (3, 1, 2)
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: of the host pool; 0 remembers no page that is not in host."""
        self.clock = 0
        self.reuses = 0
        self._max_left = num_slots * POOLS_REMEMBERED
        self._users: OrderedDict[str, bool] = OrderedDict()
        self._left: OrderedDict[bytes, _Uses] = OrderedDict()

    def used(self, page: HostPage, user: str) -> None:
        """A request uses this page, maybe not for the first time: that counts once. Without a
        name, each call is another request."""
        self._tick(user, reuses=page.num_uses > 0)
        if not user or user != page.last_user:
            page.last_user = user
            if page.num_uses:
                page.use_gap = _mean(page.use_gap, self.clock - page.used_at)
                page.reuse_gap = _mean(page.reuse_gap, self.reuses - page.reuses_then)
            page.num_uses += 1
        page.used_at, page.reuses_then = self.clock, self.reuses

    def _tick(self, user: str, *, reuses: bool) -> None:
        """One more request, unless it was counted already; as one that reuses, likewise."""
        if not user:
            self.clock += 1
            self.reuses += reuses
            return
        known = self._users.get(user)
        self.clock += known is None
        self.reuses += reuses and not known
        self._users[user] = reuses or bool(known)
        if len(self._users) > USERS_REMEMBERED:
            self._users.popitem(last=False)

    def left(self, page: HostPage) -> None:
        """Remember a page that leaves host, and tell its parent, now a leaf, of its uses."""
        uses = (page.num_uses, page.used_at, page.reuses_then, page.use_gap, page.reuse_gap)
        self._remember(page.page_hash, _Uses(*uses))
        parent = page.parent
        if parent is not None:
            parent.num_uses = max(parent.num_uses, page.num_uses)
            parent.used_at = max(parent.used_at, page.used_at)
            parent.reuses_then = max(parent.reuses_then, page.reuses_then)
            # Whoever uses a page uses its parent, so the parent's gap is the smaller one.
            if page.use_gap and not 0 < parent.use_gap < page.use_gap:
                parent.use_gap, parent.reuse_gap = page.use_gap, page.reuse_gap

    def came(self, page: HostPage) -> None:
        """A page has entered host: what is remembered of it holds on."""
        known = self._left.pop(page.page_hash, None)
        if known is not None:
            page.num_uses, page.used_at, page.reuses_then, page.use_gap, page.reuse_gap = known
        elif page.parent is not None and page.parent.num_children == 1:
            page.use_gap, page.reuse_gap = page.parent.use_gap, page.parent.reuse_gap

    def refused(self, hashes: Sequence[bytes]) -> None:
        """Pages of one chain were used and did not enter host."""
        for page_hash in reversed(hashes):  # so that a tail is forgotten before its prefix
            known = self._left.get(page_hash)
            uses, gap, reuse_gap = 1, 0, 0
            if known is not None:
                uses, gap = known.num_uses + 1, self._gap_of(known)
                reuse_gap = known.reuse_gap or max(1, self.reuses - known.reuses_then)
            self._remember(page_hash, _Uses(uses, self.clock, self.reuses, gap, reuse_gap))

    def expected_gap(self, page_hash: bytes, parent: HostPage | None) -> int:
        """Requests until a page that is not in host is used, if it enters now: from its earlier
        uses; as its parent's, if it is the only one to continue the chain, as the next turn of a
        conversation does; else 0."""
        known = self._left.get(page_hash)
        if known is not None:
            return self._gap_of(known)
        return parent.use_gap if parent is not None and not parent.num_children else 0

    def expected_at(self, use_gap: int) -> int:
        """Clock at which what is used now and has this gap is used again; 0 counts as never."""
        return self.clock + use_gap if use_gap else NEVER

    def overdue_after(self, page: HostPage) -> int:
        """Reuses after which a page with a gap is overdue: twice as many as usual, and not fewer
        than requests are usual, since reuses are rare while a cache fills."""
        return page.reuses_then + max(OVERDUE * page.reuse_gap, page.use_gap)

    def _gap_of(self, known: _Uses) -> int:
        return known.gap or max(1, self.clock - known.used_at)

    def _remember(self, page_hash: bytes, uses: _Uses) -> None:
        if not self._max_left:
            return
        self._left[page_hash] = uses
        self._left.move_to_end(page_hash)
        while len(self._left) > self._max_left:
            self._left.popitem(last=False)


def _mean(gap: int, new: int) -> int:
    """The usual gap after one more; the first one is it."""
    return max(1, (gap + new) // 2 if gap else new)

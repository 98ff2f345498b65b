"""How many requests used a page lately, whether it is in host or not. O(1) per page."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

REUSED = 2
"""Requests from which a page counts as shared: a scan is the only one to use its pages."""
POOLS_REMEMBERED = 4
"""A page is remembered until so many host pools of others were used after it."""


class PageUses:
    """Counts the requests that used each page; forgets the page that was used longest ago.

    >>> uses = PageUses(2)
    >>> uses.note([b"a", b"b"]), uses.note([b"a"])
    ([1, 1], [2])
    >>> uses.note([b"c"]), uses.count(b"a"), uses.count(b"b")
    ([1], 2, 0)
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, page_hash: bytes) -> int:
        """Requests that used this page, as far as remembered."""
        return self._counts.get(page_hash, 0)

    def note(self, hashes: Sequence[bytes]) -> list[int]:
        """One more request uses these pages of one chain. Returns their new counts."""
        counts = self._counts
        noted = []
        for page_hash in reversed(hashes):  # so that a tail is forgotten before its prefix
            number = counts.get(page_hash, 0) + 1
            counts[page_hash] = number
            counts.move_to_end(page_hash)
            noted.append(number)
        while len(counts) > self._num_remembered:
            counts.popitem(last=False)
        return noted[::-1]

    def num_shared(self, hashes: Iterable[bytes]) -> int:
        """How many leading pages of these were used by several requests."""
        number = 0
        for page_hash in hashes:
            if self._counts.get(page_hash, 0) < REUSED:
                break
            number += 1
        return number

"""Page hash -> host page. Holds only pages whose bytes are in host on every worker.

The pages of a prefix form a chain; a page is present only while its parent is, so the
present part of any chain is a prefix of it and is found by binary search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.tiers import Tier


@dataclass(slots=True, eq=False)
class HostPage:
    """One page in host memory. Mutable: its counters move while it lives."""

    page_hash: bytes
    parent: "HostPage | None"
    slot: int
    parts: int = 0
    """Bits of the pools that not every page has, and this one has."""
    gaps: int = 0
    """Those of them that some page of its chain, itself included, lacks."""
    origin: Tier = Tier.DEVICE
    """Tier it came from; STORAGE until it is first served, so that the hit is told once."""
    num_children: int = 0
    pins: int = 0
    last_use: int = 0
    num_uses: int = 0
    """Requests that used it, counted where it was the deepest page that they found."""
    used_at: int = 0
    """Requests before its last use."""
    reuses_then: int = 0
    """Those of them that reused something."""
    use_gap: int = 0
    """Usual requests between two uses of it; 0 before the second."""
    reuse_gap: int = 0
    """Those of them that reused something."""
    last_user: str = ""
    """Request that used it last."""
    priority: int = 0
    is_persisted: bool = False
    is_persisting: bool = False
    is_present: bool = True
    is_protected: bool = False
    """Whether several requests used it lately: pages that only one has used leave before it."""
    protected_at: int = 0
    """Clock of protections when it was protected last."""
    queued: int = 0
    """Bits: 1 and 2, whether the eviction queue has an entry of it as unprotected, as protected."""
    note: object = field(default=None, repr=False)
    """What events say of this page; None unless events are published."""

    @property
    def is_evictable(self) -> bool:
        """Whether it may leave host now: a leaf that nobody pins."""
        return self.is_present and self.pins == 0 and self.num_children == 0

    @property
    def is_queued(self) -> bool:
        """Whether the eviction queue finds it in time: an entry as unprotected comes up sooner."""
        return bool(self.queued & (3 if self.is_protected else 1))


class PrefixIndex:
    """The set of host pages.

    >>> index = PrefixIndex()
    >>> _ = index.add(b"a", None, 0), index.add(b"b", b"a", 1)
    >>> index.match([b"a", b"b", b"c"])
    2
    >>> index.add(b"d", b"c", 2) is None
    True
    """

    def __init__(self) -> None:
        self._pages: dict[bytes, HostPage] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, page_hash: bytes) -> HostPage | None:
        return self._pages.get(page_hash)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._pages

    def pages(self) -> list[HostPage]:
        """All pages, in no promised order."""
        return list(self._pages.values())

    def pages_of(self, hashes: Sequence[bytes]) -> list[HostPage]:
        """The pages of these hashes, each of which must be present."""
        try:
            return [self._pages[page_hash] for page_hash in hashes]
        except KeyError as error:
            raise InvariantBroken(f"page {error.args[0].hex()} left host under a load") from error

    def match(self, hashes: Sequence[bytes], limit: int | None = None) -> int:
        """Number of leading pages of the chain that are present. O(log n)."""
        low, high = 0, len(hashes) if limit is None else min(limit, len(hashes))
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._pages:
                low = middle + 1
            else:
                high = middle
        return low

    def match_whole(self, hashes: Sequence[bytes], limit: int, bits: int) -> int:
        """Of the leading pages, at most ``limit`` present ones, those that all have the parts
        ``bits``. O(log n)."""
        low, high = 0, limit
        while low < high:
            middle = (low + high) // 2
            page = self._pages.get(hashes[middle])
            if page is not None and not page.gaps & bits:
                low = middle + 1
            else:
                high = middle
        return low

    def parts_of(self, page_hash: bytes) -> int:
        """Parts of a page; 0 where it is not present."""
        page = self._pages.get(page_hash)
        return page.parts if page is not None else 0

    def add_parts(self, page: HostPage, parts: int) -> None:
        """The page has these parts now, too. What is below it keeps its gaps."""
        page.parts |= parts

    def add(
        self, page_hash: bytes, parent_hash: bytes | None, slot: int, parts: int = 0
    ) -> HostPage | None:
        """Add a page under its parent; None where the page is present or the parent is not."""
        if page_hash in self._pages:
            return None
        parent = None
        if parent_hash is not None:
            parent = self._pages.get(parent_hash)
            if parent is None:
                return None
            parent.num_children += 1
        gaps = ~parts | (parent.gaps if parent is not None else 0)
        page = HostPage(page_hash, parent, slot, parts, gaps)
        self._pages[page_hash] = page
        return page

    def remove(self, page: HostPage) -> None:
        """Remove a page without children."""
        if page.num_children or not page.is_present:
            raise InvariantBroken(
                f"host page in slot {page.slot} removed with {page.num_children} children, "
                f"present={page.is_present}"
            )
        del self._pages[page.page_hash]
        page.is_present = False
        if page.parent is not None:
            page.parent.num_children -= 1

    def clear(self) -> list[HostPage]:
        """Forget every page; the caller takes over their slots."""
        pages = list(self._pages.values())
        for page in pages:
            page.is_present = False
        self._pages.clear()
        return pages


class PartsOfChain(Sequence[int]):
    """Parts of the first ``num_pages`` pages of a chain, looked up when they are asked for."""

    def __init__(self, index: PrefixIndex, hashes: Sequence[bytes], num_pages: int) -> None:
        self._index = index
        self._hashes = hashes
        self._num_pages = num_pages

    def __len__(self) -> int:
        return self._num_pages

    def __getitem__(self, number: int) -> int:  # type: ignore[override]
        return self._index.parts_of(self._hashes[number])

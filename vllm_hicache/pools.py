"""Pools: the kinds of KV that a page of one model consists of, and what a hit needs of each.

Every pool has a region of the host arena; all pools of a page share its slot number, its hash and
its life. A page may lack pools that have a bit: those that not every boundary needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_hicache.errors import ConfigError

MAX_BITS = 8
"""Pools that a page may lack; one byte of a message tells which it has."""


class HitRule(Enum):
    """What a prefix that ends at a boundary needs of a pool."""

    EVERY = "every page"
    WINDOW = "the pages of the window before the boundary"
    CHUNK = "the pages of the chunk in which the boundary lies"
    BOUNDARY = "the page that ends at the boundary"


@dataclass(frozen=True, slots=True)
class Pool:
    """One kind of KV, the same on all workers; a worker without its layers has nothing of it."""

    name: str
    rule: HitRule
    groups: tuple[int, ...]
    """vLLM's KV cache groups that name its blocks; a block id means nothing without its group."""
    reach: int = 0
    """Tokens of the window or chunk."""
    bit: int | None = None
    """Its place in the parts of a page; None where no page exists without it."""
    digest: str = ""
    """8 hex digits: what its bytes are beyond the engine's namespace; "" for the first pool."""
    may_be_zero: bool = False
    """Whether a page may be used without it, zeros in its place: draft state, which decides
    how much is speculated well, not what is answered."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group of vLLM, as the scheduler sees it."""

    block_size: int
    """Tokens of a block; of a state, the tokens between two places of its table."""
    bit: int | None = None
    """Of its pool; None: its blocks are copied with every page."""
    is_state: bool = False
    """One block holds a whole state, that at the end of a page."""


class HitRules:
    """The longest boundary at which the rule of every pool holds.

    >>> window = Pool("window", HitRule.WINDOW, (1,), reach=64, bit=0)
    >>> rules = HitRules((window,), page_size=64, unit=32)
    >>> rules.longest([1, 0, 1, 1], 256), rules.longest([1, 1, 0], 192)
    (256, 128)
    """

    def __init__(self, pools: Sequence[Pool], *, page_size: int, unit: int) -> None:
        self._page_size = page_size
        self._unit = unit
        self._pools = tuple(pool for pool in pools if pool.bit is not None)
        self.all_parts = sum(1 << (pool.bit or 0) for pool in self._pools)
        """Parts of a page that lacks nothing."""
        self.is_trivial = not self._pools
        """Whether every present page can be used up to any boundary."""
        if any((pool.bit or 0) >= MAX_BITS for pool in self._pools):
            raise ConfigError(
                f"a model with {len(self._pools)} pools that pages may lack is not supported; "
                f"allowed: {MAX_BITS}"
            )

    def longest(self, parts: Sequence[int], max_tokens: int, *, zeros: bool = False) -> int:
        """Tokens of the longest usable prefix of pages with these ``parts``, at most
        ``max_tokens``, a multiple of ``unit`` (of pages, where a rule looks at page ends).

        With ``zeros`` pages may lack pools that may be zero. O(pages) at worst, O(window) mostly.
        """
        page, unit = self._page_size, self._unit
        tokens = min(len(parts) * page, max_tokens)
        for pool in self._pools:
            bit = 1 << (pool.bit or 0)
            if pool.rule is HitRule.EVERY and not (zeros and pool.may_be_zero):
                gap = next((i for i, have in enumerate(parts) if not have & bit), len(parts))
                tokens = min(tokens, gap * page)
            if pool.rule is HitRule.BOUNDARY:
                unit = page
        tokens = tokens // unit * unit
        while tokens > 0 and not self._holds(parts, tokens):
            tokens -= unit
        return max(tokens, 0)

    def _holds(self, parts: Sequence[int], tokens: int) -> bool:
        return all(
            all(parts[i] >> (pool.bit or 0) & 1 for i in self.needed(pool, tokens))
            for pool in self._pools
            if pool.rule is not HitRule.EVERY
        )

    def needed(self, pool: Pool, tokens: int) -> range:
        """Pages that must have ``pool`` for a prefix of ``tokens``: whole blocks, because vLLM
        may reuse each of them for a shorter prefix."""
        last = -(-tokens // self._page_size)
        if pool.rule is HitRule.EVERY:
            return range(last)
        if pool.rule is HitRule.BOUNDARY:
            return range(max(0, last - 1), last)
        start = (
            tokens - pool.reach + 1
            if pool.rule is HitRule.WINDOW
            else tokens // pool.reach * pool.reach
        )
        start = max(0, start) // self._unit * self._unit
        return range(min(start // self._page_size, last), last)

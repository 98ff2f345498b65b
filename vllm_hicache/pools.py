"""Pools: the kinds of KV that a page of one model consists of, and what a hit needs of each.

Every pool has a region of the host arena; all pools of a page share its slot number, its hash and
its life. A page may lack pools that have a bit: those that not every boundary needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from math import lcm

from vllm_hicache.errors import ConfigError

MAX_BITS = 8
"""Pools that a page may lack; one byte of a message tells which it has."""


_NAME_DIGITS = 8
_NO_NAME = "0" * _NAME_DIGITS
"""Stands for no name in the header of an object."""


def pool_digest(facts: str) -> str:
    """8 hex digits that name what the bytes of a pool are, in the names of stored objects.

    >>> pool_digest("window 64")
    '1dfa52a9'
    """
    return first_name(sha256(facts.encode()).hexdigest())


def first_name(digits: str) -> str:
    """The first 8 of many hex digits that can be a name.

    >>> first_name("0000000012345678"), first_name("00000001")
    ('12345678', '00000001')
    """
    starts = range(0, len(digits), _NAME_DIGITS)
    names = (digits[start : start + _NAME_DIGITS] for start in starts)
    return next(name for name in names if name != _NO_NAME)


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

    is_draft: bool = False

    @property
    def may_be_zero(self) -> bool:
        """Whether a page may be used without it, zeros in its place: draft state, which decides
        how much is speculated well, not what is answered."""
        return self.is_draft


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group of vLLM, as the scheduler sees it."""

    block_size: int
    """Tokens of a block; of a state, the tokens between two places of its table."""
    bit: int | None = None
    """Of its pool; None: its blocks are copied with every page."""
    marks: int = 0
    """Bits of other pools that have their rows in its blocks: draft state."""
    is_state: bool = False
    """One block holds a whole state, that at the end of a page."""


@dataclass(frozen=True, slots=True)
class ModelPools:
    """What scheduler and workers agree on about the pools of a model."""

    pools: tuple[Pool, ...]
    """Those that pages may lack."""
    groups: tuple[KVGroup, ...]
    page_size: int
    unit: int
    """Tokens of vLLM's scheduler block: hits are multiples of it."""
    num_unsure_tokens: int = 0
    """Last tokens of a hit that a drafter needs computed anew."""

    @property
    def all_parts(self) -> int:
        """Parts of a page that lacks nothing."""
        return sum(1 << pool.bit for pool in self.pools if pool.bit is not None)


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
        with_bit = [pool for pool in pools if pool.bit is not None]
        if any((pool.bit or 0) >= MAX_BITS for pool in with_bit):
            raise ConfigError(
                f"a model with {len(with_bit)} pools that pages may lack is not supported; "
                f"allowed: {MAX_BITS}"
            )
        self._local = tuple(pool for pool in with_bit if pool.rule is not HitRule.EVERY)
        self._local_target = tuple(pool for pool in self._local if not pool.is_draft)
        self.is_trivial = not with_bit
        """Whether every present page can be used up to any boundary."""
        self.has_drafts = any(pool.is_draft for pool in with_bit)
        self.draft_bits = sum(
            1 << (pool.bit or 0) for pool in with_bit if pool.rule is HitRule.EVERY
        )
        """Parts that every page of a prefix needs for its draft state."""
        self._page_ends_only = any(pool.rule is HitRule.BOUNDARY for pool in self._local)

    def whole(self, parts: Sequence[int], bits: int) -> int:
        """Leading pages that all have these parts. O(pages)."""
        return next((i for i, have in enumerate(parts) if bits & ~have), len(parts))

    def longest(self, parts: Sequence[int], max_tokens: int, *, drafts: bool = True) -> int:
        """Tokens of the longest prefix of pages with these ``parts``, at most ``max_tokens``, at
        whose end the window, the chunk and the state are there; parts that every page needs are
        looked at by the caller. A multiple of the unit, of pages where states decide.

        O(window) mostly, O(pages) where the state of none is there.
        """
        unit = self._page_size if self._page_ends_only else self._unit
        tokens = min(len(parts) * self._page_size, max_tokens) // unit * unit
        while tokens > 0:
            shorter = self._shorter(parts, tokens, self._local if drafts else self._local_target)
            if shorter is None:
                return tokens
            tokens = shorter // unit * unit
        return 0

    def _shorter(self, parts: Sequence[int], tokens: int, pools: tuple[Pool, ...]) -> int | None:
        """Where a prefix of so many tokens lacks a part of some pool: the longest shorter one
        that may not need it. None where nothing is lacking."""
        for pool in pools:
            for i in self.needed(pool, tokens):
                if not parts[i] >> (pool.bit or 0) & 1:
                    # What one boundary needs, all between the gap and it need, too; only those
                    # at which a chunk begins need nothing.
                    step = lcm(pool.reach, self._unit) if pool.rule is HitRule.CHUNK else tokens
                    return max(i * self._page_size, (tokens - 1) // step * step)
        return None

    def needed(self, pool: Pool, tokens: int) -> range:
        """Pages that must have ``pool`` for a prefix of ``tokens``: whole blocks, because vLLM
        may reuse each of them for a shorter prefix."""
        last = -(-tokens // self._page_size)
        if pool.rule is HitRule.EVERY:
            return range(last)
        if pool.rule is HitRule.BOUNDARY:
            return range(max(0, last - 1), last)
        if pool.rule is HitRule.WINDOW:
            start = max(0, tokens - pool.reach + 1)
        else:
            start = tokens // pool.reach * pool.reach
        start = start // self._unit * self._unit
        if start >= tokens:  # nothing, though the boundary may lie within a page
            return range(last, last)
        return range(start // self._page_size, last)

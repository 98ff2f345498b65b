"""Page geometry: what the bytes of a page mean in a host slot and where they lie in vLLM's blocks.

A layout is data (offsets, lengths, strides); nothing here touches memory.
Host pages are ordered (head group, layer, token, head in group, content); content is K then V.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

from vllm_hicache.errors import ConfigError

SLOT_ALIGNMENT = 4096  # bytes; a memory page, so that storage can read straight into a slot
REGISTRATION_BYTES = 256 << 20
"""Bytes that are backed and pinned at a time. Start waits for one such piece, the end for those
under way, and while the kernel pins one, other threads cannot map memory. A copy (of 32 MiB at
most) is cut in two at a boundary, and smaller pieces have more of them."""
_FLEET_TP = 8  # heads are split so that engines of up to TP8 share objects
_POOL_DIGITS = 8
_HEX_DIGITS = frozenset("0123456789abcdef")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, order=True)
class LayerSpan:
    """Layers ``[start, stop)`` of the whole model, not of one pipeline stage.

    >>> LayerSpan(30, 60).num_layers
    30
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        _require(
            0 <= self.start < self.stop,
            f"layer span must be 0 <= start < stop, got [{self.start}, {self.stop})",
        )

    @property
    def num_layers(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """The bytes ``[offset, offset + length)`` of a host page: one layer span x one head group.

    ``head_group`` counts over the whole model. A shard is the unit of storage. It holds those
    layers of its span that its pool has.
    """

    layers: LayerSpan
    head_group: int
    offset: int
    length: int
    pool: str = ""
    """8 hex digits of the pool; "" for the first one."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One worker's part of the pages of one pool: layers and KV heads ``[head_start, head_stop)``.

    ``row_bytes`` is the content of one token of one head in one layer; a state is one row of a page
    of one token. ``layer_partition`` is the number of layers of a shard; 0 makes this worker's span
    one shard. Misaligned numbers raise ConfigError: a share that does not fit the grid would never
    be found by others.

    >>> page = PageLayout(page_size=256, layers=LayerSpan(0, 60), total_layers=60, head_start=0,
    ...     head_stop=8, total_kv_heads=8, heads_per_group=2, row_bytes=512, layer_partition=30)
    >>> len(page.shards), page.shards[0].length == page.page_bytes // 8
    (8, True)
    """

    page_size: int
    layers: LayerSpan
    total_layers: int
    head_start: int
    head_stop: int
    total_kv_heads: int
    heads_per_group: int
    row_bytes: int
    layer_partition: int
    num_replicas: int = 1
    """Workers that hold the same heads of the same layers, this one included."""
    replica: int = 0
    members: tuple[int, ...] = ()
    """Those layers of ``layers`` that the pool has, ascending; () stands for all of them."""
    pool: str = ""
    """Its digest, for its shards."""
    shards: tuple[Shard, ...] = field(init=False, repr=False, compare=False)
    """Layer span by layer span, in each all head groups of this worker."""
    own_shards: tuple[Shard, ...] = field(init=False, repr=False, compare=False)
    """Those that this worker writes: replicas take layer spans in turn, each is written once."""

    def __post_init__(self) -> None:
        _require(self.page_size > 0, f"page_size must be positive, got {self.page_size} tokens")
        _require(self.row_bytes > 0, f"row_bytes must be positive, got {self.row_bytes}")
        _require(
            0 <= self.replica < self.num_replicas,
            f"a replica is one of {self.num_replicas}, got {self.replica}",
        )
        if not self.members:
            object.__setattr__(self, "members", tuple(range(self.layers.start, self.layers.stop)))
        self._check_heads()
        self._check_layers()
        self._check_pool()
        shards = self._cut()
        spans = list(dict.fromkeys(shard.layers for shard in shards))
        own = [s for s in shards if spans.index(s.layers) % self.num_replicas == self.replica]
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "own_shards", tuple(own))

    def _check_heads(self) -> None:
        group, total = self.heads_per_group, self.total_kv_heads
        _require(
            0 <= self.head_start < self.head_stop <= total,
            f"a worker's heads [{self.head_start}, {self.head_stop}) must lie in the model's "
            f"{total} KV heads",
        )
        _require(
            0 < group <= self.num_heads and total % group == 0 and self.num_heads % group == 0,
            f"heads per group must divide the model's {total} KV heads and this worker's "
            f"{self.num_heads}, got {group}; allowed: divisors of {gcd(total, self.num_heads)}",
        )
        _require(
            self.head_start % group == 0,
            f"a worker's first head must be a multiple of the {group} heads of a group, "
            f"got {self.head_start}",
        )

    def _check_layers(self) -> None:
        step, span = self.layer_partition, self.layers
        _require(step >= 0, f"storage_layer_partition must not be negative, got {step}")
        _require(
            span.stop <= self.total_layers,
            f"layers [{span.start}, {span.stop}) exceed the model's {self.total_layers} layers",
        )
        fits = step == 0 or (
            span.start % step == 0 and (span.stop % step == 0 or span.stop == self.total_layers)
        )
        _require(
            fits,
            f"pipeline stage [{span.start}, {span.stop}) does not fit storage_layer_partition "
            f"{step}: a stage must start and, but for the last of {self.total_layers} layers, end "
            f"at a multiple of it; choose a common divisor of all stage starts, or 0",
        )

    def _check_pool(self) -> None:
        members, span = self.members, self.layers
        _require(
            all(one < other for one, other in pairwise(members))
            and span.start <= members[0]
            and members[-1] < span.stop,
            f"layers of a pool ascend within [{span.start}, {span.stop}), got {members}",
        )
        _require(
            not self.pool or (len(self.pool) == _POOL_DIGITS and set(self.pool) <= _HEX_DIGITS),
            f"the digest of a pool has {_POOL_DIGITS} lower-case hex digits, got {self.pool!r}",
        )

    def _cut(self) -> tuple[Shard, ...]:
        step = self.layer_partition or self.layers.num_layers
        first_group = self.head_start // self.heads_per_group
        shards = []
        for start in range(self.layers.start, self.layers.stop, step):
            span = LayerSpan(start, min(start + step, self.layers.stop))
            first, last = (bisect_left(self.members, layer) for layer in (span.start, span.stop))
            if first == last:
                continue
            for group in range(self.num_head_groups):
                offset = (group * self.num_layers + first) * self.layer_bytes
                length = (last - first) * self.layer_bytes
                shards.append(Shard(span, first_group + group, offset, length, self.pool))
        return tuple(shards)

    @property
    def own_bytes(self) -> int:
        """Bytes of a page that this worker writes to storage."""
        return sum(shard.length for shard in self.own_shards)

    @property
    def num_layers(self) -> int:
        """Layers of the pool on this worker."""
        return len(self.members)

    @property
    def num_heads(self) -> int:
        """KV heads of this worker."""
        return self.head_stop - self.head_start

    @property
    def num_head_groups(self) -> int:
        return self.num_heads // self.heads_per_group

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one head group."""
        return self.page_size * self.heads_per_group * self.row_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_head_groups * self.num_layers * self.layer_bytes

    @property
    def slot_stride(self) -> int:
        """Bytes from one host slot to the next: ``page_bytes`` rounded up to 4096."""
        return -(-self.page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def digest_fields(self) -> dict[str, int]:
        """The numbers on which all workers of an engine must agree, in a fixed order."""
        return {
            "page_size": self.page_size,
            "total_layers": self.total_layers,
            "total_kv_heads": self.total_kv_heads,
            "heads_per_group": self.heads_per_group,
            "row_bytes": self.row_bytes,
            "layer_partition": self.layer_partition,
            "pool": int(self.pool or "0", 16),
        }


def default_heads_per_group(total_kv_heads: int, local_heads: int) -> int:
    """Heads of a storage object when none are configured: split for TP8 as far as divisible.

    Divides both numbers, so every rank holds whole groups.

    >>> default_heads_per_group(8, 8), default_heads_per_group(16, 4), default_heads_per_group(6, 2)
    (1, 2, 1)
    """
    return gcd(total_kv_heads // gcd(total_kv_heads, _FLEET_TP), local_heads)


def granule_tokens(page_size: int, block_size: int, *, whole_blocks: bool = False) -> int:
    """Tokens of a granule, the unit of a device copy: the smaller of page and block.

    One must divide the other; with ``whole_blocks`` (opaque packing) a page must be whole blocks.

    >>> granule_tokens(256, 16), granule_tokens(64, 128)
    (16, 64)
    """
    small, large = sorted((page_size, block_size))
    _require(
        small > 0 and large % small == 0,
        f"page_size {page_size} and vLLM's block size {block_size} must divide one another",
    )
    _require(
        not whole_blocks or page_size % block_size == 0,
        f"this attention backend's blocks cannot be cut: page_size must be a multiple of the "
        f"block size {block_size}, got {page_size}",
    )
    return small


def registration_slots(slot_stride: int) -> int:
    """Host slots that are pinned by one call; a copy must not span two such pieces.

    >>> registration_slots(4096)
    65536
    """
    return max(1, REGISTRATION_BYTES // slot_stride)


@dataclass(frozen=True, slots=True)
class PoolPiece:
    """Host slots ``[first, stop)`` of one region of the pool, which are pinned by one call."""

    region: int
    first: int
    stop: int


def pool_pieces(num_slots: int, slot_strides: Sequence[int]) -> list[PoolPiece]:
    """All pieces of a pool in the order in which its slots become whole, low ones first.

    >>> [(p.region, p.first, p.stop) for p in pool_pieces(6, [100 << 20, 50 << 20])]
    [(0, 0, 2), (1, 0, 5), (0, 2, 4), (0, 4, 6), (1, 5, 6)]
    """
    pieces = [
        PoolPiece(region, first, min(first + step, num_slots))
        for region, step in enumerate(map(registration_slots, slot_strides))
        for first in range(0, num_slots, step)
    ]
    return sorted(pieces, key=lambda piece: (piece.first, piece.region))

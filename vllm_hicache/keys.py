"""Names of stored objects: a key names which bytes, never who wrote them.

``{page hash}_{namespace digest}_L{start}-{stop}_H{head group}``: layers absolute and half-open,
head groups counted over the whole model; ``_P{pool}`` follows where the pool is not the first.
"""

import re
from hashlib import sha256
from typing import NamedTuple

import msgspec

from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.layout import LayerSpan, Shard

PAGE_HASH_BYTES = 32
FORMAT_VERSION = 1
"""Of stored objects, in their header and in the namespace: two versions never share a name."""
_NUMBER = "(0|[1-9][0-9]*)"
NO_POOL = "0" * 8
"""What no pool may be called: the header of an object of the first pool has zeros there."""
_IS_POOL = re.compile("[0-9a-f]{8}").fullmatch
_NAME = re.compile(
    rf"([0-9a-f]{{64}})_(hc1-[0-9a-f]{{16}})_L{_NUMBER}-{_NUMBER}_H{_NUMBER}(?:_P([0-9a-f]{{8}}))?"
)


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that must agree before bytes may be shared between engines.

    The order of fields is part of the digest: append only, and raise ``format_version``.
    """

    format_version: int = FORMAT_VERSION
    model_id: str
    weights: str
    """Identity of the weights' content, not of their name."""
    dtype: str
    """Logical KV element type: two 8-bit float formats differ though their bytes look alike."""
    kv_scales: str
    page_size: int
    rope: str
    group_kind: str
    window: int
    """Tokens of a sliding window; 0 without one."""
    total_kv_heads: int
    heads_per_group: int
    layer_partition: int
    k_row_bytes: int
    v_row_bytes: int
    object_layout: str = "hicache-page-1"
    token_packing: str
    hash_version: int = 1
    epoch: str
    """Empty while the weights are proven; else a nonce that keeps old pages unreachable."""

    def __post_init__(self) -> None:
        if not self.model_id:
            raise ConfigError("a namespace needs a model id, got an empty one")
        if self.page_size <= 0:
            raise ConfigError(f"a namespace needs a positive page size, got {self.page_size}")

    @property
    def digest(self) -> str:
        """``hc1-`` and the first 16 hex digits of SHA-256 over all fields in order."""
        return "hc1-" + sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]


class ShardName(NamedTuple):
    """What a name of a stored object says."""

    page_hash: bytes
    namespace: str
    layers: LayerSpan
    head_group: int
    pool: str = ""


def shard_name(page_hash: bytes, namespace: str, shard: Shard) -> str:
    """Name of the object that holds ``shard`` of the page; ``namespace`` is a digest."""
    if len(page_hash) != PAGE_HASH_BYTES:
        raise InvariantBroken(f"a page hash has {PAGE_HASH_BYTES} bytes, got {len(page_hash)}")
    return page_hash.hex() + shard_ending(namespace, shard)


def shard_ending(namespace: str, shard: Shard) -> str:
    """What a name says after the page hash: the same for ``shard`` of every page."""
    span = shard.layers
    ending = f"_{namespace}_L{span.start}-{span.stop}_H{shard.head_group}"
    if not shard.pool:
        return ending
    if not _IS_POOL(shard.pool) or shard.pool == NO_POOL:
        raise InvariantBroken(f"a pool has 8 hex digits that are not all 0, got {shard.pool!r}")
    return f"{ending}_P{shard.pool}"


def parse_shard_name(name: str) -> ShardName | None:
    """Inverse of ``shard_name``; None for every string that it cannot have made."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    page_hash, namespace, *numbers, pool = found.groups()
    start, stop, head_group = map(int, numbers)
    if start >= stop or pool == NO_POOL:
        return None
    layers = LayerSpan(start, stop)
    return ShardName(bytes.fromhex(page_hash), namespace, layers, head_group, pool or "")

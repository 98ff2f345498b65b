"""The host pool as a storage process sees it: which bytes of a slot are which stored objects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_hicache.keys import shard_ending, shard_name
from vllm_hicache.layout import Shard
from vllm_hicache.storage import ShardObject
from vllm_hicache.storage_process_config import Section


@dataclass(frozen=True, slots=True)
class HostPages:
    """All host slots with their sections. ``parts`` is always the mask of those sections with a
    bit that are meant besides the required ones."""

    pool: memoryview  # uint8, shared with the worker
    num_slots: int
    sections: tuple[Section, ...]
    all_parts: int = 0
    """Bits of all pools of the model, also of those that this worker has nothing of."""
    _zeros: memoryview = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        longest = max((s.slot_stride for s in self.sections if s.may_be_zero), default=0)
        object.__setattr__(self, "_zeros", memoryview(bytes(longest)))

    @property
    def num_required(self) -> int:
        """Objects that every page has."""
        return sum(len(section.shards) for section in self._chosen(0))

    def written_bytes(self, parts: int = 0) -> int:
        """Bytes of one page that this worker writes."""
        return sum(shard.length for section in self._chosen(parts) for shard in section.own_shards)

    def objects(
        self, namespace: str, page_hash: bytes, host_slot: int, parts: int = 0
    ) -> list[ShardObject]:
        """The stored objects of one page, over the bytes of ``host_slot``."""
        return [
            self._object(section, shard, namespace, page_hash, host_slot)
            for section in self._chosen(parts)
            for shard in section.shards
        ]

    def own_objects(
        self, namespace: str, page_hash: bytes, host_slot: int, parts: int = 0
    ) -> list[ShardObject]:
        """Those of them that this worker writes; its replicas write the others."""
        return [
            self._object(section, shard, namespace, page_hash, host_slot)
            for section in self._chosen(parts)
            for shard in section.own_shards
        ]

    def zero(self, host_slot: int, parts: int) -> bool:
        """Fill with zeros what may be zero and is not in ``parts``; whether there was such."""
        filled = False
        for section in self.sections:
            if section.may_be_zero and not section.is_in(parts):
                start = section.base + host_slot * section.slot_stride
                self.pool[start : start + section.slot_stride] = self._zeros[: section.slot_stride]
                filled = True
        return filled

    def names(self, namespace: str, page_hashes: Sequence[bytes]) -> list[str]:
        """Names of all objects of some pages, page by page."""
        endings = [
            shard_ending(namespace, shard) for section in self.sections for shard in section.shards
        ]
        return [start + ending for start in map(bytes.hex, page_hashes) for ending in endings]

    def leading_parts(self, found: Sequence[bool]) -> bytes:
        """By the answers to ``names``: the parts of each leading page that has all its required
        objects. A bit is set where all objects of it are there, or this worker has none of it."""
        parts = bytearray()
        place = 0
        while place < len(found):
            present = self.all_parts
            for section in self.sections:
                start, place = place, place + len(section.shards)
                if all(found[start:place]):
                    continue
                if section.bit is None:
                    return bytes(parts)
                present &= ~(1 << section.bit)
            parts.append(present)
        return bytes(parts)

    def _chosen(self, parts: int) -> Iterator[Section]:
        return (section for section in self.sections if section.is_in(parts))

    def _object(
        self, section: Section, shard: Shard, namespace: str, page_hash: bytes, host_slot: int
    ) -> ShardObject:
        start = section.base + host_slot * section.slot_stride + shard.offset
        return ShardObject(
            name=shard_name(page_hash, namespace, shard),
            namespace=namespace,
            page_hash=page_hash,
            shard=shard,
            payload=self.pool[start : start + shard.length],
        )

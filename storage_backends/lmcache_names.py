"""Names of LMCache's chunks in our stores: everything that decides a chunk's bytes is in them.

A chunk is one object in the usual envelope. Its namespace begins with ``lmc1-`` instead of
``hc1-``, so that it never meets a page of vllm-hicache in the same store.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Protocol

import msgspec

from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import ShardObject

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT = "lmcache-chunk-1"
"""Raise the number when the same fields come to mean other bytes."""


class ElementType(Protocol):
    """What is asked of a ``torch.dtype``."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The tensors of one memory object, in order, and the bytes that they take.

    >>> import numpy
    >>> ChunkLayout.of([(2, 4, 256, 1024)], [numpy.dtype("int16")])
    ChunkLayout(text='int16[2,4,256,1024]', num_bytes=4194304)
    """

    text: str
    num_bytes: int

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]], dtypes: Iterable[ElementType]) -> ChunkLayout:
        """From shapes and element types as LMCache holds them."""
        tensors = [
            (str(dtype), [int(n) for n in shape], dtype.itemsize)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        return cls(
            ";".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape, _ in tensors),
            sum(prod(shape) * itemsize for _, shape, itemsize in tensors),
        )


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Which chunk: the two parts of its name that its header repeats."""

    namespace: str  # of all chunks of one model in one layout
    page_hash: bytes  # 32 bytes over every field, those of the namespace included

    def __str__(self) -> str:
        return shard_name(self.page_hash, self.namespace, _whole(0))

    def over(self, payload: memoryview) -> ShardObject:
        """The object of this name over some bytes, which are read or filled."""
        return ShardObject(
            str(self), self.namespace, self.page_hash, _whole(payload.nbytes), payload
        )


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """Names chunks of one kind of LMCache engine, within what its operator calls one cache.

    >>> names = ChunkNames("server", "rev-1")
    >>> name = names.of("meta/llama", "torch.int8[2,4]", (0x01000100, 0, "", b"hash"))
    >>> str(name)[64:]
    '_lmc1-3a27e1a86bce50d2_L0-1_H0'
    >>> name == names.of("meta/llama", "torch.int8[4,2]", (0x01000100, 0, "", b"hash"))
    False
    """

    engine: str
    """``server`` or ``in-process``: their keys are not the same."""
    cache_id: str
    """Free text of the operator, for what LMCache's keys leave out: weights, above all."""

    def of(self, model: str, layout: str, key: tuple[object, ...]) -> ChunkName:
        """The name of one chunk; ``key`` is what else LMCache tells chunks apart by."""
        fixed = (FORMAT, self.engine, self.cache_id, model, layout)
        return ChunkName(f"lmc1-{_digest(fixed).hex()[:16]}", _digest((*fixed, key)))


def _digest(fields: tuple[object, ...]) -> bytes:
    return sha256(msgspec.msgpack.encode(fields)).digest()


def _whole(length: int) -> Shard:
    """A chunk is never divided: LMCache's own keys name its layers and heads."""
    return Shard(LayerSpan(0, 1), 0, 0, length)

"""Records of namespaces in Redis: fields of one hash, so that one server of a cluster has them all.

A field holds the time of its last writing, a space and the record. Servers that refuse a command
keep no records; objects do not depend on them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_hicache.storage import MAX_RECORD_BYTES, MAX_RECORDS, WriteOutcome
from vllm_hicache.storage_backends.redis_calls import MOVED
from vllm_hicache.storage_backends.redis_wire import Refusal, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_hicache.storage_backends.redis_calls import RedisCalls
    from vllm_hicache.storage_backends.redis_servers import RedisServer
    from vllm_hicache.storage_backends.redis_wire import Wire


class RedisRecords:
    """The hash under one key. With `ttl_s`, a record goes when it was not renewed for so long."""

    def __init__(self, calls: RedisCalls, key: bytes, ttl_s: int | None) -> None:
        self._calls = calls
        self._key = key
        self._ttl_s = ttl_s

    async def write(self, namespace: str, record: bytes) -> WriteOutcome:
        """As `KeepsRecords.write_record`."""
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(f"a record has {len(record)} bytes, at most {MAX_RECORD_BYTES}")
        stamped = b"%d %b" % (time.time(), record)
        words = [(b"HSET", self._key, namespace.encode(), stamped), (b"HLEN", self._key)]
        if self._ttl_s is not None:
            words.append((b"EXPIRE", self._key, b"%d" % self._ttl_s))
        answers = await self._ask("write of a record", words)
        if any(isinstance(answer, Refusal) for answer in answers[:2]):
            return WriteOutcome.FULL
        is_new, num_records = answers[:2]
        if num_records > MAX_RECORDS:
            await self._forget_oldest()
        return WriteOutcome.STORED if is_new else WriteOutcome.EXISTS

    async def read_all(self) -> dict[str, bytes]:
        """As `KeepsRecords.read_records`."""
        return {name: record for _, name, record in (await self._newest_first())[:MAX_RECORDS]}

    async def remove(self, namespaces: Sequence[str]) -> None:
        """Remove the records of some namespaces, where there are any."""
        if namespaces:
            names = [name.encode() for name in namespaces]
            await self._ask("clear", [(b"HDEL", self._key, *names)])

    async def _forget_oldest(self) -> None:
        await self.remove([name for _, name, _ in (await self._newest_first())[MAX_RECORDS:]])

    async def _newest_first(self) -> list[tuple[int, str, bytes]]:
        """(written, namespace, record) of what is not too old."""
        (answer,) = await self._ask("read of records", [(b"HGETALL", self._key)])
        if not isinstance(answer, list):  # refused, or a map of another protocol
            return []
        oldest = 0.0 if self._ttl_s is None else time.time() - self._ttl_s
        found = []
        for name, value in zip(answer[::2], answer[1::2], strict=True):
            written, _, record = value.partition(b" ")
            if written.isdigit() and int(written) >= oldest:
                found.append((int(written), name.decode("ascii", "replace"), record))
        return sorted(found, reverse=True)

    async def _ask(self, operation: str, words: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """One answer for each command, refusals among them."""
        request = b"".join(command(*each) for each in words)

        async def exchange(wire: Wire) -> list[Any]:
            return await wire.ask(request, len(words))

        async def ask(server: RedisServer, _part: Sequence[int]) -> list[Any]:
            answers = await self._calls.exchange(server, operation, exchange)
            moved = [a for a in answers if isinstance(a, Refusal) and a.code == MOVED]
            return [moved[0] if moved else answers]

        async with self._calls.call(operation):
            (answers,) = await self._calls.on_holders(operation, [self._key], [0], ask)
        return list(answers)

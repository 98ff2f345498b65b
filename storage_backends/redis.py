"""Objects as Redis strings of header and payload: one server, or a cluster, shared by any number.

Keys hold the page hash in braces, so that all shards of a page are on one server of a cluster.
docs/storage-services.md says what is copied, what it costs and how servers are to be set up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from vllm_hicache.errors import BackendError, ConfigError
from vllm_hicache.storage import HEADER_BYTES, ObjectRead, ObjectWrite, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.counters import Counters
from vllm_hicache.storage_backends.redis_calls import MOVED, RedisCalls
from vllm_hicache.storage_backends.redis_records import RedisRecords
from vllm_hicache.storage_backends.redis_servers import (
    RedisAddress,
    RedisServer,
    RedisServers,
    Rejected,
)
from vllm_hicache.storage_backends.redis_wire import (
    ConnectionLost,
    Refusal,
    Wire,
    command,
    set_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_hicache.config import StorageConfig

logger = logging.getLogger(__name__)

COUNTERS = (
    "objects_read",
    "objects_written",
    "objects_deleted",
    "bytes_read",
    "bytes_written",
    "read_seconds",
    "write_seconds",
    "read_errors",
    "write_errors",
    "writes_refused",  # maxmemory reached, a read-only server or no permission
)

_QUESTION_CONNECTIONS = 8  # exists and delete do not queue behind reads and writes
_SCAN_KEYS = 1000
_LOG_EVERY_S = 60.0

_FULL = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM", "ASK"})
_ASK = "ASK"  # the slot is on its way to another server: its objects are missing until it is there


class RedisBackend:
    """Stores each object as one string under `key_prefix`, written by a single SET.

    With `ttl_s`, an object goes when it was neither read nor written again for so long; otherwise
    the server's `maxmemory-policy` decides. A server that refuses a write (out of memory,
    read-only, no permission) is counted and answered `FULL`, so that reads go on.
    """

    name = "redis"

    def __init__(
        self,
        address: RedisAddress,
        *,
        key_prefix: str = "hicache:",
        ttl_s: float | None = None,
        read_concurrency: int = 16,
        write_concurrency: int = 8,
        operation_timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        if "{" in key_prefix or "}" in key_prefix:
            raise ConfigError("storage.key_prefix must not contain braces")
        self._servers = RedisServers(address, connect_timeout_s)
        self._prefix = key_prefix
        self._ttl_s = None if ttl_s is None else max(1, round(ttl_s))
        self._calls = RedisCalls(self._servers, operation_timeout_s)
        self._records = RedisRecords(self._calls, f"{key_prefix}namespaces".encode(), self._ttl_s)
        self._counters = Counters(COUNTERS)
        self._askers = asyncio.Semaphore(_QUESTION_CONNECTIONS)
        self._readers = asyncio.Semaphore(read_concurrency)
        self._writers = asyncio.Semaphore(write_concurrency)
        self._questions: set[asyncio.Task[Any]] = set()
        self._last_logged: dict[str, float] = {}

    @classmethod
    def from_url(cls, url: str, config: StorageConfig) -> RedisBackend:
        """The backend that a URL and the table `storage` describe; ConfigError when wrong."""
        return cls(
            RedisAddress.parse(url, config),
            key_prefix=config.key_prefix,
            ttl_s=config.ttl_s,
            read_concurrency=config.read_concurrency,
            write_concurrency=config.write_concurrency,
            operation_timeout_s=config.operation_timeout_s,
            connect_timeout_s=config.connect_timeout_s,
        )

    # Life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and try every command that is used on a key of its own.

        Raises:
            ConfigError: Wrong password, a permission that is missing, or cluster and URL differ.
            BackendUnavailable: Nobody answers, or the server is not ready.
        """
        try:
            async with self._calls.call("open"):
                if self._servers.is_cluster:
                    await self._servers.refresh()
                await self._try_commands()
        except Rejected as error:
            await self._servers.close()
            raise ConfigError(f"Redis {self._servers.label} refuses this user: {error}") from error
        except ConfigError:
            await self._servers.close()
            raise

    async def close(self) -> None:
        """As `StorageBackend.close`."""
        for question in self._questions:
            question.cancel()
        await asyncio.gather(*self._questions, return_exceptions=True)
        await self._calls.close()

    async def _try_commands(self) -> None:
        key = self._key("probe")
        seconds = str(self._ttl_s or 10).encode()
        probes = [
            (b"STRLEN", key),
            (b"SET", key, b"", b"EX", seconds, b"NX"),
            *([(b"EXPIRE", key, seconds)] if self._ttl_s else []),
            (b"GET", key),
            (b"UNLINK", key),
            (b"SCAN", b"0", b"COUNT", b"1"),
            (b"INFO", b"memory"),
        ]
        server = self._servers.holder(key)
        wire, _ = await server.take()
        try:
            answers = await wire.ask(b"".join(command(*words) for words in probes), len(probes))
        except ConnectionLost as error:
            raise server.unavailable("open", error) from error
        server.give(wire)
        for words, answer in zip(probes[:-1], answers[:-1], strict=True):
            if isinstance(answer, Refusal):
                self._judge_probe(server, words[0].decode(), answer)
        _advise(answers[-1], has_ttl=self._ttl_s is not None)

    def _judge_probe(self, server: RedisServer, verb: str, refusal: Refusal) -> None:
        if refusal.code in ("NOPERM", "NOAUTH") or "unknown command" in str(refusal):
            raise ConfigError(
                f"Redis {server.address.label} refuses {verb} on keys that begin with "
                f"{self._prefix}: {refusal}"
            )
        if refusal.code == MOVED and not self._servers.is_cluster:
            raise ConfigError(
                f"Redis {server.address.label} is part of a cluster: use redis+cluster://"
            )
        if refusal.code not in _FULL:
            raise server.unavailable("open", refusal)
        logger.warning("Redis %s takes no writes now: %s", server.address.label, refusal)

    # Operations -----------------------------------------------------------------------------

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend.contains`, by STRLEN: what is shorter than a header is no object."""
        answers = await self._questions_about(names, b"STRLEN", "contains")
        return [isinstance(answer, int) and answer >= HEADER_BYTES for answer in answers]

    async def delete(self, names: Sequence[str]) -> int:
        """As `StorageBackend.delete`, by UNLINK."""
        answers = await self._questions_about(names, b"UNLINK", "delete")
        num_removed = sum(answer for answer in answers if isinstance(answer, int))
        self._counters.add(objects_deleted=num_removed)
        return num_removed

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """As `StorageBackend.read`: values go from the socket straight into the views."""

        async def fetch(server: RedisServer, part: Sequence[int]) -> list[Any]:
            return await self._fetch(server, [reads[i] for i in part])

        sizes = [read.header.nbytes + read.payload.nbytes for read in reads]
        keys = [self._key(read.name) for read in reads]
        try:
            async with self._calls.call("read"):
                return await self._calls.on_holders("read", keys, sizes, fetch)
        except BackendError:
            self._counters.add(read_errors=1)
            raise

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """As `StorageBackend.write`: asks for the lengths first, then sends what is missing."""

        async def store(server: RedisServer, part: Sequence[int]) -> list[Any]:
            return await self._store(server, [writes[i] for i in part])

        sizes = [len(write.header) + write.payload.nbytes for write in writes]
        keys = [self._key(write.name) for write in writes]
        try:
            async with self._calls.call("write"):
                outcomes = await self._calls.on_holders("write", keys, sizes, store)
        except BackendError:
            self._counters.add(write_errors=1)
            raise
        self._counters.add(writes_refused=outcomes.count(WriteOutcome.FULL))
        return outcomes

    async def clear(self, namespace: str) -> int:
        """As `StorageBackend.clear`, by SCAN in steps of about a thousand keys."""
        await self._records.remove([namespace])
        if self._servers.is_cluster:
            async with self._calls.call("clear"):
                await self._servers.refresh()
        num_removed = 0
        for server in self._servers.primaries:
            cursor = b"0"
            while True:
                cursor, num_keys = await self._clear_step(server, cursor, namespace)
                num_removed += num_keys
                if cursor == b"0":
                    break
        return num_removed

    async def write_record(self, namespace: str, record: bytes) -> WriteOutcome:
        """As `KeepsRecords.write_record`."""
        return await self._records.write(namespace, record)

    async def read_records(self) -> dict[str, bytes]:
        """As `KeepsRecords.read_records`."""
        return await self._records.read_all()

    async def room(self) -> dict[str, str | int | None]:
        """As `TellsRoom.room`, of the first server of a cluster."""
        async with self._calls.call("room"):
            server = self._servers.holder(self._key("room"))

            async def ask(wire: Wire) -> list[Any]:
                return await wire.ask(command(b"INFO", b"memory"), 1)

            (info,) = await self._calls.exchange(server, "room", ask)
        fields = _memory_fields(info)
        limit = fields.get("maxmemory", "")
        used = fields.get("used_memory", "")
        return {
            "used_bytes": int(used) if used.isdigit() else None,
            "maxmemory_bytes": int(limit) if limit.isdigit() and limit != "0" else None,
            "maxmemory_policy": fields.get("maxmemory_policy"),
            "ttl_s": self._ttl_s,
        }

    def stats(self) -> dict[str, float]:
        """As `StorageBackend.stats`, with the names in `COUNTERS` and two of connections."""
        return {
            **self._counters.snapshot(),
            "connections_opened": float(self._servers.num_opened),
            "connections_now": float(self._servers.num_open),
        }

    def oldest_running_s(self) -> float:
        """As `StorageBackend.oldest_running_s`."""
        return self._calls.oldest_running_s()

    # Parts of operations, each one exchange or two on one connection ----------------------------

    async def _fetch(
        self, server: RedisServer, reads: Sequence[ObjectRead]
    ) -> list[ReadOutcome | Refusal]:
        ttl = () if self._ttl_s is None else (str(self._ttl_s).encode(),)
        request = b"".join(
            command(b"GET", key) + (command(b"EXPIRE", key, *ttl) if ttl else b"")
            for key in (self._key(read.name) for read in reads)
        )

        async def fetch(wire: Wire) -> list[ReadOutcome | Refusal]:
            return await wire.fetch(request, reads, num_ignored=len(ttl))

        started = time.monotonic()
        async with self._readers:
            answers = await self._calls.exchange(server, "read", fetch)
        self._counters.add(read_seconds=time.monotonic() - started)
        for i, answer in enumerate(answers):
            if answer is ReadOutcome.OK:
                num_bytes = reads[i].header.nbytes + reads[i].payload.nbytes
                self._counters.add(objects_read=1, bytes_read=num_bytes)
            elif isinstance(answer, Refusal) and answer.code == "WRONGTYPE":
                answers[i] = ReadOutcome.BAD_LENGTH
            elif isinstance(answer, Refusal) and answer.code == _ASK:
                answers[i] = ReadOutcome.MISSING
        return answers

    async def _store(
        self, server: RedisServer, writes: Sequence[ObjectWrite]
    ) -> list[WriteOutcome | Refusal]:
        async def store(wire: Wire) -> list[WriteOutcome | Refusal]:
            return await self._store_on(wire, writes)

        started = time.monotonic()
        async with self._writers:
            outcomes = await self._calls.exchange(server, "write", store)
        self._counters.add(write_seconds=time.monotonic() - started)
        for i, outcome in enumerate(outcomes):
            if outcome is WriteOutcome.STORED:
                num_bytes = len(writes[i].header) + writes[i].payload.nbytes
                self._counters.add(objects_written=1, bytes_written=num_bytes)
            elif isinstance(outcome, Refusal) and outcome.code in _FULL:
                self._note_full(server, outcome)
                outcomes[i] = WriteOutcome.FULL
        return outcomes

    async def _store_on(
        self, wire: Wire, writes: Sequence[ObjectWrite]
    ) -> list[WriteOutcome | Refusal]:
        keys = [self._key(write.name) for write in writes]
        question = b"".join(command(b"STRLEN", key) for key in keys)
        lengths = await wire.ask(question, len(keys))
        outcomes: list[Any] = [
            length
            if isinstance(length, Refusal) and length.code != "WRONGTYPE"
            else WriteOutcome.EXISTS
            if length == len(write.header) + write.payload.nbytes
            else None
            for write, length in zip(writes, lengths, strict=True)
        ]
        due = [i for i, outcome in enumerate(outcomes) if outcome is None]

        def pieces() -> Iterator[bytes | memoryview]:
            for i in due:
                yield from set_pieces(
                    writes[i], keys[i], only_new=lengths[i] == 0, ttl_s=self._ttl_s
                )

        answers = await wire.store(pieces(), len(due)) if due else []
        for i, answer in zip(due, answers, strict=True):
            is_refused = isinstance(answer, Refusal)
            # Nothing: another writer was faster, with the same bytes.
            stored = WriteOutcome.EXISTS if answer is None else WriteOutcome.STORED
            outcomes[i] = answer if is_refused else stored
        return await self._renew(wire, keys, outcomes)

    async def _renew(self, wire: Wire, keys: list[bytes], outcomes: list[Any]) -> list[Any]:
        """Let the time of objects that were there start anew."""
        old = [keys[i] for i, outcome in enumerate(outcomes) if outcome is WriteOutcome.EXISTS]
        if old and self._ttl_s is not None:
            seconds = str(self._ttl_s).encode()
            await wire.ask(b"".join(command(b"EXPIRE", key, seconds) for key in old), len(old))
        return outcomes

    async def _clear_step(
        self, server: RedisServer, cursor: bytes, namespace: str
    ) -> tuple[bytes, int]:
        pattern = f"{_escaped(self._prefix)}{{*}}_{_escaped(namespace)}_*".encode()

        async def step(wire: Wire) -> tuple[bytes, int]:
            scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_KEYS)
            (answer,) = await wire.ask(scan, 1)
            if isinstance(answer, Refusal):
                raise server.unavailable("clear", answer)
            next_cursor, keys = answer
            request = b"".join(command(b"UNLINK", key) for key in keys)
            removed = await wire.ask(request, len(keys)) if keys else []
            return next_cursor, sum(number for number in removed if isinstance(number, int))

        async with self._calls.call("clear"), self._askers:
            next_cursor, num_removed = await self._calls.exchange(server, "clear", step)
        self._counters.add(objects_deleted=num_removed)
        return next_cursor, num_removed

    async def _questions_about(
        self, names: Sequence[str], verb: bytes, operation: str
    ) -> list[Any]:
        """One answer for each name, to a command with nothing but a key.

        The questions are not given up with the call: to close a connection whenever a slow server
        answers after the deadline would mean to connect anew each time.
        """

        keys = [self._key(name) for name in names]

        async def ask_all() -> list[Any]:
            async with self._calls.call(operation):
                return await self._calls.on_holders(operation, keys, [0] * len(keys), ask)

        async def ask(server: RedisServer, part: Sequence[int]) -> list[Any]:
            request = b"".join(command(verb, keys[i]) for i in part)

            async def exchange(wire: Wire) -> list[Any]:
                return await wire.ask(request, len(part))

            async with self._askers:
                answers = await self._calls.exchange(server, operation, exchange)
            return [_harmless(answer) for answer in answers]

        task = asyncio.create_task(ask_all())
        self._questions.add(task)
        task.add_done_callback(self._end_question)
        return await asyncio.shield(task)

    def _end_question(self, task: asyncio.Task[Any]) -> None:
        self._questions.discard(task)
        if not task.cancelled():
            task.exception()  # has been raised where somebody still waited

    def _key(self, name: str) -> bytes:
        page_hash, _, rest = name.partition("_")
        return f"{self._prefix}{{{page_hash}}}_{rest}".encode()

    def _note_full(self, server: RedisServer, refusal: Refusal) -> None:
        if refusal.code == "READONLY":  # a primary that became a replica: its name may have moved
            server.drop_free()
        now = time.monotonic()
        if now - self._last_logged.get(refusal.code, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._last_logged[refusal.code] = now
            logger.warning("Redis %s refuses writes: %s", server.address.label, refusal)


def _harmless(answer: Any) -> Any:
    """Answers about one key that mean no more than that there is no object."""
    is_absent = isinstance(answer, Refusal) and answer.code in ("WRONGTYPE", _ASK)
    return 0 if is_absent else answer


def _escaped(text: str) -> str:
    """Text as part of a glob pattern of SCAN.

    >>> _escaped("a*b")
    'a\\\\*b'
    """
    return "".join(f"\\{letter}" if letter in "\\*?[]^-" else letter for letter in text)


def _memory_fields(info: Any) -> dict[str, str]:
    """What INFO says; nothing where the user may not ask."""
    if not isinstance(info, bytes):
        return {}
    lines = info.decode("utf-8", "replace").split()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _advise(info: Any, *, has_ttl: bool) -> None:
    """Warn about a server that nothing keeps from filling up."""
    fields = _memory_fields(info)
    if fields.get("maxmemory") == "0" and not has_ttl:
        logger.warning(
            "Redis has neither maxmemory nor is storage.ttl_s given: it grows without bound"
        )
    elif fields.get("maxmemory_policy") == "noeviction" and not has_ttl:
        logger.warning(
            "Redis has maxmemory-policy noeviction: once full it takes no new pages; "
            "allkeys-lru lets the oldest go"
        )

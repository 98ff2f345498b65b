"""Redis servers and their connections: one server, or the primaries of a cluster.

redis-py reads the URL and connects (TCP, TLS, Unix socket, password or ACL user). This is the only
file that imports redis and hiredis.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import hiredis
from redis.asyncio.connection import (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from vllm_hicache.errors import BackendUnavailable, ConfigError
from vllm_hicache.storage_backends.redis_wire import NOT_YET, ConnectionLost, Refusal, Wire, command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_hicache.config import StorageConfig

logger = logging.getLogger(__name__)

CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}

_QUERY = (
    "db",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
# What a new connection is refused with when the address is wrong, not the moment.
_NEVER_RIGHT = ("CERTIFICATE_VERIFY_FAILED", "DB index is out of range")
_REFRESH_EVERY_S = 0.5
_CLOSE_S = 1.0


class Rejected(Exception):
    """The server will not let this user in: a wrong password, or a permission that is missing."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where and how to connect."""

    connection_class: type[Any]  # of redis.asyncio.connection
    options: Mapping[str, Any] = field(repr=False)  # holds the password
    is_cluster: bool
    label: str  # for messages; without credentials

    @classmethod
    def parse(cls, url: str, config: StorageConfig) -> RedisAddress:
        """Read a URL as redis-py does, or with `redis+unix`, `redis+cluster`, `rediss+cluster`.

        Raises:
            ConfigError: The URL or what the options add to it makes no sense. Shows no password.
        """
        parts = urlsplit(url)
        is_cluster = parts.scheme in CLUSTER_SCHEMES
        scheme = "unix" if parts.scheme == "redis+unix" else parts.scheme
        scheme = CLUSTER_SCHEMES.get(scheme, scheme)
        _check_query(parts.query)
        try:
            options: dict[str, Any] = {**parse_url(scheme + url[len(parts.scheme) :])}
        except ValueError as error:
            raise ConfigError(f"a Redis storage URL is not valid: {error}") from None
        found: type[Any] = options.pop("connection_class", Connection)
        if found is UnixDomainSocketConnection:
            label = str(options.get("path", ""))
            if not label or parts.hostname:
                raise ConfigError("a Redis socket is named as in redis+unix:///run/redis.sock")
        else:
            label = f"{options.setdefault('host', 'localhost')}:{options.setdefault('port', 6379)}"
            _check_database(str(options.get("db", parts.path)), is_cluster=is_cluster)
        _add_options(options, config, is_tls=found is SSLConnection)
        try:
            connection = found(**options)
            if isinstance(connection, SSLConnection):
                connection.ssl_context.get()
        except (RedisError, OSError, TypeError, ValueError) as error:
            raise ConfigError(f"Redis {label} cannot be connected to like this: {error}") from None
        return cls(found, options, is_cluster, label)

    def at(self, host: str, port: int) -> RedisAddress:
        """Another server of the same cluster."""
        options = {**self.options, "host": host, "port": port}
        return RedisAddress(self.connection_class, options, self.is_cluster, f"{host}:{port}")


def _check_query(query: str) -> None:
    unknown = sorted(set(parse_qs(query, keep_blank_values=True)) - set(_QUERY))
    if unknown:
        raise ConfigError(
            f"a Redis storage URL cannot have {', '.join(unknown)} behind its question mark; "
            f"known are {', '.join(_QUERY)}"
        )


def _check_database(path: str, *, is_cluster: bool) -> None:
    number = path.strip("/")
    if number not in ("", "0") and (is_cluster or not number.isdecimal()):
        allowed = "a cluster has no databases" if is_cluster else "a database is a number"
        raise ConfigError(f"a Redis storage URL cannot end in /{number}: {allowed}")


def _add_options(options: dict[str, Any], config: StorageConfig, *, is_tls: bool) -> None:
    for name in ("username", "password"):
        value = getattr(config, name)
        if value is not None and options.get(name) is not None:
            raise ConfigError(f"storage.{name} is given and so is one in the URL; leave one out")
        if value is not None:
            options[name] = value
    if options.get("username") and not options.get("password"):
        raise ConfigError("a Redis user needs a password, in the URL or as storage.password")
    if config.ca_file is not None:
        if not is_tls:
            raise ConfigError("storage.ca_file needs TLS: rediss:// or rediss+cluster://")
        options["ssl_ca_certs"] = config.ca_file
    for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        if not os.access(options.get(name, "/"), os.R_OK):
            raise ConfigError(f"{options[name]}, named by {name}, cannot be read")


class RedisServer:
    """One server and its connections. How many there are is the caller's to limit."""

    def __init__(self, address: RedisAddress, connect_timeout_s: float) -> None:
        self.address = address
        self.num_opened = 0
        self._connect_timeout_s = connect_timeout_s
        self._free: list[Wire] = []
        self._all: set[Wire] = set()

    @property
    def num_open(self) -> int:
        """Connections that are in use or kept for later."""
        return len(self._all)

    async def take(self) -> tuple[Wire, bool]:
        """A connection for one exchange, and whether it is a new one. `give` it back."""
        while self._free:
            wire = self._free.pop()
            if not wire.is_closed:
                return wire, False
        return await self.connect(), True

    def give(self, wire: Wire) -> None:
        """Keep a connection for the next exchange; a closed one is forgotten."""
        if not wire.is_closed:
            self._free.append(wire)

    async def connect(self) -> Wire:
        """A new connection.

        Raises:
            Rejected: The password is wrong, or the user may not connect.
            BackendUnavailable: Anything else went wrong.
        """
        connection = self._new_connection()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.connect()
            wire = self._take_over(connection)
        except (AuthenticationError, NoPermissionError) as error:
            raise Rejected(str(error)) from None
        except (RedisError, OSError) as error:
            if any(phrase in str(error) for phrase in _NEVER_RIGHT):
                raise Rejected(str(error)) from None
            reason = str(error) or f"no connection in {self._connect_timeout_s:g} s"
            raise self.unavailable("connect", reason) from None
        finally:
            await connection.disconnect(nowait=True)
        self._all.add(wire)
        self.num_opened += 1
        return wire

    def _new_connection(self) -> Any:
        options = {
            **self.address.options,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": self._connect_timeout_s,
            "socket_connect_timeout": self._connect_timeout_s,
        }
        if "path" not in options:
            options["socket_keepalive"] = True
        return self.address.connection_class(**options)

    def _take_over(self, connection: Any) -> Wire:
        """Give the socket that redis-py has opened and authenticated to a `Wire`."""
        writer: asyncio.StreamWriter | None = connection._writer
        if writer is None:
            raise ConnectionLost("the server closed the connection")
        connection._reader = connection._writer = None
        parser = hiredis.Reader(replyError=Refusal, notEnoughData=NOT_YET)
        return Wire(writer, parser, self._all.discard)

    def drop_free(self) -> None:
        """Close what is not in use: the next exchange connects anew, and looks the name up."""
        while self._free:
            self._free.pop().close()

    async def close(self) -> None:
        """Close all connections."""
        for wire in list(self._all):
            wire.close()
        self._free.clear()
        deadline = time.monotonic() + _CLOSE_S
        while self._all and time.monotonic() < deadline:
            await asyncio.sleep(0)

    def unavailable(self, operation: str, reason: object) -> BackendUnavailable:
        """The error for an exchange with this server that failed."""
        return BackendUnavailable(
            f"{operation} at Redis {self.address.label} failed: {reason}",
            backend="redis",
            operation=operation,
        )


class RedisServers:
    """The server that holds a key: always the same one, or by its slot in a cluster."""

    def __init__(self, address: RedisAddress, connect_timeout_s: float) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._seed = RedisServer(address, connect_timeout_s)
        self._cluster: dict[tuple[str, int], RedisServer] = {}
        self._slots: list[RedisServer | None] = []
        self._refreshing = asyncio.Lock()
        self._refreshed_at = 0.0
        self._num_opened_before = 0  # by servers that have left the cluster
        self.is_stale = address.is_cluster
        """Whether slots may have moved: `refresh` before the next exchange."""

    @property
    def label(self) -> str:
        """Address for messages."""
        return self._address.label

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over several servers."""
        return self._address.is_cluster

    @property
    def primaries(self) -> list[RedisServer]:
        """All servers that hold keys."""
        return list(self._cluster.values()) if self.is_cluster else [self._seed]

    @property
    def num_opened(self) -> int:
        """Connections opened since construction."""
        servers = (self._seed, *self._cluster.values())
        return self._num_opened_before + sum(server.num_opened for server in servers)

    @property
    def num_open(self) -> int:
        """Connections open now."""
        return sum(server.num_open for server in (self._seed, *self._cluster.values()))

    def holder(self, key: bytes) -> RedisServer:
        """The server of a key; BackendUnavailable when the cluster has none."""
        if not self.is_cluster:
            return self._seed
        found = self._slots[key_slot(key)] if self._slots else None
        if found is None:
            self.is_stale = True
            raise self._seed.unavailable("look-up", "the cluster has no server for a slot")
        return found

    def follow(self, moved: Refusal) -> None:
        """Learn from `MOVED slot host:port` where one slot is; others have probably moved too."""
        words = str(moved).split()
        if not self.is_cluster or len(words) != 3 or not words[1].isdecimal():
            return
        host, _, port = words[2].rpartition(":")
        if port.isdecimal() and int(words[1]) < len(self._slots):
            self._slots[int(words[1])] = self._server_at(host, int(port))
        self.is_stale = True

    async def refresh(self) -> None:
        """Ask which server of the cluster has which slots, at most twice a second.

        Raises:
            ConfigError: The server is not part of a cluster.
            Rejected, BackendUnavailable: No server tells.
        """
        async with self._refreshing:
            if self._slots and time.monotonic() - self._refreshed_at < _REFRESH_EVERY_S:
                return
            await self._use(await self._ask_for_slots())
            self._refreshed_at = time.monotonic()
            self.is_stale = False

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(s.close() for s in (self._seed, *self._cluster.values())))

    async def _ask_for_slots(self) -> list[Any]:
        failure: BackendUnavailable | None = None
        for server in (*self._cluster.values(), self._seed):
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    wire, _ = await server.take()
                    (answer,) = await wire.ask(command(b"CLUSTER", b"SLOTS"), 1)
                server.give(wire)
            except (BackendUnavailable, ConnectionLost, TimeoutError) as error:
                failure = server.unavailable("look-up of slots", error)
                continue
            if isinstance(answer, list):
                return answer
            if answer.code in ("NOPERM", "NOAUTH"):
                raise Rejected(str(answer))
            if "cluster support disabled" in str(answer):
                raise ConfigError(f"Redis {self.label} is no cluster: use redis:// or rediss://")
            failure = server.unavailable("look-up of slots", answer)
        raise failure or self._seed.unavailable("look-up of slots", "no server")

    async def _use(self, ranges: list[Any]) -> None:
        """Take over the answer to CLUSTER SLOTS: [first, last, [host, port, ...], ...] each."""
        before, self._cluster = self._cluster, {}
        self._slots = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            if host == b"?":  # a server that the others have lost
                continue
            server = self._server_at((host or b"").decode(), port, before)
            self._slots[first : last + 1] = [server] * (last + 1 - first)
        gone = [server for place, server in before.items() if place not in self._cluster]
        self._num_opened_before += sum(server.num_opened for server in gone)
        await asyncio.gather(*(server.close() for server in gone))

    def _server_at(
        self, host: str, port: int, before: Mapping[tuple[str, int], RedisServer] | None = None
    ) -> RedisServer:
        """The server at an address, the one from before if there was one."""
        place = (host or self._address.options["host"], port)  # no host: that of who was asked
        if place not in self._cluster:
            known = (before or {}).get(place)
            self._cluster[place] = known or RedisServer(
                self._address.at(*place), self._connect_timeout_s
            )
        return self._cluster[place]

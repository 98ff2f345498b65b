"""Where a storage process listens: an abstract Unix socket on one host, TCP between hosts."""

import secrets
import socket
from dataclasses import dataclass
from typing import Self

from vllm_hicache.errors import ConfigError

# Three missed probes, two seconds apart, after five silent seconds: a lost host shows in 11 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """One listening socket and the token that a scheduler has to show there.

    >>> address = StorageAddress.parse("tcp:[::1]:4000#5ecret")
    >>> address.host, address.port, address.token
    ('::1', 4000, '5ecret')
    >>> str(address)
    'tcp:[::1]:4000#5ecret'
    """

    host: str  # "" for an abstract Unix socket
    port: int
    name: str  # of the Unix socket, without the leading zero byte
    token: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``unix:@NAME#TOKEN`` or ``tcp:HOST:PORT#TOKEN``; ``ConfigError`` otherwise."""
        place, _, token = text.partition("#")
        kind, _, rest = place.partition(":")
        if kind == "unix" and rest.startswith("@") and len(rest) > 1:
            return cls("", 0, rest[1:], token)
        host, _, port = rest.rpartition(":")
        if kind == "tcp" and host and port.isdecimal():
            return cls(host.strip("[]"), int(port), "", token)
        raise ConfigError(
            f"a storage process listens at unix:@NAME#TOKEN or tcp:HOST:PORT#TOKEN, got {place!r}"
        )

    def __str__(self) -> str:
        if not self.host:
            return f"unix:@{self.name}#{self.token}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}#{self.token}"

    @property
    def without_token(self) -> str:
        """The address as it may appear in a log."""
        return str(self).partition("#")[0]

    def open_socket(self) -> socket.socket:
        """A fresh socket of the right family."""
        if not self.host:
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        tune_connection(connection)
        return connection

    @property
    def sockaddr(self) -> str | tuple[str, int]:
        """What ``bind`` and ``connect`` take."""
        return (self.host, self.port) if self.host else f"\0{self.name}"


def tune_connection(connection: socket.socket) -> None:
    """Send small messages at once and notice a lost host; nothing to do for Unix sockets."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen(host: str = "") -> tuple[socket.socket, StorageAddress]:
    """Listen on a new abstract Unix socket, or on a free port of ``host``; the caller closes it."""
    token = secrets.token_hex(16)
    name = "" if host else f"hicache-{secrets.token_hex(8)}"
    address = StorageAddress(host, 0, name, token)
    listener = address.open_socket()
    listener.bind(address.sockaddr)
    listener.listen(8)
    if host:
        address = StorageAddress(host, listener.getsockname()[1], "", token)
    return listener, address

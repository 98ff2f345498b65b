"""Where an engine listens for `hicache storage`: a Unix socket, or a TCP port of this host only."""

import contextlib
import os
import socket
import stat
from dataclasses import dataclass, replace
from typing import Self

from vllm_hicache.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# The longest path that a Unix socket can have on Linux, without its closing zero byte.
MAX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """``unix:/PATH`` or ``tcp:127.0.0.1:PORT``. What crosses it is not encrypted.

    >>> str(ControlAddress.parse("tcp:127.0.0.1:8790").of_replica(2))
    'tcp:127.0.0.1:8792'
    >>> str(ControlAddress.parse("unix:/run/hicache.sock").of_replica(0))
    'unix:/run/hicache.sock'
    """

    path: str  # "" for TCP
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address; ``ConfigError`` with the reason otherwise."""
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest.startswith("/"):
            if len(rest.encode()) > MAX_PATH_BYTES:
                raise ConfigError(f"a socket's path has at most {MAX_PATH_BYTES} bytes")
            return cls(rest, "", 0)
        host, _, port = rest.rpartition(":")
        if kind != "tcp" or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError("")
        if host.strip("[]") not in LOOPBACK:
            raise ConfigError("the token must not cross a network")
        return cls("", host.strip("[]"), int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"

    def of_replica(self, rank: int) -> Self:
        """Where data-parallel rank ``rank`` listens; rank 0 listens at the address itself."""
        if not rank:
            return self
        if self.path:
            return replace(self, path=f"{self.path}.{rank}")
        return replace(self, port=self.port + rank)

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection to the engine; ``OSError`` when nobody listens."""
        if not self.path:
            return socket.create_connection((self.host, self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def listen(self) -> socket.socket:
        """Listen; the caller closes it and then calls ``remove``.

        A socket that a killed engine left behind is replaced. ``ConfigError`` when somebody
        listens already or the place cannot be used.
        """
        try:
            if not self.path:
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                return socket.create_server((self.host, self.port), family=family)
            self._remove_stale()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(self.path)
                os.chmod(self.path, stat.S_IRUSR | stat.S_IWUSR)
                listener.listen()
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"control_address {self} cannot be listened at: {error.strerror or error}; "
                "give a free one"
            ) from error
        return listener

    def remove(self) -> None:
        """Remove the socket's file, if it has one."""
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _remove_stale(self) -> None:
        try:
            if not stat.S_ISSOCK(os.stat(self.path).st_mode):
                return  # binding says what is wrong
        except FileNotFoundError:
            return
        try:
            self.connect(1.0).close()
        except ConnectionRefusedError:
            self.remove()

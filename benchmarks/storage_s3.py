"""S3 for the storage benchmark: a SeaweedFS of its own, and the clients beside the backend."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import HEADER_BYTES
from vllm_hicache.storage_backends.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm_hicache.storage import StorageBackend

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "storage_backends" / "support"


class RawAiobotocore:
    """PutObject and GetObject of one value each, with the settings that are fastest."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def put(self, name: str, value: bytes) -> None:
        await self._client.put_object(Bucket=self._bucket, Key=name, Body=value)

    async def get(self, name: str, payload: memoryview) -> None:
        answer = await self._client.get_object(Bucket=self._bucket, Key=name)
        value = await answer["Body"].read()
        payload[:] = memoryview(value)[HEADER_BYTES:]


class RawObstore:
    """The same with obstore, a client written in Rust."""

    def __init__(self, store: Any) -> None:
        self._store = store

    async def put(self, name: str, value: bytes) -> None:
        await self._store.put_async(name, value, use_multipart=False)

    async def get(self, name: str, payload: memoryview) -> None:
        answer = await self._store.get_async(name)
        value = await answer.bytes_async()
        payload[:] = memoryview(value)[HEADER_BYTES:]


@asynccontextmanager
async def connected(
    url: str | None, num_connections: int
) -> AsyncIterator[tuple[dict[str, StorageBackend], dict[str, Any], int]]:
    """Backends and raw clients by client (obstore where it is installed), and the server's pid.

    Without a URL a server is started. Credentials come from the environment. The pid is 0 where
    the server runs elsewhere.
    """
    async with AsyncExitStack() as stack:
        pid = 0
        if url is None:
            s3_servers = _servers()

            os.environ.update(s3_servers.ENVIRONMENT)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(s3_servers.seaweedfs(folder))
            url, pid = server.url("benchmark"), server.process.pid
        backends = {"aiobotocore": await _opened(url, stack)}
        bucket = urlsplit(url).netloc
        endpoint = parse_qs(urlsplit(url).query).get("endpoint_url", [None])[0]
        client = await stack.enter_async_context(_aiobotocore(endpoint, num_connections))
        raw: dict[str, Any] = {"aiobotocore": RawAiobotocore(client, bucket)}
        if store := _obstore(bucket, endpoint):
            raw["obstore"] = RawObstore(store)
            backends["obstore"] = await _opened(f"{url}&client=obstore", stack)
        yield backends, raw, pid


def _servers() -> Any:
    """The module that starts servers for the tests."""
    if not SUPPORT.exists():
        raise ConfigError("give --url: only a checkout can start an S3 server")
    sys.path.append(str(SUPPORT))
    return importlib.import_module("s3_servers")


async def _opened(url: str, stack: AsyncExitStack) -> StorageBackend:
    backend = open_backend(url, StorageConfig.parse({"url": url}))
    await backend.open()
    stack.push_async_callback(backend.close)
    return backend


def _aiobotocore(endpoint: str | None, num_connections: int) -> Any:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    config = AioConfig(
        max_pool_connections=num_connections,
        s3={"payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    region = os.environ.get("AWS_REGION", "us-east-1")
    return get_session().create_client(
        "s3", region_name=region, endpoint_url=endpoint, config=config
    )


def _obstore(bucket: str, endpoint: str | None) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError:
        return None
    place: dict[str, Any] = (
        {"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}
    )
    return S3Store(
        bucket,
        region=os.environ.get("AWS_REGION", "us-east-1"),
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        unsigned_payload=True,
        client_options={"allow_http": True},
        **place,
    )

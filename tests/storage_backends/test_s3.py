"""The S3 backend on real servers: conformance, large objects, what lies in the bucket."""

import pytest
import s3_servers

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.storage_backends.conformance import (
    StorageBackendTests,
)
from vllm_hicache.storage_backends.registry import open_backend

MIB = 1024 * 1024
WRITER = """
import asyncio
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.storage_backends.conformance import object_write
from vllm_hicache.storage_backends.registry import open_backend

async def main():
    config = HiCacheConfig.parse({{"storage": {url!r}}}, {{}}).storage
    backend = open_backend(config.url, config)
    await backend.open()
    write = object_write(7, {num_bytes})
    print("ready", flush=True)
    while True:
        await backend.write([write])
        await backend.delete([write.name])

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def backend_at(url: str, **options):
    config = HiCacheConfig.parse({"storage": {"url": url, **options}}, {}).storage
    return open_backend(url, config)


class TestS3OnSeaweedFs(StorageBackendTests):
    @pytest.fixture(autouse=True)
    def server(self, seaweedfs_server):
        self.s3 = seaweedfs_server

    def open_for_test(self, place):
        return backend_at(self.s3.url(place))

    def writer_program(self, place):
        return WRITER.format(url=self.s3.url(place), num_bytes=self.large_bytes)


@pytest.mark.full
class TestS3OnMoto(StorageBackendTests):
    large_bytes = 24 * MIB

    @pytest.fixture(autouse=True)
    def server(self, moto_server):
        self.s3 = moto_server

    def open_for_test(self, place):
        return backend_at(self.s3.url(place))

    def writer_program(self, place):
        return WRITER.format(url=self.s3.url(place), num_bytes=self.large_bytes)

"""Files for the storage benchmark: the backend beside plain threads that read and write."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_hicache.benchmarks.page_cache import drop_page_cache
from vllm_hicache.benchmarks.storage_service import Service
from vllm_hicache.config import StorageConfig
from vllm_hicache.storage import HEADER_BYTES
from vllm_hicache.storage_backends.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class RawFiles:
    """One file each, written and read whole by a thread."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._threads = ThreadPoolExecutor(num_threads, "raw-files")

    async def put(self, name: str, value: bytes) -> None:
        """Write one file."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._write, name, value)

    async def get(self, name: str, payload: memoryview) -> None:
        """Read one file into the pool."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._read, name, payload)

    def _write(self, name: str, value: bytes) -> None:
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            left = memoryview(value)
            while left:
                left = left[os.write(fd, left) :]
        finally:
            os.close(fd)

    def _read(self, name: str, payload: memoryview) -> None:
        fd = os.open(self._folder / name, os.O_RDONLY)
        try:
            num_bytes = os.preadv(fd, [bytearray(HEADER_BYTES), payload], 0)
        finally:
            os.close(fd)
        if num_bytes != HEADER_BYTES + payload.nbytes:
            raise SystemExit(f"{name}: {num_bytes} bytes were read")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


@asynccontextmanager
async def file_service(
    folder: str | None, num_threads: int, *, drops_page_cache: bool
) -> AsyncIterator[Service]:
    """Files in a new folder below ``folder``, which goes away."""
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=folder))
    raw = RawFiles(root / "raw", num_threads)
    url = f"file://{root.resolve()}/pages"
    backend = open_backend(url, StorageConfig.parse({"url": url, "min_free": 0}))
    await backend.open()
    try:
        yield Service(
            backend,
            {"plain threads": raw},
            lambda: 0.0,
            before_reads=(lambda: drop_page_cache(root)) if drops_page_cache else None,
        )
    finally:
        await backend.close()
        raw.close()
        shutil.rmtree(root)

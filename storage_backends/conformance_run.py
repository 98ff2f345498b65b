"""The conformance suite on whatever a URL names, without pytest.

`python -m vllm_hicache.storage_backends.conformance_run 'my_module:Mine?file={place}/store'`
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_backends.conformance import StorageBackendTests
from vllm_hicache.storage_backends.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_hicache.storage import StorageBackend

PLACE = "{place}"
"""Stands in a URL for the folder that each check has for itself."""

_WRITER = """
import asyncio, sys
sys.path[:] = {path!r}
from vllm_hicache.storage_backends.conformance import object_write
from vllm_hicache.storage_backends.conformance_run import backend_at

async def main():
    backend = backend_at({storage!r})
    await backend.open()
    write = object_write(7, {num_bytes})
    print("writing", flush=True)
    while True:
        await backend.write([write])
        await backend.delete([write.name])

asyncio.run(main())
"""


def backend_at(storage: str | Mapping[str, object]) -> StorageBackend:
    """What an engine makes of a storage URL or table of options, not yet open.

    Raises:
        ConfigError: It names nothing, or something that cannot be.
    """
    config = StorageConfig.parse({"url": storage} if isinstance(storage, str) else storage)
    return open_backend(config.url, config)


def writer_program(storage: str | Mapping[str, object], num_bytes: int) -> str:
    """What `StorageBackendTests.writer_program` returns; it imports what this process can."""
    return _WRITER.format(path=sys.path, storage=storage, num_bytes=num_bytes)


class UrlTests(StorageBackendTests):
    """The suite on `url`, in which `{place}` stands for the folder of one check."""

    url = ""

    def open_for_test(self, place: Path) -> StorageBackend:
        """The backend of the URL at this place."""
        return backend_at(self.url.replace(PLACE, str(place)))

    def writer_program(self, place: Path) -> str:
        """A program for the same place."""
        return writer_program(self.url.replace(PLACE, str(place)), self.large_bytes)


def check_backend(url: str) -> int:
    """Run every check, print a line for each, and return how many failed.

    Raises:
        ConfigError: The URL lacks `{place}`: one check would see the objects of another.
    """
    if PLACE not in url:
        raise ConfigError(f"the URL must have {PLACE} where each check's own folder goes")
    suite = UrlTests()
    suite.url = url
    checks = [name for name in dir(suite) if name.startswith("test_")]
    return sum(not _passes(suite, name) for name in checks)


def _passes(suite: UrlTests, name: str) -> bool:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hicache-") as place, ThreadPoolExecutor(1) as own:
        error = own.submit(lambda: asyncio.run(getattr(suite, name)(Path(place)))).exception()
    label = name.removeprefix("test_").replace("_", " ")
    seconds = time.perf_counter() - started
    said = "".join(traceback.format_exception(error)) if error else ""
    sys.stdout.write(f"{'FAILED' if said else 'ok    '} {seconds:6.2f} s  {label}\n{said}")
    sys.stdout.flush()
    return not said


def main() -> int:
    """Check the backend of the URL on the command line; status 1 if anything failed."""
    try:
        return 1 if check_backend(sys.argv[1]) else 0
    except (ConfigError, IndexError) as error:
        sys.stderr.write(f"{error}\n{__doc__}")
        return 2


if __name__ == "__main__":
    sys.exit(main())

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

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_backends.conformance import StorageBackendTests
from vllm_hicache.storage_backends.registry import open_backend

if TYPE_CHECKING:
    from vllm_hicache.storage import StorageBackend

PLACE = "{place}"
"""Stands in a URL for the folder that each check has for itself."""

_WRITER = """
import asyncio, sys
sys.path[:] = {path!r}
from vllm_hicache.storage_backends.conformance import object_write
from vllm_hicache.storage_backends.conformance_run import backend_at

async def main():
    backend = backend_at({url!r})
    await backend.open()
    write = object_write(7, {num_bytes})
    print("writing", flush=True)
    while True:
        await backend.write([write])
        await backend.delete([write.name])

asyncio.run(main())
"""


def backend_at(url: str) -> StorageBackend:
    """What an engine makes of a storage URL, not yet open.

    Raises:
        ConfigError: The URL names nothing.
    """
    config = HiCacheConfig.parse({"storage": url}, {}).storage
    if config is None:
        raise ConfigError("no storage is named")
    return open_backend(config.url, config)


class UrlTests(StorageBackendTests):
    """The suite on `url`, in which `{place}` stands for the folder of one check."""

    url = ""

    def open_for_test(self, place: Path) -> StorageBackend:
        """The backend of the URL at this place."""
        return backend_at(self.url.replace(PLACE, str(place)))

    def writer_program(self, place: Path) -> str:
        """A program that imports what this one can."""
        url = self.url.replace(PLACE, str(place))
        return _WRITER.format(path=sys.path, url=url, num_bytes=self.large_bytes)


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

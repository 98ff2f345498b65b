"""SeaweedFS that can be killed, behind a proxy in a thread that misbehaves as told."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import yarl
from aiohttp import web
from s3_faults import Fault, FaultyS3, faulty
from s3_servers import BUCKET, S3Server, seaweedfs


class S3BehindProxy:
    """A server that can be started, killed and frozen, at an address that stays. A context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_starts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._proxy_life = contextlib.AsyncExitStack()
        self._server_life = contextlib.ExitStack()
        self.server: S3Server | None = None
        self.proxy: FaultyS3

    def __enter__(self) -> "S3BehindProxy":
        self._thread.start()
        nobody = "http://127.0.0.1:1"
        entering = self._proxy_life.enter_async_context(faulty(nobody))
        self.proxy = asyncio.run_coroutine_threadsafe(entering, self._loop).result(30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        asyncio.run_coroutine_threadsafe(self._proxy_life.aclose(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/pages?endpoint_url={self.proxy.endpoint_url}"

    def start(self) -> None:
        """An empty server, unless one runs."""
        if self.server is None:
            self._num_starts += 1
            folder = self._folder / str(self._num_starts)
            folder.mkdir()
            self.server = self._server_life.enter_context(seaweedfs(folder))
            self.proxy.upstream = self.server.endpoint_url

    def kill(self) -> None:
        self._server_life.close()
        self.server = None

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Its processes stand still; its sockets stay open."""
        assert self.server is not None
        os.kill(self.server.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def failing(self, fault: Fault, *methods: str) -> Iterator[None]:
        """Requests of these methods (none: all) meet the fault."""
        for method in methods or ("",):
            self.proxy.fail(fault, method)
        try:
            yield
        finally:
            self.proxy.heal()

    @contextlib.contextmanager
    def deleting(self) -> Iterator[None]:
        """Every object is deleted right before it is read."""
        assert self.server is not None
        client = self.server.client()

        def delete(request: web.BaseRequest) -> None:
            key = yarl.URL(request.raw_path, encoded=True).path.removeprefix(f"/{BUCKET}/")
            client.delete_object(Bucket=BUCKET, Key=key)

        self.proxy.fail(Fault(first=delete), "GET")
        try:
            yield
        finally:
            self.proxy.heal()

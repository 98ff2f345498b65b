"""An HTTP proxy before an S3 server that misbehaves as told, in the test's own event loop."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp
import yarl
from aiohttp import web

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request instead of its answer, or to its answer."""

    status: int = 0  # answered with this and an S3 error of the given code
    code: str = "InternalError"
    stall_s: float = 0.0  # silence before anything else
    cut_after: int | None = None  # the connection breaks after so many bytes of the answer
    drop_range: bool = False  # the server never hears of the range
    first: Callable[[web.BaseRequest], None] | None = None  # is done before; may block


@dataclass(slots=True)
class Rule:
    """A fault for the next `times` requests that match."""

    fault: Fault
    matches: Callable[[web.BaseRequest], bool]
    times: int


@dataclass(slots=True)
class FaultyS3:
    """The proxy: where it listens, what it has seen, what it is to do."""

    upstream: str
    endpoint_url: str = ""
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    session: aiohttp.ClientSession | None = None

    def fail(
        self,
        fault: Fault,
        method: str = "",
        times: int = 1 << 30,
        matches: Callable[[web.BaseRequest], bool] = lambda _: True,
    ) -> None:
        """Let requests of a method (empty: all) meet a fault, so many times."""
        self.rules.append(
            Rule(
                fault, lambda request: request.method.startswith(method) and matches(request), times
            )
        )

    def heal(self) -> None:
        """No more faults, and forget what was seen."""
        self.rules.clear()
        self.seen.clear()

    def methods(self) -> list[str]:
        """Methods of the requests since the last `heal`, in order."""
        return [method for method, _ in self.seen]

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.method, {k.lower(): v for k, v in request.headers.items()}))
        fault = self._fault(request)
        if fault.first is not None:
            await asyncio.to_thread(fault.first, request)
        if fault.stall_s:
            await asyncio.sleep(fault.stall_s)
        if fault.status:
            await request.content.read()
            body = f"<Error><Code>{fault.code}</Code><Message>as told</Message></Error>"
            return web.Response(status=fault.status, text=body, content_type="application/xml")
        try:
            return await self._forward(request, fault)
        except aiohttp.ClientConnectionError:  # the server is gone, and so is this connection
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    def _fault(self, request: web.BaseRequest) -> Fault:
        for rule in self.rules:
            if rule.times > 0 and rule.matches(request):
                rule.times -= 1
                return rule.fault
        return Fault()

    async def _forward(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        if fault.drop_range:
            headers.pop("Range", None)
        url = yarl.URL(self.upstream + request.raw_path, encoded=True)
        data = await request.content.read()
        assert self.session is not None
        async with self.session.request(
            request.method,
            url,
            headers=headers,
            data=io.BytesIO(data) if data else None,
            allow_redirects=False,
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            body = await answer.read()
            if fault.cut_after is None or request.method == "HEAD":
                if request.method != "HEAD":
                    kept["Content-Length"] = str(len(body))
                return web.Response(
                    status=answer.status,
                    headers=kept,
                    body=None if request.method == "HEAD" else body,
                )
            response = web.StreamResponse(status=answer.status, headers=kept)
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: fault.cut_after])
            if request.transport is not None:
                request.transport.close()
            return response


@contextlib.asynccontextmanager
async def faulty(upstream: str) -> AsyncIterator[FaultyS3]:
    """A proxy before the server at `upstream`, for one test."""
    proxy = FaultyS3(upstream)
    server = web.Server(proxy.answer, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    proxy.endpoint_url = f"http://{host}:{port}"
    async with aiohttp.ClientSession(
        auto_decompress=False, skip_auto_headers={"Content-Type"}
    ) as session:
        proxy.session = session
        try:
            yield proxy
        finally:
            await runner.cleanup()

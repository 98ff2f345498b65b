"""A TCP proxy in a thread of its own: ends TLS, or adds latency to each direction."""

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_CHUNK_BYTES = 1 << 20
Watcher = Callable[[bytes], None]


class Proxy:
    """Forwards connections to a port of this host; use it as a context manager."""

    def __init__(
        self, target_port: int, *, tls: ssl.SSLContext | None = None, delay_s: float = 0.0
    ) -> None:
        self.port = 0
        self.delay_s = delay_s
        self.on_request: Watcher | None = None
        """Called, in the proxy's thread, with what a client sent and before the server sees it."""
        self._target_port = target_port
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> "Proxy":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self._tls, limit=_CHUNK_BYTES
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there = await asyncio.open_connection(
                "127.0.0.1", self._target_port, limit=_CHUNK_BYTES
            )
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there[1])
        await asyncio.gather(
            self._pump(reader, there[1], is_request=True), self._pump(there[0], writer)
        )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_request: bool = False,
    ) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send_late(late, writer))
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if is_request and self.on_request is not None:
                    self.on_request(data)
                late.put_nowait((self._loop.time() + self.delay_s, data))
        except OSError:
            pass
        late.put_nowait((0.0, b""))
        await sending

    async def _send_late(
        self, late: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        """Everything arrives `delay_s` after it was sent, however much there is of it."""
        try:
            while True:
                when, data = await late.get()
                if not data:
                    break
                await asyncio.sleep(max(0.0, when - self._loop.time()))
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()


def server_tls(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's TLS context for 127.0.0.1, and the file of the authority that signed it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test server")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    authority, key_file = folder / "ca.pem", folder / "key.pem"
    authority.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, key_file)
    return context, authority

"""Inside the storage process: lets schedulers in, feeds the operation table, watches for hangs."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Coroutine
from typing import Any, NoReturn

from vllm_hicache.errors import BackendError, ConfigError
from vllm_hicache.host_pages import HostPages
from vllm_hicache.masking import mask_url
from vllm_hicache.storage_address import tune_connection
from vllm_hicache.storage_breaker import TELL_EVERY_S
from vllm_hicache.storage_lifeline import Lifeline, leave, report
from vllm_hicache.storage_messages import (
    RECEIVE_BYTES,
    Ask,
    Attach,
    Command,
    Configure,
    Configured,
    Event,
    FrameReader,
    Hello,
    ProtocolError,
    Reply,
    Stats,
    StorageTimes,
    Switching,
    command_reader,
    encode_frame,
)
from vllm_hicache.storage_neighbours import Neighbours
from vllm_hicache.storage_process_config import EXIT_CONFIG, EXIT_HUNG, Launch, Report
from vllm_hicache.storage_switch import ServedStorage, Switch
from vllm_hicache.storage_table import OperationTable

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
TICK_S = 1.0
# Answers that nobody reads: the scheduler is as good as gone.
MAX_UNSENT_BYTES = 64 << 20
# After the lifeline's end, messages that were sent before may still arrive.
LAST_MESSAGES_S = 0.1
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Connection:
    """One scheduler, or who asks a question, or pretends to be one of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._frames: FrameReader[Command] = command_reader()
        self._early: list[Command] = []  # what came in one piece with Attach
        self._reader = reader
        self._writer = writer

    async def check(self, token: str) -> Attach | Ask | Configure:
        """What the other end came for, when it has proven that it belongs here; ``OSError``
        otherwise."""
        peer = self._writer.get_extra_info("socket")
        if peer.family == socket.AF_UNIX:
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
            if uid != os.geteuid():
                raise ProtocolError(f"user {uid} is not the user of this process")
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            while not self._early:
                self._early = await self.receive()
        first = self._early.pop(0)
        if not isinstance(first, Attach | Ask | Configure):
            raise ProtocolError("no token")
        if not secrets.compare_digest(first.token.encode(), token.encode()):
            raise ProtocolError("no valid token")
        return first

    async def receive(self) -> list[Command]:
        """The next commands; ``ConnectionError`` when there are no more."""
        if self._early:
            commands, self._early = self._early, []
            return commands
        data = await self._reader.read(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the scheduler closed it")
        return self._frames.feed(data)

    async def reply(self, reply: Reply) -> None:
        """Send the only answer of this connection and close it."""
        with contextlib.suppress(OSError):
            self._writer.write(encode_frame(reply))
            self._writer.close()
            await self._writer.wait_closed()

    def send(self, event: Event) -> None:
        """Queue an answer; never waits."""
        if self._writer.is_closing():
            return
        self._writer.write(encode_frame(event))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            logger.warning("The scheduler does not read its answers; closing the channel")
            self.close()

    def close(self) -> None:
        """Close at once, dropping unsent answers."""
        # The other end sees it now, even if a thread in an uninterruptible call keeps the
        # descriptors of this process alive after its exit.
        with contextlib.suppress(OSError):
            self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._writer.transport.abort()


class StorageServer:
    """Serves one scheduler at a time; a newcomer with the token replaces the one before."""

    def __init__(
        self,
        launch: Launch,
        listener: socket.socket,
        storage: ServedStorage,
        pages: HostPages,
    ) -> None:
        self._launch = launch
        self._config = launch.config
        self._listener = listener
        self._storage = storage
        self._table = OperationTable(storage, pages, launch.config)
        self._neighbours = Neighbours(
            lambda: storage.records, min_pages=launch.config.near_miss_pages
        )
        self._opened = asyncio.Event()
        self._is_valid = False
        self._newcomers: asyncio.Queue[Connection] = asyncio.Queue()
        self._current: Connection | None = None
        self._last_received = 0.0
        self._switch = Switch(
            launch,
            is_open=lambda: self._table.is_open,
            counters=self._counters,
            finish=self._finish,
        )
        self._lifeline = Lifeline(
            launch.lifeline_fd,
            parent=launch.parent,
            grace_s=launch.config.storage.shutdown_grace_s,
            hang_limit_s=launch.config.hang_limit_s,
        )

    async def run(self) -> NoReturn:
        """Serve until the lifeline ends, then leave the process."""
        ended = self._lifeline.watch()
        asyncio.get_running_loop().set_exception_handler(_leave_after_bug)
        works = (self._open_storage(), self._accept(), self._serve(), self._tick())
        # The tuple keeps the tasks alive: the loop holds them by weak references only.
        tasks = tuple(asyncio.create_task(_run_or_leave(work)) for work in works)
        await ended.wait()
        logger.debug("%d tasks end with the process", len(tasks))
        await self._finish()
        leave(0)

    async def _finish(self) -> None:
        """Persist what is queued, and what the scheduler had sent before the worker ended."""
        grace_s = self._config.storage.shutdown_grace_s
        self._last_received = time.monotonic()
        deadline = self._last_received + grace_s
        self._table.cancel_reads()
        while (rest_s := deadline - time.monotonic()) > 0:
            await self._table.drain(rest_s)
            quiet_s = time.monotonic() - self._last_received
            if quiet_s >= LAST_MESSAGES_S:
                return
            await asyncio.sleep(LAST_MESSAGES_S - quiet_s)

    async def _open_storage(self) -> None:
        if not self._config.storage.is_attached:
            self._report_validity()
            self._opened.set()  # nothing to wait for; every operation is unavailable
            return
        backoff_s, told_at = self._config.breaker_backoff_s, 0.0
        while not self._table.is_open:
            try:
                await self._storage.open()
            except BackendError as error:
                self._report_validity()
                is_growing = backoff_s < self._config.breaker_max_backoff_s
                if is_growing or time.monotonic() - told_at >= TELL_EVERY_S:
                    told_at = time.monotonic()
                    logger.warning(
                        "Storage cannot be opened, next try in %.1f s: %s", backoff_s, error
                    )
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, self._config.breaker_max_backoff_s)
            else:
                self._report_validity()
                self._table.is_open = True
                self._opened.set()
                logger.info("Storage %s is open", mask_url(self._config.storage.url))

    def _report_validity(self) -> None:
        """Once: a bad configuration would have been refused by now."""
        if not self._is_valid:
            self._is_valid = True
            report(Report())

    # Connections ----------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        greetings: set[asyncio.Task[None]] = set()
        while True:
            stranger, _ = await loop.sock_accept(self._listener)
            greeting = asyncio.create_task(self._greet(stranger))
            greetings.add(greeting)
            greeting.add_done_callback(greetings.discard)

    async def _greet(self, stranger: socket.socket) -> None:
        try:
            tune_connection(stranger)
            connection = Connection(*await asyncio.open_connection(sock=stranger))
        except OSError:  # it has gone again
            stranger.close()
            return
        try:
            first = await connection.check(self._launch.token)
        except OSError as error:  # also of the timeout
            logger.warning("Turned a connection away: %s", error or "no token in time")
            connection.close()
            return
        if not isinstance(first, Attach):
            await self._answer(first, connection)
            return
        self._newcomers.put_nowait(connection)
        if self._current is not None:
            self._current.close()

    async def _answer(self, question: Ask | Configure, connection: Connection) -> None:
        reply = await self._switch.answer(question)
        await connection.reply(reply)
        is_done = isinstance(reply, Configured) and not reply.refusal
        if is_done and isinstance(question, Configure) and question.commit:
            logger.info("Storage changes: this process finishes and makes room for another")
            if self._current is not None:
                self._current.send(Switching())
            await self._switch.leave(question.storage)

    async def _serve(self) -> None:
        # Operations of the first moments would be refused: the channel comes up a little later.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.storage.connect_timeout_s):
                await self._opened.wait()
        while True:
            connection = await self._newcomers.get()
            await self._table.quiet()
            while not self._newcomers.empty():
                connection.close()
                connection = self._newcomers.get_nowait()
            await self._serve_one(connection)

    async def _serve_one(self, connection: Connection) -> None:
        self._current = connection
        self._table.attach(self._neighbours.listen(connection.send))
        launch = self._launch
        connection.send(
            Hello(
                worker_id=self._config.worker_id,
                incarnation=launch.incarnation,
                pid=os.getpid(),
                attachment=launch.attachment,
                times=StorageTimes.of(self._config.storage),
            )
        )
        connection.send(Stats(self._counters()))
        try:
            while True:
                commands = await connection.receive()
                self._last_received = time.monotonic()
                for command in commands:
                    if not self._neighbours.take(command):
                        self._table.handle(command)
        except OSError as error:
            logger.info("The channel to the scheduler is closed: %s", error)
        self._table.detach()
        self._current = None
        connection.close()

    # Watching -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        told: dict[str, float] = {}
        while True:
            await asyncio.sleep(TICK_S)
            self._lifeline.beat()
            self._leave_if_hung()
            counters = self._counters()
            if self._current is not None and counters != told:
                told = counters
                self._current.send(Stats(counters))

    def _counters(self) -> dict[str, float]:
        return {**self._storage.stats(), **self._table.counters(), **self._table.gauges()}

    def _leave_if_hung(self) -> None:
        age_s = max(self._table.oldest_running_s(), self._storage.oldest_running_s())
        if age_s > self._config.hang_limit_s:
            logger.error("A storage call hangs for %.0f s; starting anew", age_s)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            if self._current is not None:
                self._current.close()
            leave(EXIT_HUNG)


def _leave_after_bug(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback that fails may leave an operation without its answers; a fresh process has none.

    Errors of sockets are told here as well when nobody waits for them.
    """
    loop.default_exception_handler(context)
    if "exception" in context and not isinstance(context["exception"], OSError):
        leave(1)


async def _run_or_leave(work: Coroutine[Any, Any, None]) -> None:
    """A part of the server that fails ends the process; ``asyncio.run`` could wait for ever."""
    try:
        await work
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except Exception:
        logger.exception("The storage process failed")
        leave(1)

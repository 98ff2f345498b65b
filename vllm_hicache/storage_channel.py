"""The scheduler's end of the channels to all storage processes: one I/O thread, no blocking call.

A message reaches only the connection that the caller has seen come up, so a restarted process
never gets an operation whose host slots the caller has already given up.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from vllm_hicache.storage_address import StorageAddress
from vllm_hicache.storage_messages import (
    RECEIVE_BYTES,
    Attach,
    Command,
    Event,
    FrameReader,
    Hello,
    ProtocolError,
    StorageTimes,
    encode_frame,
    event_reader,
)

logger = logging.getLogger(__name__)

FRAMES_PER_SEND = 64
# A process that reads nothing for this long a queue is as good as down.
MAX_UNSENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChannelUp:
    """The storage process of this incarnation answers; host slots of older operations are quiet.

    ``attachment`` and ``times`` are those of its ``Hello``: 0 while no storage is attached.
    """

    incarnation: int
    attachment: int = 1
    times: StorageTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ChannelDown:
    """No running operation of this worker will be answered.

    Its storage process may still touch their host slots until the next ``ChannelUp``.
    """


@dataclass(slots=True, eq=False)
class _Link:
    """One worker's connection. Only the I/O thread writes to it."""

    worker_id: int
    address: StorageAddress
    connection: socket.socket | None = None
    is_connected: bool = False
    generation: int = 0  # of this connection; 0 until its Hello has come
    retry_at: float = 0.0
    backoff_s: float = 0.0
    unsent: deque[memoryview] = field(default_factory=deque)
    unsent_bytes: int = 0
    reader: FrameReader[Event] = field(default_factory=event_reader)

    def queue(self, frame: bytes) -> None:
        self.unsent.append(memoryview(frame))
        self.unsent_bytes += len(frame)

    def write(self) -> None:
        """Send as much as the socket takes now."""
        if self.connection is None:
            return
        while self.unsent:
            try:
                num_sent = self.connection.sendmsg(list(islice(self.unsent, FRAMES_PER_SEND)))
            except BlockingIOError:
                return
            self.unsent_bytes -= num_sent
            while num_sent:
                first = self.unsent.popleft()
                if num_sent < len(first):
                    self.unsent.appendleft(first[num_sent:])
                num_sent -= min(num_sent, len(first))

    def forget_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.is_connected, self.generation = None, False, 0
        self.reader = event_reader()
        self.unsent.clear()
        self.unsent_bytes = 0


class StorageChannels:
    """Channels to the storage processes at ``addresses``; the index is the worker id.

    ``send`` and ``poll`` belong to one thread, the scheduler's, and never wait for anything.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        first_backoff_s: float = 0.05,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self._links = [_Link(i, StorageAddress.parse(text)) for i, text in enumerate(addresses)]
        self._seen_generation = [0] * len(self._links)  # the caller's view, moved by poll()
        self._last_generation = 0
        self._outbox: deque[tuple[_Link, int, bytes]] = deque()
        self._inbox: deque[tuple[int, Event | ChannelUp | ChannelDown, int]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._is_woken = False
        self._flush_until: float | None = None
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="hicache-channels", daemon=True)
        self._thread.start()

    # The scheduler's thread -----------------------------------------------------------------

    def send(self, worker_id: int, message: Command) -> bool:
        """Queue a message; False when the channel is down, then it will never be answered.

        True promises no answer: the channel can still go down, which ``poll`` reports.
        """
        link = self._links[worker_id]
        generation = self._seen_generation[worker_id]
        if not generation or link.generation != generation or link.unsent_bytes > MAX_UNSENT_BYTES:
            return False
        self._outbox.append((link, generation, encode_frame(message)))
        self._wake()
        return True

    def poll(self) -> list[tuple[int, Event | ChannelUp | ChannelDown]]:
        """What has arrived since the last call, with worker ids, in order per worker."""
        events: list[tuple[int, Event | ChannelUp | ChannelDown]] = []
        inbox = self._inbox
        while inbox:
            worker_id, event, generation = inbox.popleft()
            self._seen_generation[worker_id] = generation
            events.append((worker_id, event))
        return events

    @property
    def has_news(self) -> bool:
        """Whether ``poll`` would return anything; costs nothing."""
        return bool(self._inbox)

    def is_up(self, worker_id: int) -> bool:
        """Whether the last event that ``poll`` returned left this channel up."""
        return self._seen_generation[worker_id] != 0

    def close(self, flush_s: float = 1.0) -> None:
        """Send what is queued for at most ``flush_s``, then close every connection."""
        if self._flush_until is None:
            self._flush_until = time.monotonic() + flush_s
            self._wake()
        self._thread.join(flush_s + 5.0)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            # Full means that the thread has not read earlier wake-ups yet: it is awake.
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake_writer.send(b"\0")

    # The I/O thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._step()
        except Exception:
            logger.exception("The storage channels failed; storage is off")
        finally:
            for link in self._links:
                self._drop(link, "closed")
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _is_finished(self) -> bool:
        if self._flush_until is None:
            return False
        is_sent = not self._outbox and not any(
            link.unsent for link in self._links if link.generation
        )
        return is_sent or time.monotonic() >= self._flush_until

    def _step(self) -> None:
        self._connect_idle_links()
        for key, events in self._selector.select(self._wait_s()):
            if key.data is None:
                self._take_outbox()
            else:
                self._serve(key.data, events)

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        times = [link.retry_at for link in self._links if link.connection is None]
        if self._flush_until is not None:
            times.append(self._flush_until)
        return max(0.0, min(times) - now) if times else None

    def _take_outbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        self._is_woken = False
        touched: dict[_Link, None] = {}
        while self._outbox:
            link, generation, frame = self._outbox.popleft()
            if link.generation == generation:
                link.queue(frame)
                touched[link] = None
        for link in touched:
            self._guarded(link, selectors.EVENT_WRITE)

    def _connect_idle_links(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if link.connection is None and link.retry_at <= now:
                link.connection = link.address.open_socket()
                link.connection.setblocking(False)
                try:
                    with contextlib.suppress(BlockingIOError):
                        link.connection.connect(link.address.sockaddr)
                except OSError as error:
                    self._drop(link, str(error))
                    continue
                link.queue(encode_frame(Attach(link.address.token)))
                self._selector.register(
                    link.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, link
                )

    def _serve(self, link: _Link, events: int) -> None:
        if not link.is_connected and link.connection is not None:
            error = link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._drop(link, f"connect failed with errno {error}")
                return
            link.is_connected = True
        self._guarded(link, events)

    def _guarded(self, link: _Link, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                link.write()
            if events & selectors.EVENT_READ:
                self._read(link)
        except OSError as error:
            self._drop(link, str(error))
        if link.connection is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
            if self._selector.get_key(link.connection).events != wanted:
                self._selector.modify(link.connection, wanted, link)

    def _read(self, link: _Link) -> None:
        if link.connection is None:
            return
        try:
            data = link.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the storage process closed the connection")
        for event in link.reader.feed(data):
            if isinstance(event, Hello):
                self._greet(link, event)
            elif link.generation:
                self._inbox.append((link.worker_id, event, link.generation))
            else:
                raise ProtocolError("a message before Hello")

    def _greet(self, link: _Link, hello: Hello) -> None:
        if hello.worker_id != link.worker_id:
            raise ProtocolError(f"worker {hello.worker_id} answers for worker {link.worker_id}")
        self._last_generation += 1
        link.generation = self._last_generation
        link.backoff_s = 0.0
        event = ChannelUp(hello.incarnation, hello.attachment, hello.times)
        self._inbox.append((link.worker_id, event, link.generation))

    def _drop(self, link: _Link, reason: str) -> None:
        was_up = link.generation != 0
        if link.connection is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(link.connection)
        link.forget_connection()
        link.backoff_s = min(self._max_backoff_s, link.backoff_s * 2 or self._first_backoff_s)
        link.retry_at = time.monotonic() + link.backoff_s
        if was_up:
            self._inbox.append((link.worker_id, ChannelDown(), 0))
        if self._flush_until is None:
            level = logging.WARNING if was_up else logging.DEBUG
            logger.log(
                level,
                "Channel to the storage process of worker %d at %s is down: %s",
                link.worker_id,
                link.address.without_token,
                reason,
            )

"""One connection to a Redis server, where values move between socket and host pool uncopied.

Requests are pipelined: all of a batch are sent, then all answers are read. Answers to questions go
through hiredis; values that were asked for go from the socket straight into the views of a read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from vllm_hicache.storage import ReadOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm_hicache.storage import ObjectRead, ObjectWrite

R_co = TypeVar("R_co", covariant=True)

NOT_YET: Any = object()
"""What a reply parser returns while an answer is incomplete."""

_NOTHING = memoryview(b"")
# The first bytes of a value arrive behind its length: at most this much of a value is copied, and
# a smaller one costs more calls. 64 KiB are copied in 6 us.
_SCRATCH_BYTES = 64 * 1024
# Where the socket takes less than a piece, Python 3.11 copies the rest of that piece.
_PIECE_BYTES = 256 * 1024
_LINE_BYTES = 512
_MAX_LINE_BYTES = 64 * 1024


class Refusal(Exception):
    """An error that the server answered. It is a value and never raised.

    >>> Refusal("OOM command not allowed").code
    'OOM'
    """

    @property
    def code(self) -> str:
        """The first word, such as `OOM` or `MOVED`."""
        return str(self).partition(" ")[0]


class ConnectionLost(ConnectionError):
    """The connection ended before all answers came, or the server speaks another protocol."""


class ReplyParser(Protocol):
    """What is used of `hiredis.Reader`."""

    def feed(self, data: bytes) -> None: ...

    def gets(self) -> Any: ...


class Receiver(Protocol[R_co]):
    """Takes the answers of one batch."""

    @property
    def target(self) -> memoryview:
        """Where the next bytes may be received without a copy; empty: nowhere."""
        ...

    def filled(self, num_bytes: int) -> None:
        """So many bytes have been received into `target`."""
        ...

    def feed(self, data: memoryview) -> None:
        """Bytes that were received elsewhere; raises ConnectionLost when they make no sense."""
        ...

    @property
    def is_complete(self) -> bool: ...

    def result(self) -> R_co: ...


class Answers:
    """Receives any answers through a parser; `result` is one value or `Refusal` for each."""

    target = _NOTHING

    def __init__(self, num_answers: int, parser: ReplyParser) -> None:
        self._num_answers = num_answers
        self._parser = parser
        self._answers: list[Any] = []

    def filled(self, num_bytes: int) -> None:
        """Never called: there is no target."""

    def feed(self, data: memoryview) -> None:
        self._parser.feed(bytes(data))
        while (answer := self._parser.gets()) is not NOT_YET:
            self._answers.append(answer)
        if len(self._answers) > self._num_answers:
            raise ConnectionLost("more answers than questions")

    @property
    def is_complete(self) -> bool:
        return len(self._answers) == self._num_answers

    def result(self) -> list[Any]:
        return self._answers


class Values:
    """Receives the answers to one GET for each read, into its views.

    Each GET may be followed by `num_ignored` commands with answers of one line, which are dropped.
    """

    def __init__(self, reads: Sequence[ObjectRead], num_ignored: int = 0) -> None:
        self.target = _NOTHING
        self._reads = reads
        self._num_ignored_each = num_ignored
        self._num_ignored = 0
        self._outcomes: list[ReadOutcome | Refusal] = []
        self._next_targets: list[memoryview] = []
        self._skip = 0  # bytes of a value that fits no read, and line ends
        self._line = b""

    def filled(self, num_bytes: int) -> None:
        self.target = self.target[num_bytes:]
        if not self.target:
            self._turn_to_next_target()

    def feed(self, data: memoryview) -> None:
        while data:
            if self.target:
                num_bytes = min(len(data), len(self.target))
                self.target[:num_bytes] = data[:num_bytes]
                self.filled(num_bytes)
            elif self._skip:
                num_bytes = min(len(data), self._skip)
                self._skip -= num_bytes
            else:
                num_bytes = self._feed_line(bytes(data[:_LINE_BYTES]))
            data = data[num_bytes:]

    @property
    def is_complete(self) -> bool:
        is_between = not (self.target or self._skip or self._num_ignored or self._line)
        return is_between and len(self._outcomes) == len(self._reads)

    def result(self) -> list[ReadOutcome | Refusal]:
        return self._outcomes

    def _feed_line(self, data: bytes) -> int:
        end = data.find(b"\n") + 1
        self._line += data[:end] if end else data
        if end:
            line, self._line = self._line[:-2], b""
            self._take_line(line)
        elif len(self._line) > _MAX_LINE_BYTES:
            raise ConnectionLost("an answer has no end of line")
        return end or len(data)

    def _take_line(self, line: bytes) -> None:
        if self._num_ignored:
            self._num_ignored -= 1
            return
        if len(self._outcomes) == len(self._reads):
            raise ConnectionLost("more answers than questions")
        read = self._reads[len(self._outcomes)]
        self._num_ignored = self._num_ignored_each
        if line[:1] == b"-":
            self._outcomes.append(Refusal(line[1:].decode("utf-8", "replace")))
        elif line[:1] == b"$" and line[1:].lstrip(b"-").isdigit():
            self._outcomes.append(self._begin_value(read, int(line[1:])))
        else:
            raise ConnectionLost("the answer to GET is no value")

    def _begin_value(self, read: ObjectRead, num_bytes: int) -> ReadOutcome:
        if num_bytes < 0:
            return ReadOutcome.MISSING
        if num_bytes != read.header.nbytes + read.payload.nbytes:
            self._skip = num_bytes + 2
            return ReadOutcome.BAD_LENGTH
        self._next_targets = [read.header, read.payload]
        self._turn_to_next_target()
        return ReadOutcome.OK

    def _turn_to_next_target(self) -> None:
        while self._next_targets:
            self.target = self._next_targets.pop(0)
            if self.target:
                return
        self.target = _NOTHING
        self._skip = 2


class Wire(asyncio.BufferedProtocol):
    """An authenticated connection; runs one exchange at a time.

    Once `close` has been called, or an exchange has raised, it touches no buffer of a caller.
    """

    def __init__(
        self, stream: asyncio.StreamWriter, parser: ReplyParser, lost: Callable[[Wire], None]
    ) -> None:
        transport = cast("asyncio.Transport", stream.transport)
        self.is_closed = False
        self._parser = parser
        self._stream = stream  # it would close the transport when collected
        self._transport = transport
        self._tell_lost = lost
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._receiver: Receiver[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: Iterator[bytes | memoryview] = iter(())
        self._is_paused = False
        self._reason = "the server closed the connection"
        # As soon as a byte waits; 0 would hang with TLS, where even an empty buffer reaches it.
        transport.set_write_buffer_limits(high=1, low=0)
        transport.set_protocol(self)

    async def ask(self, request: bytes, num_answers: int) -> list[Any]:
        """Send commands and return their answers; an error answer is a `Refusal` in the list.

        Raises:
            ConnectionLost: As for all exchanges; the wire is closed then.
        """
        return await self._exchange([request], Answers(num_answers, self._parser))

    async def fetch(
        self, request: bytes, reads: Sequence[ObjectRead], *, num_ignored: int = 0
    ) -> list[ReadOutcome | Refusal]:
        """Send one GET for each read, each with `num_ignored` commands behind it."""
        return await self._exchange([request], Values(reads, num_ignored))

    async def store(self, pieces: Iterable[bytes | memoryview], num_answers: int) -> list[Any]:
        """Send commands that come in pieces and return their answers."""
        return await self._exchange(pieces, Answers(num_answers, self._parser))

    def close(self, reason: str = "closed") -> None:
        """Drop the connection at once, whatever is being sent or received."""
        if not self.is_closed:
            self.is_closed = True
            self._reason = reason
            self._drop_buffers()
            self._transport.abort()
            self._wake()

    async def _exchange(
        self, pieces: Iterable[bytes | memoryview], receiver: Receiver[R_co]
    ) -> R_co:
        self._receiver = receiver
        self._pieces = iter(pieces)
        try:
            self._send()
            while not receiver.is_complete and not self.is_closed:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        except BaseException:
            self.close("given up")
            raise
        finally:
            self._receiver = self._waiter = None
        if self.is_closed:
            raise ConnectionLost(self._reason)
        return receiver.result()

    def _send(self) -> None:
        """Write until the socket is full; the transport then calls `resume_writing`."""
        for piece in self._pieces:
            self._transport.write(piece)
            if self._is_paused or self.is_closed:
                return

    def _drop_buffers(self) -> None:
        self._receiver = None
        self._pieces = iter(())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the transport ----------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._receiver is not None and self._receiver.target:
            return self._receiver.target
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        receiver = self._receiver
        if receiver is None:
            self.close("the server spoke without being asked")
            return
        if receiver.target:
            receiver.filled(nbytes)
            return
        try:
            receiver.feed(self._scratch[:nbytes])
        except (ConnectionLost, ValueError) as error:
            self.close(f"the server does not speak Redis: {error}")
            return
        if receiver.is_complete:
            self._wake()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._reason = str(exc)
        self.is_closed = True
        self._drop_buffers()
        self._wake()
        self._tell_lost(self)


def command(*words: bytes) -> bytes:
    """One command as bytes to send.

    >>> command(b"GET", b"a")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n'
    """
    parts = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%b" % (len(words), parts)


def set_pieces(
    write: ObjectWrite, key: bytes, *, only_new: bool, ttl_s: int | None
) -> Iterable[bytes | memoryview]:
    """A SET of header and payload as one value, without joining them: 4 KiB are copied."""
    options = (b"$2\r\nNX\r\n" if only_new else b"") + (
        b"$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s) if ttl_s else b""
    )
    num_words = 3 + only_new + 2 * bool(ttl_s)
    num_bytes = len(write.header) + write.payload.nbytes
    yield b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
        num_words,
        len(key),
        key,
        num_bytes,
        cast("bytes", write.header),
    )
    for first in range(0, write.payload.nbytes, _PIECE_BYTES):
        yield write.payload[first : first + _PIECE_BYTES]
    yield b"\r\n" + options

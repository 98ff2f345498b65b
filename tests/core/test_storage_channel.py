"""The scheduler's channels against sockets that answer like a storage process, or do not."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_address import StorageAddress, listen
from vllm_hicache.storage_channel import ChannelDown, ChannelUp, StorageChannels

TIMES = messages.StorageTimes(0.05, 10.0, 5.0)


class Peer:
    """The other end of one accepted connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = messages.command_reader()
        self._received: list[messages.Command] = []
        connection.settimeout(5)

    def receive(self) -> messages.Command:
        while not self._received:
            data = self.connection.recv(1 << 20)
            if not data:
                raise EOFError
            self._received += self._reader.feed(data)
        return self._received.pop(0)

    def send(self, *events: messages.Event) -> None:
        self.connection.sendall(b"".join(map(messages.encode_frame, events)))

    def close(self) -> None:
        self.connection.close()


class Listener:
    """Listens like a supervisor and accepts like a process."""

    def __init__(self, host: str = "") -> None:
        self.socket, self.address = listen(host)
        self.socket.settimeout(5)

    def accept(self) -> Peer:
        peer = Peer(self.socket.accept()[0])
        assert peer.receive() == messages.Attach(self.address.token)
        return peer

    def greet(self, worker_id: int = 0, incarnation: int = 1) -> Peer:
        peer = self.accept()
        peer.send(messages.Hello(worker_id, incarnation, 1, 1, TIMES))
        return peer


class Caller:
    """Polls channels until something has come."""

    def __init__(self, *addresses: StorageAddress) -> None:
        self.channels = StorageChannels([str(a) for a in addresses], first_backoff_s=0.01)
        self.seen: list[tuple[int, object]] = []

    def wait_for(self, num_events: int, timeout_s: float = 5.0) -> list[tuple[int, object]]:
        """The next events in order, exactly so many."""
        end = time.monotonic() + timeout_s
        while len(self.seen) < num_events and time.monotonic() < end:
            self.seen += self.channels.poll()
            time.sleep(0.001)
        events, self.seen = self.seen[:num_events], self.seen[num_events:]
        assert len(events) == num_events, f"got only {events}"
        return events


@pytest.fixture
def opened():
    """Closes what a test has opened, last first."""
    things: list = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def make_listener(opened):
    def make(host: str = "") -> Listener:
        listener = Listener(host)
        opened.append(listener.socket)
        return listener

    return make


@pytest.fixture
def make_caller(opened):
    def make(*listeners: Listener) -> Caller:
        caller = Caller(*(listener.address for listener in listeners))
        opened.append(caller.channels)
        return caller

    return make


@pytest.fixture
def pair(make_listener, make_caller, opened):
    """A caller and the peer of its one worker, connected."""
    listener = make_listener()
    caller = make_caller(listener)
    peer = listener.greet()
    opened.append(peer)
    assert caller.wait_for(1) == [(0, ChannelUp(1))]
    return listener, caller, peer


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1"])
def test_messages_travel_both_ways_in_order(make_listener, make_caller, opened, host):
    listener = make_listener(host)
    caller = make_caller(listener)
    peer = listener.greet()
    opened.append(peer)
    caller.wait_for(1)
    for op in range(100):
        assert caller.channels.send(0, messages.Cancel(op))
    assert [peer.receive() for _ in range(100)] == [messages.Cancel(op) for op in range(100)]
    answers = [messages.FetchProgress(1, n) for n in range(100)]
    peer.send(*answers)
    assert caller.wait_for(100) == [(0, answer) for answer in answers]


def test_all_workers_share_one_thread_and_keep_their_numbers(make_listener, make_caller, opened):
    num_threads = threading.active_count()
    listeners = [make_listener() for _ in range(4)]
    caller = make_caller(*listeners)
    assert threading.active_count() == num_threads + 1
    peers = [listener.greet(worker_id=i) for i, listener in enumerate(listeners)]
    opened.extend(peers)
    assert sorted(caller.wait_for(4)) == [(i, ChannelUp(1)) for i in range(4)]
    caller.channels.send(2, messages.Cancel(7))
    assert peers[2].receive() == messages.Cancel(7)
    peers[3].send(messages.Drained())
    assert caller.wait_for(1) == [(3, messages.Drained())]


def test_nothing_is_sent_before_hello(make_listener, make_caller, opened):
    listener = make_listener()
    caller = make_caller(listener)
    assert not caller.channels.send(0, messages.Cancel(1))
    peer = listener.accept()
    opened.append(peer)
    assert not caller.channels.send(0, messages.Cancel(2))
    peer.send(messages.Hello(0, 1, 1, 1, TIMES))
    assert not caller.channels.is_up(0)
    caller.wait_for(1)
    assert caller.channels.is_up(0)
    assert caller.channels.send(0, messages.Cancel(3))
    assert peer.receive() == messages.Cancel(3)


def test_a_lost_process_is_down_then_up_with_its_new_incarnation(pair, opened):
    listener, caller, peer = pair
    peer.close()
    assert caller.wait_for(1) == [(0, ChannelDown())]
    assert not caller.channels.send(0, messages.Cancel(1))
    successor = listener.greet(incarnation=2)
    opened.append(successor)
    assert caller.wait_for(1) == [(0, ChannelUp(2))]
    assert caller.channels.send(0, messages.Cancel(2))
    assert successor.receive() == messages.Cancel(2)


def test_a_message_for_a_dead_process_never_reaches_its_successor(pair, opened):
    listener, caller, peer = pair
    peer.close()
    successor = listener.greet(incarnation=2)
    opened.append(successor)
    # The successor is up for the I/O thread, while the caller still believes in the dead one.
    successor.send(messages.Drained())
    end = time.monotonic() + 5
    while len(caller.channels._inbox) < 3 and time.monotonic() < end:
        time.sleep(0.001)
    assert not caller.channels.send(0, messages.Cancel(1))
    assert [event for _, event in caller.wait_for(3)] == [
        ChannelDown(),
        ChannelUp(2),
        messages.Drained(),
    ]
    assert caller.channels.send(0, messages.Cancel(2))
    assert successor.receive() == messages.Cancel(2)


def test_messages_before_a_loss_are_still_delivered_before_it(pair):
    _, caller, peer = pair
    peer.send(messages.FetchSettled(1, 2, "complete"), messages.FetchReleased(1))
    peer.close()
    assert [event for _, event in caller.wait_for(3)] == [
        messages.FetchSettled(1, 2, "complete"),
        messages.FetchReleased(1),
        ChannelDown(),
    ]


def test_connecting_goes_on_until_somebody_listens(make_listener, make_caller, opened):
    listener = make_listener()
    listener.socket.close()
    caller = make_caller(listener)
    time.sleep(0.03)
    listener.socket = listener.address.open_socket()
    opened.append(listener.socket)
    listener.socket.bind(listener.address.sockaddr)
    listener.socket.listen()
    listener.socket.settimeout(5)
    opened.append(listener.greet())
    assert caller.wait_for(1) == [(0, ChannelUp(1))]


def test_send_does_not_wait_for_a_process_that_reads_nothing(pair):
    _, caller, _ = pair
    pages = 20_000
    fetch = messages.Fetch(1, "n", bytes(32 * pages), bytes(4 * pages), 1.0)
    slowest = 0.0
    num_taken = 0
    for _ in range(300):
        started = time.monotonic()
        num_taken += caller.channels.send(0, fetch)
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.0005)
    assert slowest < 0.2
    assert 0 < num_taken < 300  # beyond a bound the channel refuses


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\x01\x00\x00\x00\xc1"])
def test_garbage_closes_the_channel(pair, garbage):
    _, caller, peer = pair
    peer.connection.sendall(garbage)
    assert caller.wait_for(1) == [(0, ChannelDown())]


def test_a_process_of_another_worker_is_not_accepted(make_listener, make_caller, opened):
    listener = make_listener()
    caller = make_caller(listener)
    opened.append(listener.greet(worker_id=5))
    opened.append(listener.greet(worker_id=0))
    assert caller.wait_for(1) == [(0, ChannelUp(1))]


def test_close_sends_what_was_queued_and_ends_the_thread(pair):
    _, caller, peer = pair
    num_threads = threading.active_count()
    sent = [messages.Fetch(op, "n", bytes(32_000), bytes(4_000), 1.0) for op in range(100)]
    with ThreadPoolExecutor(1) as pool:
        for message in sent:
            assert caller.channels.send(0, message)
        received = pool.submit(lambda: [peer.receive() for _ in sent])
        caller.channels.close()
        assert received.result() == sent
    assert threading.active_count() == num_threads - 1
    with pytest.raises(EOFError):
        peer.receive()


def test_close_does_not_wait_longer_than_told_for_a_process_that_reads_nothing(pair):
    _, caller, _ = pair
    for _ in range(10):
        caller.channels.send(0, messages.Fetch(1, "n", bytes(320_000), bytes(40_000), 1.0))
    started = time.monotonic()
    caller.channels.close(flush_s=0.05)
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("text", ["", "unix:/tmp/x", "unix:@", "tcp:host", "tcp::1", "udp:h:1"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="unix:@NAME#TOKEN"):
        StorageAddress.parse(text)


def test_an_address_in_a_log_has_no_token():
    address = StorageAddress.parse("unix:@hicache-1#secret")
    assert str(address) == "unix:@hicache-1#secret"
    assert address.without_token == "unix:@hicache-1"

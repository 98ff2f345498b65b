"""Backends made of blocking calls: what the base adds to them."""

import asyncio
import threading

import pytest

from vllm_hicache.errors import BackendUnavailable
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.blocking import BlockingBackend
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_reads_back,
    object_name,
    object_read,
    object_write,
)


class Shelf(BlockingBackend):
    """Objects in a dictionary, for as many as there is room; says no when it is locked."""

    name = "shelf"

    def __init__(self, url="shelf://?room=3"):
        super().__init__(url)
        self.objects = {}
        self.gate = threading.Event()
        self.gate.set()
        self.is_locked = False
        self.num_connected = 0

    def connect(self):
        self._enter()
        self.num_connected += 1

    def disconnect(self):
        self.num_connected -= 1

    def length(self, name):
        data = self.get(name)
        return None if data is None else len(data)

    def get(self, name):
        self._enter()
        return self.objects.get(name)

    def put(self, name, data):
        if len(self.objects) == int(self.query["room"]):
            return False
        self.objects[name] = data
        return True

    def remove(self, name):
        return self.objects.pop(name, None) is not None

    def names(self, part):
        return [name for name in self.objects if part in name]

    def _enter(self):
        self.gate.wait()
        if self.is_locked:
            raise OSError("the shelf is locked")


@pytest.fixture
async def shelf():
    backend = Shelf()
    await backend.open()
    yield backend
    backend.is_locked = False
    backend.gate.set()
    await backend.close()


async def test_query_of_the_url_is_for_the_subclass():
    assert Shelf.from_url("shelf://x?room=7&name=a%20b", None).query == {"room": "7", "name": "a b"}


async def test_no_room_is_an_outcome(shelf):
    writes = [object_write(number, 100) for number in range(4)]
    stored = [WriteOutcome.STORED] * 3
    assert await shelf.write(writes) == [*stored, WriteOutcome.FULL]
    assert await shelf.write(writes[:1]) == [WriteOutcome.EXISTS]
    assert shelf.stats()["objects_written"] == 3
    await assert_reads_back(shelf, *writes[:3])


async def test_what_a_store_raises_is_unavailable(shelf):
    shelf.is_locked = True
    calls = [
        shelf.contains([object_name(1)]),
        shelf.read([object_read(1, 10)]),
        shelf.write([object_write(1, 10)]),
    ]
    for call in calls:
        with pytest.raises(BackendUnavailable, match="the shelf is locked"):
            await call


async def test_other_errors_are_not_taken_for_an_absent_store(shelf):
    del shelf.query["room"]
    with pytest.raises(KeyError):
        await shelf.write([object_write(1, 10)])


async def test_clear_takes_one_namespace(shelf):
    await shelf.write([object_write(1, 10), object_write(1, 10, OTHER_NAMESPACE)])
    assert await shelf.clear(NAMESPACE) == 1
    assert await shelf.contains([object_name(1)]) == [False]
    assert await shelf.contains([object_name(1, OTHER_NAMESPACE)]) == [True]


async def test_a_call_that_hangs_is_told_and_its_buffers_are_left_alone(shelf):
    await shelf.write([object_write(1, 10)])
    assert shelf.oldest_running_s() == 0.0
    shelf.gate.clear()
    read = object_read(1, 10)
    call = asyncio.ensure_future(shelf.read([read]))
    while shelf.oldest_running_s() < 0.05:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    shelf.gate.set()
    assert await shelf.read([object_read(1, 10)]) == [ReadOutcome.OK]
    assert bytes(read.payload) == bytes(10)
    assert shelf.oldest_running_s() == 0.0


async def test_a_backend_that_could_not_open_closes():
    backend = Shelf()
    backend.is_locked = True
    with pytest.raises(BackendUnavailable, match="locked"):
        await backend.open()
    await backend.close()
    assert backend.num_connected == 0


async def test_closing_disconnects_once(shelf):
    await shelf.close()
    await shelf.close()
    assert shelf.num_connected == 0

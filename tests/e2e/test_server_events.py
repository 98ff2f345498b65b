"""A server as users start it: workers of its own, storage away at start, cache events published."""

from itertools import count

import msgspec
import pytest
import zmq
from live_server import (
    BLOCK,
    PAGE,
    LiveServer,
    faulty_url,
    free_port,
    prompt_of,
    serving,
    wait_until,
)
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from vllm_hicache.testing import Fault

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.vllm]

HOST_PAGES = 32
HOST_MEMORY = HOST_PAGES * PAGE * 4096  # 4,096 bytes for a token of the tiny model
BLOCKS_PER_PAGE = PAGE // BLOCK
MODULE = "vllm_hicache.connectors.hicache"


class Subscriber:
    """A router's view of the server: every event, in order."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.events: list[BlockStored | BlockRemoved] = []

    def read(self) -> None:
        while self._socket.poll(0):
            *_, payload = self._socket.recv_multipart()
            self.events += msgspec.msgpack.decode(payload, type=KVEventBatch).events

    def stored(self, medium: str) -> list[BlockStored]:
        self.read()
        return [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]

    def removed(self, medium: str) -> list[BlockRemoved]:
        self.read()
        return [e for e in self.events if isinstance(e, BlockRemoved) and e.medium == medium]

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(scope="module")
def live(tiny_llama, tmp_path_factory):
    """The server, what it publishes, and the faults of its storage: unreachable at start."""
    folder = tmp_path_factory.mktemp("events")
    url, faults = faulty_url(folder)
    faults.write(Fault(operation="open", fails=True))
    port = free_port()
    events = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}'
    extra = {"host_memory": HOST_MEMORY, "storage": url}
    transfer = {"kv_connector_module_path": MODULE}
    options = ["--kv-events-config", events]
    with serving(
        tiny_llama(), folder, extra, transfer=transfer, options=options, executor=None
    ) as server:
        subscriber = Subscriber(port)
        yield server, subscriber, faults
        subscriber.close()


@pytest.fixture
def server(live) -> LiveServer:
    return live[0]


@pytest.fixture
def subscriber(live) -> Subscriber:
    return live[1]


def _hashes(events: list[BlockStored] | list[BlockRemoved]) -> list[bytes | int]:
    return [block_hash for event in events for block_hash in event.block_hashes]


def test_storage_that_is_away_at_start_does_not_stop_the_start_and_joins_later(live):
    server, _, faults = live
    assert "storage does not answer; starting without it" in server.log() or (
        "Storage cannot be opened" in server.log()
    )
    prompt = prompt_of(1, 2 * PAGE + 1)
    control = server.complete(prompt)
    assert server.reset()
    again = server.complete(prompt)  # from host
    assert again.cached_tokens == 2 * PAGE
    assert again.tokens == control.tokens
    assert server.count("objects_written_total") == 0
    faults.write()
    wait_until(lambda: "Storage plugin://" in server.log(), timeout_s=60)

    def is_stored() -> bool:
        server.complete(prompt)
        return server.count("objects_written_total") >= 4

    # Pages that were saved while storage was away go there when they are used again.
    wait_until(is_stored)


def test_it_was_found_by_its_module_path_and_has_workers_of_its_own(server):
    log = server.log()
    assert MODULE in log
    assert "Creating v1 connector with name: HiCacheConnector" in log
    assert any("VLLM::Worker" in line for line in server.processes().values())


def _is_part(tokens: list[int], prompt: list[int]) -> bool:
    """Whether these are the tokens of whole blocks of the prompt, one after the other."""
    starts = range(0, len(prompt), BLOCK)
    return any(prompt[start : start + len(tokens)] == tokens for start in starts)


def test_events_of_host_and_storage_carry_the_block_hashes_of_vllm(server, subscriber):
    seeds = count(100)

    def is_connected() -> bool:
        server.complete(prompt_of(next(seeds), PAGE))
        return bool(subscriber.stored(MEDIUM_GPU))

    wait_until(is_connected)  # a subscriber misses what comes before
    subscriber.events.clear()
    num_pages = 3
    prompt = prompt_of(2, num_pages * PAGE + BLOCK + 1)
    server.complete(prompt)

    def stored(medium: str) -> list[BlockStored]:
        # What is still said of the prompts before it does not count.
        return [e for e in subscriber.stored(medium) if _is_part(e.token_ids, prompt)]

    def is_announced() -> bool:
        server.nudge()
        return len(_hashes(stored(MEDIUM_STORAGE))) >= num_pages * BLOCKS_PER_PAGE

    wait_until(is_announced)
    of_device = _hashes(stored(MEDIUM_GPU))
    assert len(of_device) == num_pages * BLOCKS_PER_PAGE + 1  # the last block fills no page
    of_pages = of_device[:-1]
    for medium in (MEDIUM_CPU, MEDIUM_STORAGE):
        events = stored(medium)
        assert _hashes(events) == of_pages
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == prompt[: num_pages * PAGE]
        assert events[0].parent_block_hash is None
        assert {event.block_size for event in events} == {BLOCK}


def test_eviction_from_host_is_announced_and_storage_keeps_the_page(server, subscriber):
    prompt = prompt_of(3, 4 * PAGE)
    server.complete(prompt)
    wait_until(lambda: len(_hashes(subscriber.stored(MEDIUM_CPU))) >= 4 * BLOCKS_PER_PAGE)
    of_device = subscriber.stored(MEDIUM_GPU)
    mine = set(_hashes([e for e in of_device if e.token_ids == prompt[: len(e.token_ids)]]))
    assert len(mine) == 4 * BLOCKS_PER_PAGE
    subscriber.events.clear()
    for seed in range(200, 200 + HOST_PAGES // 8 + 2):
        server.complete(prompt_of(seed, 8 * PAGE))
    wait_until(lambda: mine <= set(_hashes(subscriber.removed(MEDIUM_CPU))))
    assert not mine & set(_hashes(subscriber.removed(MEDIUM_STORAGE)))
    assert server.count("evicted_tokens_total") >= 4 * PAGE
    assert server.reset()
    assert server.complete(prompt).cached_tokens == 3 * PAGE + BLOCK  # from storage again
    subscriber.read()
    again = set(_hashes(subscriber.stored(MEDIUM_CPU)))
    assert again >= mine


def test_a_reset_with_reset_external_takes_host_and_storage_back(server, subscriber):
    prompt = prompt_of(4, 2 * PAGE + 1)
    server.complete(prompt)
    server.wait_until_stored(1)
    subscriber.read()
    subscriber.events.clear()
    assert server.reset("?reset_external=true")
    server.nudge()
    wait_until(lambda: subscriber.removed(MEDIUM_STORAGE))
    assert subscriber.removed(MEDIUM_CPU)
    # Storage is used under a new epoch: what was there is not found.
    assert server.complete(prompt).cached_tokens == 0


def test_it_ends_in_ten_seconds_and_leaves_nothing(server):
    assert len(server.storage_pids()) == 1
    assert server.left_shared_memory()  # vLLM's own queues to the worker
    assert server.terminate() < 10.0
    wait_until(lambda: not server.left_shared_memory())

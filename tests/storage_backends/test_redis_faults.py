"""Redis that is away, slow, full, frozen or forbidden: bounded answers, and recovery by itself."""

import asyncio
import time

import pytest
from proxies import Proxy, server_tls
from redis_under_test import RedisProcess, backend_of, opened, running

from vllm_hicache.errors import BackendTimeout, BackendUnavailable, ConfigError
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import HEADER_BYTES, FetchOutcome, ReadOutcome, ShardObject, WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    assert_reads_back,
    object_name,
    object_read,
    object_write,
)
from vllm_hicache.storage_backends.envelope import CheckedStorage

pytestmark = pytest.mark.services

MIB = 1 << 20
PASSWORD = "swordfish"


@pytest.fixture
def server(tmp_path):
    with running(tmp_path / "server") as server:
        yield server


def key_of(number: int) -> str:
    """Key of an object, as docs/storage-services.md gives it."""
    page_hash, _, rest = object_name(number).partition("_")
    return f"hicache:{{{page_hash}}}_{rest}"


async def test_key_is_as_documented(server):
    async with opened(server.url) as backend:
        await backend.write([object_write(1, 10)])
    assert server.run("KEYS", "*") == [key_of(1).encode()]


# away


async def test_server_that_starts_later_can_be_opened_later(tmp_path):
    server = RedisProcess(tmp_path / "server")
    backend = backend_of(server.url)
    with pytest.raises(BackendUnavailable, match=r"connect at Redis 127\.0\.0\.1"):
        await backend.open()
    with running_again(server):
        await backend.open()
        assert await backend.contains([object_name(1)]) == [False]
        await backend.close()


class running_again:  # noqa: N801 - reads like `running`
    """A server that a test made itself."""

    def __init__(self, server: RedisProcess) -> None:
        self._server = server

    def __enter__(self) -> RedisProcess:
        return self._server.start()

    def __exit__(self, *_: object) -> None:
        self._server.kill()


async def test_killed_server_fails_at_once_and_serves_again_when_restarted(server):
    async with opened(server.url) as backend:
        write = object_write(1, MIB)
        await backend.write([write])
        server.kill()
        started = time.monotonic()
        for call in (
            backend.contains([write.name]),
            backend.read([object_read(1, MIB)]),
            backend.write([write]),
            backend.delete([write.name]),
            backend.clear(NAMESPACE),
        ):
            with pytest.raises(BackendUnavailable):
                await call
        assert time.monotonic() - started < 2
        assert backend.stats()["read_errors"] == backend.stats()["write_errors"] == 1
        server.start()
        assert await backend.write([write]) == [WriteOutcome.STORED]
        await assert_reads_back(backend, write)


async def test_restart_between_two_calls_is_not_noticed(server):
    async with opened(server.url) as backend:
        await backend.write([object_write(1, 10)])
        server.kill()
        server.start()
        assert await backend.write([object_write(1, 10)]) == [WriteOutcome.STORED]
        assert await backend.contains([object_name(1)]) == [True]


async def test_server_killed_while_sending_a_value_is_unavailable(server):
    async with opened(server.url) as backend:
        await backend.write([object_write(1, 64 * MIB)])
        reading = asyncio.ensure_future(backend.read([object_read(1, 64 * MIB)]))
        await asyncio.sleep(0.005)
        server.kill()
        with pytest.raises(BackendUnavailable):
            await reading


async def test_nobody_at_the_port_is_no_configuration_error_but_a_bad_name_neither():
    with pytest.raises(BackendUnavailable):
        await backend_of("redis://no-such-host.invalid", connect_timeout_s=2).open()


# frozen and slow


async def test_frozen_server_costs_the_deadline_and_no_more(server):
    async with opened(server.url, operation_timeout_s=0.3) as backend:
        write = object_write(1, MIB)
        await backend.write([write])
        with server.frozen():
            started = time.monotonic()
            read = object_read(1, MIB)
            for call in (backend.read([read]), backend.write([object_write(2, 8 * MIB)])):
                with pytest.raises(BackendTimeout, match=r"took more than 0\.3 s"):
                    await call
            assert backend.oldest_running_s() == 0.0
            assert time.monotonic() - started < 2
        await assert_reads_back(backend, write)
        assert read.payload == bytes(MIB)


async def test_cancelled_read_of_a_frozen_server_never_writes_to_its_buffers(server):
    async with opened(server.url) as backend:
        await backend.write([object_write(1, 4 * MIB)])
        with server.frozen():
            read = object_read(1, 4 * MIB)
            reading = asyncio.ensure_future(backend.read([read]))
            await asyncio.sleep(0.02)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        await asyncio.sleep(0.05)
        assert read.header == bytes(HEADER_BYTES)
        assert read.payload == bytes(4 * MIB)


async def test_write_that_was_cancelled_half_way_stores_nothing(server):
    async with opened(server.url) as backend:
        with server.frozen():
            writing = asyncio.ensure_future(backend.write([object_write(1, 64 * MIB)]))
            await asyncio.sleep(0.02)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        assert await backend.contains([object_name(1)]) == [False]


async def test_question_that_outlives_its_call_keeps_its_connection(server):
    with Proxy(server.port) as proxy:
        async with opened(f"redis://127.0.0.1:{proxy.port}") as backend:
            before = backend.stats()["connections_opened"]
            proxy.delay_s = 0.05
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(backend.contains([object_name(1)]), 0.02)
            proxy.delay_s = 0.0
            assert await backend.contains([object_name(1)]) == [False]
            assert backend.stats()["connections_opened"] <= before + 3
            assert backend.stats()["connections_opened"] == backend.stats()["connections_now"]


async def test_questions_to_a_frozen_server_use_a_bounded_number_of_connections(server):
    async with opened(server.url, operation_timeout_s=0.3) as backend:
        with server.frozen():
            for _ in range(10):
                calls = [backend.contains([object_name(n)]) for n in range(10)]
                answers = asyncio.gather(*calls, return_exceptions=True)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(answers, 0.005)
            assert backend.stats()["connections_now"] <= 8
            await asyncio.sleep(0.35)
        assert await backend.contains([object_name(1)]) == [False]


async def test_latency_is_paid_per_batch_and_not_per_object(server):
    with Proxy(server.port) as proxy:
        async with opened(f"redis://127.0.0.1:{proxy.port}") as backend:
            writes = [object_write(n, 1000) for n in range(64)]
            await backend.contains([object_name(0)])
            proxy.delay_s = 0.05  # 0.1 s there and back
            started = time.monotonic()
            assert await backend.write(writes) == [WriteOutcome.STORED] * 64
            await assert_reads_back(backend, *writes)
            assert all(await backend.contains([write.name for write in writes]))
            assert 0.4 <= time.monotonic() - started < 1.2


async def test_many_calls_share_a_bounded_number_of_connections(server):
    async with opened(server.url, read_concurrency=3, write_concurrency=2) as backend:
        writes = [object_write(n, 100_000) for n in range(40)]
        await asyncio.gather(*(backend.write([write]) for write in writes))
        await asyncio.gather(*(assert_reads_back(backend, write) for write in writes))
        assert backend.stats()["connections_opened"] <= 3


# full and read-only


async def test_full_server_refuses_writes_and_serves_reads(tmp_path):
    options = ("--maxmemory", "10mb", "--maxmemory-policy", "noeviction")
    with running(tmp_path / "server", *options) as server:
        async with opened(server.url) as backend:
            writes = [object_write(n, MIB) for n in range(24)]
            outcomes = [outcome for w in writes for outcome in await backend.write([w])]
            stored = [w for w, o in zip(writes, outcomes, strict=True) if o is WriteOutcome.STORED]
            assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.FULL}
            assert backend.stats()["writes_refused"] == outcomes.count(WriteOutcome.FULL)
            assert backend.stats()["write_errors"] == 0
            await assert_reads_back(backend, *stored)
            assert await backend.write(stored) == [WriteOutcome.EXISTS] * len(stored)
            assert await backend.delete([w.name for w in stored]) == len(stored)
            assert await backend.write(writes[-1:]) == [WriteOutcome.STORED]


async def test_one_batch_may_fit_in_part(tmp_path):
    options = ("--maxmemory", "10mb", "--maxmemory-policy", "noeviction")
    with running(tmp_path / "server", *options) as server:
        async with opened(server.url) as backend:
            outcomes = await backend.write([object_write(n, MIB) for n in range(24)])
            assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.FULL}


async def test_evicting_server_never_fills_and_lost_objects_are_missing(tmp_path):
    options = ("--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru")
    with running(tmp_path / "server", *options) as server:
        async with opened(server.url) as backend:
            writes = [object_write(n, MIB) for n in range(24)]
            for write in writes:
                assert await backend.write([write]) == [WriteOutcome.STORED]
            there = await backend.contains([write.name for write in writes])
            assert 0 < sum(there) < 12
            outcomes = await backend.read([object_read(n, MIB) for n in range(24)])
            # Reading takes memory as well, and may evict one more.
            assert set(outcomes) == {ReadOutcome.OK, ReadOutcome.MISSING}
            assert all(there[n] for n, o in enumerate(outcomes) if o is ReadOutcome.OK)


async def test_replica_serves_reads_and_refuses_writes(server):
    async with opened(server.url) as backend:
        await backend.write([object_write(1, 10)])
        server.run("REPLICAOF", "127.0.0.1", "1")
        assert await backend.write([object_write(2, 10)]) == [WriteOutcome.FULL]
        await assert_reads_back(backend, object_write(1, 10))
        server.run("REPLICAOF", "NO", "ONE")
        assert await backend.write([object_write(2, 10)]) == [WriteOutcome.STORED]


async def test_read_only_server_can_be_opened(server, caplog):
    server.run("REPLICAOF", "127.0.0.1", "1")
    async with opened(server.url):
        assert "takes no writes now: READONLY" in caplog.text


async def test_loading_server_is_unavailable_until_it_is_loaded(tmp_path):
    with running(tmp_path / "server") as server:
        async with opened(server.url) as backend:
            await backend.write([object_write(n, 1000) for n in range(200)])
        server.run("SAVE")
        server.kill()
        slow = ("--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024")
        server.start(*slow, "--dbfilename", "dump.rdb", wait=False)
        backend = backend_of(server.url)
        answers = set()
        for _ in range(500):
            try:
                await backend.open()
            except BackendUnavailable as error:
                answers.add("LOADING" if "loading" in str(error).lower() else "refused")
                await asyncio.sleep(0.01)
            else:
                break
        assert "LOADING" in answers
        await assert_reads_back(backend, object_write(7, 1000))
        await backend.close()


async def test_server_that_grows_without_bound_is_warned_about(server, caplog):
    async with opened(server.url):
        assert "it grows without bound" in caplog.text
    caplog.clear()
    async with opened(server.url, ttl_s="1d"):
        assert caplog.text == ""
    server.run("CONFIG", "SET", "maxmemory", "100mb")
    async with opened(server.url):
        assert "allkeys-lru lets the oldest go" in caplog.text


# forbidden


@pytest.mark.parametrize(
    "login",
    ["", f":{PASSWORD}x@", f"hicache:{PASSWORD}x@", f"nobody:{PASSWORD}@"],
    ids=["none", "wrong", "user", "unknown"],
)
async def test_wrong_password_refuses_the_start_without_showing_it(tmp_path, login):
    with running(tmp_path / "server", "--requirepass", PASSWORD) as server:
        with pytest.raises(ConfigError) as refusal:
            await backend_of(f"redis://{login}127.0.0.1:{server.port}").open()
        assert f"127.0.0.1:{server.port}" in str(refusal.value)
        assert PASSWORD not in str(refusal.value)


async def test_password_may_come_from_its_own_option(tmp_path):
    with running(tmp_path / "server", "--requirepass", PASSWORD) as server:
        async with opened(server.url, password=PASSWORD) as backend:
            assert await backend.contains([object_name(1)]) == [False]
        async with opened(server.url, username="default", password=PASSWORD):
            pass


@pytest.mark.parametrize("verb", ["get", "set", "strlen", "unlink", "scan", "expire"])
async def test_missing_permission_refuses_the_start_by_name(server, verb):
    rules = ("on", f">{PASSWORD}", "~*", "+@all", f"-{verb}")
    server.run("ACL", "SETUSER", "hicache", *rules)
    url = f"redis://hicache:{PASSWORD}@127.0.0.1:{server.port}"
    with pytest.raises(ConfigError, match=f"refuses {verb.upper()} on keys"):
        await backend_of(url, ttl_s=60).open()


async def test_keys_of_another_prefix_refuse_the_start(server):
    server.run("ACL", "SETUSER", "hicache", "on", f">{PASSWORD}", "~other:*", "+@all")
    url = f"redis://hicache:{PASSWORD}@127.0.0.1:{server.port}"
    with pytest.raises(ConfigError, match="on keys that begin with hicache:"):
        await backend_of(url).open()
    async with opened(url, key_prefix="other:"):
        pass


async def test_password_that_changes_at_run_time_makes_the_store_unavailable(server):
    async with opened(server.url) as backend:
        server.run("CONFIG", "SET", "requirepass", PASSWORD)
        with server.client(password=PASSWORD) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(BackendUnavailable):
            await backend.read([object_read(1, 10)])


async def test_database_that_does_not_exist_refuses_the_start(server):
    with pytest.raises(ConfigError, match="out of range"):
        await backend_of(f"{server.url}/99").open()


async def test_certificate_of_a_stranger_refuses_the_start(server, tmp_path):
    context, authority = server_tls(tmp_path)
    with Proxy(server.port, tls=context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            await backend_of(url).open()
        async with opened(url, ca_file=str(authority)):
            pass


async def test_server_without_tls_is_unavailable_over_tls(server):
    with pytest.raises(BackendUnavailable):
        await backend_of(f"rediss://127.0.0.1:{server.port}", connect_timeout_s=1).open()


# damaged and lost objects


async def test_object_evicted_after_the_question_is_missing(server):
    async with opened(server.url) as backend:
        await backend.write([object_write(1, 10)])
        assert await backend.contains([object_name(1)]) == [True]
        server.run("DEL", key_of(1))
        assert await backend.read([object_read(1, 10)]) == [ReadOutcome.MISSING]


@pytest.mark.parametrize(
    "damage",
    [("SET", "short"), ("SET", "x" * 9000), ("APPEND", "x"), ("RPUSH", "x"), ("SETRANGE", 5000)],
    ids=["cut", "long", "grown", "list", "changed"],
)
async def test_damaged_value_is_a_miss_and_is_removed(server, damage):
    verb, value = damage
    item = ShardObject(
        object_name(1),
        NAMESPACE,
        bytes(32),
        Shard(LayerSpan(0, 8), 0, 0, 3000),
        memoryview(bytearray(3000)),
    )
    async with opened(server.url) as backend:
        storage = CheckedStorage(backend)
        await storage.persist([item])
        assert await storage.fetch([item]) == [FetchOutcome.OK]
        if verb == "RPUSH":
            server.run("DEL", key_of(1))
        server.run(verb, key_of(1), *((value, "x") if verb == "SETRANGE" else (value,)))
        assert await storage.fetch([item]) == [FetchOutcome.CORRUPT]
        assert await storage.fetch([item]) == [FetchOutcome.MISSING]
        assert storage.stats()["corrupt_objects"] == 1
        await storage.close()


async def test_key_of_another_type_is_no_object_and_is_replaced(server):
    server.run("RPUSH", key_of(1), "x")
    async with opened(server.url) as backend:
        assert await backend.contains([object_name(1)]) == [False]
        assert await backend.read([object_read(1, 10)]) == [ReadOutcome.BAD_LENGTH]
        assert await backend.write([object_write(1, 10)]) == [WriteOutcome.STORED]
        await assert_reads_back(backend, object_write(1, 10))


async def test_time_to_live_starts_anew_with_every_read_and_write(server):
    async with opened(server.url, ttl_s=100) as backend:

        def left() -> int:
            return server.run("TTL", key_of(1))

        for renew in (
            backend.write([object_write(1, 10)]),
            backend.write([object_write(1, 10)]),
            backend.read([object_read(1, 10)]),
        ):
            server.run("EXPIRE", key_of(1), 5)
            await renew
            assert 90 < left() <= 100


async def test_object_goes_after_its_time(server):
    async with opened(server.url, ttl_s=1) as backend:
        await backend.write([object_write(1, 10)])
        server.run("PEXPIRE", key_of(1), 1)
        await asyncio.sleep(0.01)
        assert await backend.contains([object_name(1)]) == [False]


async def test_clear_of_many_keys_goes_in_steps_and_spares_others(server):
    async with opened(server.url) as backend, opened(server.url, key_prefix="other:") as other:
        await backend.write([object_write(n, 1) for n in range(3000)])
        await other.write([object_write(1, 1)])
        server.run("SET", "theirs", "1")
        server.run("CONFIG", "RESETSTAT")
        assert await backend.clear(NAMESPACE) == 3000
        stats = server.run("INFO", "commandstats")
        assert stats["cmdstat_scan"]["calls"] >= 3
        assert await other.contains([object_name(1)]) == [True]
        assert server.run("GET", "theirs") == b"1"


async def test_closed_backend_refuses_calls(server):
    backend = backend_of(server.url)
    await backend.open()
    await backend.close()
    with pytest.raises(BackendUnavailable, match="it is closed"):
        await backend.contains([object_name(1)])

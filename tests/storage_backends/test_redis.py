"""The Redis backend passes what every backend must, on every kind of server and connection."""

from pathlib import Path

import pytest
from proxies import Proxy, server_tls
from redis_under_test import ACL_RULES, REDIS, backend_of, running, running_cluster

from vllm_hicache.storage_backends.conformance import StorageBackendTests
from vllm_hicache.storage_backends.conformance_run import writer_program
from vllm_hicache.storage_backends.redis import RedisBackend

pytestmark = pytest.mark.services

PASSWORD = "swordfish"


class RedisTests(StorageBackendTests):
    """Each test has a prefix of its own; subclasses say where the server is."""

    storage: dict

    def _storage(self, place: Path) -> dict:
        return {**self.storage, "key_prefix": f"{place.name}[*]:", "operation_timeout_s": 30}

    def open_for_test(self, place: Path) -> RedisBackend:
        return backend_of(**self._storage(place))

    def writer_program(self, place: Path) -> str:
        return writer_program(self._storage(place), self.large_bytes)


class MoreRedisTests(RedisTests):
    """The same, where the slowest test is left to the full run."""

    @pytest.mark.full
    async def test_writer_killed_while_writing_leaves_all_or_nothing(self, tmp_path):
        await super().test_writer_killed_while_writing_leaves_all_or_nothing(tmp_path)


class TestTcp(RedisTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with running(tmp_path_factory.mktemp("valkey")) as server:
            cls.storage = {"url": server.url}
            yield


class TestUnixSocketOfRedis6WithTimeToLive(MoreRedisTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with running(tmp_path_factory.mktemp("redis"), kind=REDIS) as server:
            cls.storage = {"url": f"redis+unix://{server.socket}?db=3", "ttl_s": "1h"}
            yield


class TestUserOverTls(MoreRedisTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("tls")
        context, authority = server_tls(folder)
        options = ("--requirepass", "other-" + PASSWORD)
        with running(folder, *options) as server, Proxy(server.port, tls=context) as proxy:
            with server.client(password="other-" + PASSWORD) as client:
                client.execute_command(
                    "ACL", "SETUSER", "hicache", "on", f">{PASSWORD}", "~test_*", *ACL_RULES
                )
            cls.storage = {
                "url": f"rediss://hicache:{PASSWORD}@127.0.0.1:{proxy.port}",
                "ca_file": str(authority),
            }
            yield


class TestCluster(MoreRedisTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def servers(cls, tmp_path_factory):
        with running_cluster(tmp_path_factory.mktemp("cluster")) as servers:
            cls.storage = {"url": f"redis+cluster://127.0.0.1:{servers[1].port}"}
            yield

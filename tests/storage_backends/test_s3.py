"""The S3 backend on real servers: conformance, large objects, what lies in the bucket."""

import asyncio

import pytest
import s3_servers
from s3_servers import backend_at

from vllm_hicache.errors import BackendUnavailable, ConfigError
from vllm_hicache.storage import WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    OTHER_NAMESPACE,
    StorageBackendTests,
    assert_reads_back,
    object_write,
)
from vllm_hicache.storage_backends.conformance_run import writer_program

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("s3_credentials")]

MIB = 1024 * 1024


class TestS3OnSeaweedFs(StorageBackendTests):
    large_bytes = 20 * MIB  # two parts

    @pytest.fixture(autouse=True)
    def server(self, seaweedfs_server):
        self.s3 = seaweedfs_server

    def open_for_test(self, place):
        return backend_at(self.s3.url(place), operation_timeout_s=60)  # machines may be busy

    def writer_program(self, place):
        return writer_program(self.s3.url(place), self.large_bytes)


@pytest.mark.full
class TestS3OnSeaweedFsWithLargeObjects(TestS3OnSeaweedFs):
    large_bytes = 64 * MIB


@pytest.mark.full
class TestS3OnMoto(StorageBackendTests):
    large_bytes = 24 * MIB

    @pytest.fixture(autouse=True)
    def server(self, moto_server):
        self.s3 = moto_server

    def open_for_test(self, place):
        return backend_at(self.s3.url(place), operation_timeout_s=60)  # machines may be busy

    def writer_program(self, place):
        return writer_program(self.s3.url(place), self.large_bytes)


async def refusal(url: str) -> str:
    backend = backend_at(url)
    with pytest.raises(ConfigError) as refused:
        await backend.open()
    await backend.close()
    return str(refused.value)


async def test_wrong_secret_is_refused_at_start_with_the_servers_reason(
    seaweedfs_server, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    message = await refusal(seaweedfs_server.url(tmp_path))
    assert "status 403, SignatureDoesNotMatch" in message
    assert "s3:ListBucket" in message
    assert "wrong-secret" not in message


async def test_missing_bucket_is_refused_at_start(seaweedfs_server):
    message = await refusal(f"s3://no-such-bucket?endpoint_url={seaweedfs_server.endpoint_url}")
    assert "S3 storage cannot use bucket 'no-such-bucket': status 404, NoSuchBucket" in message
    assert "s3:ListBucket" not in message


async def test_missing_credentials_are_refused_at_start(seaweedfs_server, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    message = await refusal(seaweedfs_server.url(tmp_path))
    assert "S3 storage has no credentials" in message


async def test_unknown_profile_is_refused_at_start(seaweedfs_server, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "nobody" in await refusal(seaweedfs_server.url(tmp_path))


async def test_server_that_is_down_at_start_may_come_up_later(seaweedfs_server, tmp_path):
    (port,) = s3_servers.free_ports(1)
    target_port = int(seaweedfs_server.endpoint_url.rpartition(":")[2])
    backend = backend_at(seaweedfs_server.url(tmp_path, f"http://127.0.0.1:{port}"))
    with pytest.raises(BackendUnavailable, match="open in bucket"):
        await backend.open()
    with pytest.raises(BackendUnavailable, match="not open"):
        await backend.contains([object_write(1, 10).name])

    async def relay(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
        pumps = [
            asyncio.create_task(pump(reader, far_writer)),
            asyncio.create_task(pump(far_reader, writer)),
        ]
        await asyncio.wait(pumps)

    async def pump(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", port):
        await backend.open()
        write = object_write(1, 10)
        assert await backend.write([write]) == [WriteOutcome.STORED]
        await assert_reads_back(backend, write)
        await backend.close()


async def test_keys_lie_below_their_namespace(seaweedfs_server, tmp_path):
    backend = backend_at(seaweedfs_server.url(tmp_path))
    await backend.open()
    writes = [object_write(1, 10), object_write(1, 10, OTHER_NAMESPACE)]
    await backend.write(writes)
    await backend.close()
    prefix = s3_servers.prefix_of(tmp_path)
    listed = seaweedfs_server.client().list_objects_v2(Bucket=s3_servers.BUCKET, Prefix=prefix)
    assert [item["Key"] for item in listed["Contents"]] == [
        f"{prefix}/{NAMESPACE}/{writes[0].name[:2]}/{writes[0].name}",
        f"{prefix}/{OTHER_NAMESPACE}/{writes[1].name[:2]}/{writes[1].name}",
    ]


async def test_clear_takes_as_many_lists_as_it_needs(seaweedfs_server, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_hicache.storage_backends.s3._DELETE_BATCH", 10)
    backend = backend_at(seaweedfs_server.url(tmp_path))
    await backend.open()
    await backend.write([object_write(number, 10) for number in range(25)])
    assert await backend.clear(NAMESPACE) == 25
    assert backend.stats()["objects_deleted"] == 25
    await backend.close()


async def test_large_object_is_written_in_parts(seaweedfs_server, tmp_path):
    backend = backend_at(seaweedfs_server.url(tmp_path), part_size="5MiB")
    await backend.open()
    write = object_write(1, 12 * MIB)
    assert await backend.write([write]) == [WriteOutcome.STORED]
    assert await backend.write([write]) == [WriteOutcome.EXISTS]
    await assert_reads_back(backend, write)
    await backend.close()
    key = f"{s3_servers.prefix_of(tmp_path)}/{NAMESPACE}/{write.name[:2]}/{write.name}"
    found = seaweedfs_server.client().head_object(Bucket=s3_servers.BUCKET, Key=key)
    assert found["ETag"].endswith('-3"')


@pytest.mark.parametrize("encryption", [{}, {"encryption": "AES256"}])
def test_key_without_its_kind_of_encryption_is_refused(encryption):
    with pytest.raises(ConfigError, match=r"storage\.kms_key needs storage\.encryption"):
        backend_at("s3://bucket", kms_key="alias/hicache", **encryption)

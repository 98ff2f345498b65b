"""S3 through obstore: the same promises as through aiobotocore, and the same objects."""

import asyncio
import time

import pytest
from s3_faults import Fault
from s3_servers import backend_at

from vllm_hicache.errors import BackendError, BackendUnavailable, ConfigError
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    StorageBackendTests,
    assert_reads_back,
    object_read,
    object_write,
)
from vllm_hicache.storage_backends.conformance_run import writer_program

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("s3_credentials")]

MIB = 1024 * 1024


@pytest.mark.full  # the default client runs the suite at every push
class TestObstoreOnSeaweedFs(StorageBackendTests):
    large_bytes = 20 * MIB  # two parts

    @pytest.fixture(autouse=True)
    def server(self, seaweedfs_server):
        self.s3 = seaweedfs_server

    def open_for_test(self, place):
        return backend_at(f"{self.s3.url(place)}&client=obstore", operation_timeout_s=60)

    def writer_program(self, place):
        url = f"{self.s3.url(place)}&client=obstore"
        return writer_program(url, self.large_bytes)


@pytest.fixture
async def both(seaweedfs_server, tmp_path):
    """Two backends of one place, by their client."""
    # A prefix with every kind of character that one may have.
    url = seaweedfs_server.url(tmp_path).replace("?", "/a!_.*'()=+@:,-b?")
    backends = [backend_at(f"{url}&client={client}") for client in ("aiobotocore", "obstore")]
    for backend in backends:
        await backend.open()
    yield backends
    for backend in backends:
        await backend.close()


@pytest.mark.parametrize("num_bytes", [1000, 20 * MIB])
async def test_both_clients_read_what_the_other_one_wrote(both, num_bytes):
    for number, (writer, reader) in enumerate([both, both[::-1]], 1):
        write = object_write(number, num_bytes)
        assert await reader.write([write]) == [WriteOutcome.STORED]
        assert await writer.write([write]) == [WriteOutcome.EXISTS]
        await assert_reads_back(writer, write)


async def test_an_object_of_another_length_is_not_read(both):
    slow, fast = both
    await slow.write([object_write(1, 5000)])
    for wanted in (100, 4999, 5001, 20 * MIB):
        assert await fast.read([object_read(1, wanted)]) == [ReadOutcome.BAD_LENGTH]


@pytest.fixture
async def backend(s3, moto_server, tmp_path):
    """Through a proxy whose faults the test chooses."""
    url = f"{moto_server.url(tmp_path, s3.endpoint_url)}&client=obstore"
    opened = backend_at(url, operation_timeout_s=2.0)
    await opened.open()
    s3.heal()
    yield opened
    await opened.close()


async def test_forbidden_reads_are_explained_once_and_make_storage_unavailable(s3, backend, caplog):
    await backend.write([object_write(1, 1000)])
    s3.fail(Fault(status=403, code="AccessDenied"), "GET")
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="AccessDenied"):
            await backend.read([object_read(1, 1000)])
    assert len([r for r in caplog.records if "s3:GetObject" in r.getMessage()]) == 1
    assert backend.stats()["read_errors"] == 2
    s3.heal()
    assert await backend.read([object_read(1, 1000)]) == [ReadOutcome.OK]


@pytest.mark.parametrize(
    "fault",
    [Fault(403, "AccessDenied"), Fault(507), Fault(400, "QuotaExceeded")],
    ids=lambda fault: str(fault.status),
)
async def test_refused_write_is_full_and_reads_go_on(s3, backend, fault):
    await backend.write([object_write(1, 1000)])
    s3.fail(fault, "PUT")
    assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.FULL]
    assert backend.stats()["writes_refused"] == 1
    assert await backend.read([object_read(1, 1000)]) == [ReadOutcome.OK]


@pytest.mark.parametrize("status", [500, 503])
async def test_errors_of_the_server_are_tried_again_and_then_unavailable(s3, backend, status):
    await backend.write([object_write(1, 1000)])
    s3.fail(Fault(status=status, code="InternalError"), "GET")
    with pytest.raises(BackendError):
        await backend.read([object_read(1, 1000)])
    assert s3.methods().count("GET") == 3
    s3.heal()
    assert await backend.read([object_read(1, 1000)]) == [ReadOutcome.OK]


async def test_a_stalled_answer_ends_at_the_deadline_and_touches_nothing_later(s3, backend):
    await backend.write([object_write(1, 1000)])
    s3.fail(Fault(stall_s=4.0), "GET")
    read = object_read(1, 1000)
    started = time.monotonic()
    with pytest.raises(BackendError):
        await backend.read([read])
    assert time.monotonic() - started < 3.0
    before = bytes(read.header) + bytes(read.payload)
    await asyncio.sleep(2.5)  # the answer comes, and nobody takes it
    assert bytes(read.header) + bytes(read.payload) == before


def test_another_client_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="client of an S3 storage URL must be aiobotocore or"):
        backend_at("s3://bucket?client=boto3")

"""The S3 backend when its server misbehaves: refusals, errors, stalls, cut connections."""

import asyncio
import logging
import time

import pytest
import s3_servers
from botocore.retries.standard import ExponentialBackoff
from s3_faults import Fault
from s3_servers import backend_at

from vllm_hicache.errors import BackendTimeout, BackendUnavailable
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    assert_reads_back,
    object_name,
    object_read,
    object_write,
)

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("s3_credentials")]

MIB = 1024 * 1024
SLOW_DOWN = Fault(status=503, code="SlowDown")
DENIED = Fault(status=403, code="AccessDenied")


@pytest.fixture(autouse=True)
def delays(monkeypatch):
    """The waits before further tries that the client chose, which last a hundredth of that."""
    chosen = []
    delay_amount = ExponentialBackoff.delay_amount

    def shortened(backoff, context):
        chosen.append(delay_amount(backoff, context))
        return chosen[-1] / 100

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", shortened)
    return chosen


@pytest.fixture
async def opened(s3, moto_server, tmp_path):
    """Opens a backend that talks through the proxy, which has forgotten the start then."""
    backends = []

    async def open_it(**options):
        url = moto_server.url(tmp_path, s3.endpoint_url)
        table = {"url": url, "exists_timeout_s": 0.05, **options}
        backends.append(backend_at(**table))
        await backends[-1].open()
        s3.heal()
        return backends[-1]

    yield open_it
    for backend in backends:
        await backend.close()


async def read_one(backend, number=1, num_bytes=1000):
    (outcome,) = await backend.read([object_read(number, num_bytes)])
    return outcome


async def test_start_asks_for_the_bucket_and_lists_nothing(s3, moto_server, tmp_path):
    backend = backend_at(moto_server.url(tmp_path, s3.endpoint_url))
    await backend.open()
    assert s3.methods() == ["HEAD"]
    await backend.close()


async def test_forbidden_reads_are_explained_once_and_make_storage_unavailable(s3, opened, caplog):
    backend = await opened()
    await backend.write([object_write(1, 1000)])
    s3.fail(DENIED, "GET")
    for _ in range(3):
        with pytest.raises(BackendUnavailable, match="AccessDenied: as told"):
            await read_one(backend)
    explained = [record for record in caplog.records if "s3:GetObject" in record.getMessage()]
    assert len(explained) == 1
    assert "status 403" in explained[0].getMessage()
    assert backend.stats()["read_errors"] == 3
    s3.heal()
    assert await read_one(backend) is ReadOutcome.OK


@pytest.mark.parametrize(
    "fault", [DENIED, Fault(507), Fault(400, "QuotaExceeded")], ids=lambda fault: str(fault.status)
)
async def test_refused_write_is_full_and_reads_go_on(s3, opened, fault):
    backend = await opened()
    await backend.write([object_write(1, 1000)])
    s3.fail(fault, "PUT")
    assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.FULL]
    assert backend.stats()["writes_refused"] == 1
    assert await read_one(backend) is ReadOutcome.OK
    s3.heal()
    assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.STORED]


async def test_object_that_somebody_removed_is_a_miss_and_is_stored_again(
    moto_server, opened, tmp_path, caplog
):
    backend = await opened()
    write = object_write(1, 1000)
    await backend.write([write])
    assert await backend.write([write]) == [WriteOutcome.EXISTS]
    behind = moto_server.client()
    prefix = s3_servers.prefix_of(tmp_path)
    listed = behind.list_objects_v2(Bucket=s3_servers.BUCKET, Prefix=prefix)["Contents"]
    (key,) = [item["Key"] for item in listed]
    assert key == f"{prefix}/{NAMESPACE}/{write.name[:2]}/{write.name}"
    behind.delete_object(Bucket=s3_servers.BUCKET, Key=key)
    assert await backend.contains([write.name]) == [False]
    assert await read_one(backend) is ReadOutcome.MISSING
    assert await backend.write([write]) == [WriteOutcome.STORED]
    await assert_reads_back(backend, write)
    assert not caplog.records


async def test_bucket_that_somebody_removed_makes_storage_unavailable(s3, opened):
    backend = await opened()
    s3.fail(Fault(404, "NoSuchBucket"), "GET")
    with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
        await read_one(backend)


async def test_passing_server_error_is_retried(s3, opened):
    backend = await opened()
    s3.fail(Fault(500), times=1)
    assert await backend.write([object_write(1, 1000)]) == [WriteOutcome.STORED]
    s3.fail(Fault(500), times=1)
    assert await read_one(backend) is ReadOutcome.OK
    assert s3.methods() == ["PUT", "PUT", "GET", "GET"]
    assert backend.stats()["requests_retried"] == 2


@pytest.mark.parametrize("status", [500, 503])
async def test_lasting_server_error_ends_after_three_tries(s3, opened, status):
    backend = await opened()
    s3.fail(Fault(status, "SlowDown" if status == 503 else "InternalError"))
    with pytest.raises(BackendUnavailable, match="as told"):
        await read_one(backend)
    assert s3.methods() == ["GET"] * 3


async def test_retries_end_with_the_deadline_of_the_operation(s3, opened):
    backend = await opened(operation_timeout_s=0.3)
    s3.fail(Fault(503, "SlowDown", stall_s=0.14))
    started = time.monotonic()
    with pytest.raises(BackendUnavailable):
        await backend.write([object_write(1, 1000)])
    assert time.monotonic() - started < 1.0


async def test_slow_down_backs_off_and_is_counted(s3, opened, delays):
    backend = await opened()
    s3.fail(SLOW_DOWN, "PUT", times=2)
    assert await backend.write([object_write(1, 1000)]) == [WriteOutcome.STORED]
    assert len(delays) == 2
    assert 0 < delays[0] <= 1
    assert 0 < delays[1] <= 2
    stats = backend.stats()
    assert (stats["requests_throttled"], stats["requests_retried"]) == (2, 2)


async def test_stall_ends_at_the_deadline_and_leaves_the_buffers_alone(s3, opened):
    backend = await opened(operation_timeout_s=0.3)
    await backend.write([object_write(1, 1000)])
    s3.fail(Fault(stall_s=0.8), "GET")
    read = object_read(1, 1000)
    started = time.monotonic()
    with pytest.raises(BackendTimeout):
        await backend.read([read])
    assert time.monotonic() - started < 0.7
    assert backend.oldest_running_s() == 0.0
    await asyncio.sleep(0.8)
    assert read.payload == bytes(1000)


async def test_stalled_reads_keep_no_others_waiting(s3, opened, monkeypatch):
    monkeypatch.setattr("vllm_hicache.storage_backends.s3._HUNG_AFTER_S", 0.05)
    backend = await opened(read_concurrency=2)
    await backend.write([object_write(1, 1000), object_write(2, 1000)])
    s3.fail(Fault(stall_s=5), "GET", times=2)
    stalled = [asyncio.ensure_future(read_one(backend, 1)) for _ in range(2)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(2):
        assert await read_one(backend, 2) is ReadOutcome.OK
        while backend.stats()["hung_requests_now"] < 2:  # the other one began a moment later
            await asyncio.sleep(0.01)
    for read in stalled:
        read.cancel()
    await asyncio.wait(stalled, timeout=1)
    assert all(read.cancelled() for read in stalled)
    assert backend.stats()["hung_requests_now"] == 0


@pytest.mark.parametrize("num_bytes", [1000, 12 * MIB])
async def test_connection_cut_inside_an_object_is_read_again(s3, opened, num_bytes):
    backend = await opened(part_size="5MiB")
    write = object_write(1, num_bytes)
    await backend.write([write])
    s3.heal()
    s3.fail(Fault(cut_after=num_bytes // 3), "GET", times=1)
    await assert_reads_back(backend, write)
    assert backend.stats()["requests_retried"] == 1
    assert len(s3.seen) == 1 + (1 if num_bytes < MIB else 3)


async def test_connection_cut_again_and_again_makes_storage_unavailable(s3, opened):
    backend = await opened()
    await backend.write([object_write(1, 1000)])
    s3.fail(Fault(cut_after=4200), "GET")
    with pytest.raises(BackendUnavailable):
        await read_one(backend)
    assert backend.stats()["read_errors"] == 1


async def test_server_that_ignores_ranges_serves_whole_objects_only(s3, opened):
    backend = await opened(part_size="5MiB")
    small, large = object_write(1, 1000), object_write(2, 6 * MIB)
    await backend.write([small, large])
    s3.fail(Fault(drop_range=True), "GET")
    await assert_reads_back(backend, small)
    assert await read_one(backend, 1, 999) is ReadOutcome.BAD_LENGTH
    with pytest.raises(BackendUnavailable, match="does not answer by ranges"):
        await read_one(backend, 2, 6 * MIB)


async def test_upload_that_fails_leaves_no_parts(s3, opened, moto_server, tmp_path):
    backend = await opened(part_size="5MiB")
    s3.fail(Fault(500), "PUT", matches=lambda request: "partNumber=2" in request.raw_path)
    with pytest.raises(BackendUnavailable):
        await backend.write([object_write(1, 12 * MIB)])
    await backend.close()
    # Killed writers of other tests have left parts in the same bucket.
    ours = {"Bucket": s3_servers.BUCKET, "Prefix": s3_servers.prefix_of(tmp_path)}
    uploads = moto_server.client().list_multipart_uploads(**ours)
    assert uploads.get("Uploads", []) == []
    assert s3.methods().count("DELETE") == 1


async def test_uploads_in_vain_are_avoided_after_the_first(s3, opened):
    backend = await opened()
    writes = [object_write(number, 1000) for number in range(4)]
    await backend.write(writes[:3])
    s3.heal()
    for write in writes[:3]:
        assert await backend.write([write]) == [WriteOutcome.EXISTS]
    assert s3.methods() == ["PUT", "HEAD", "HEAD", "HEAD"]
    assert await backend.write([writes[3]]) == [WriteOutcome.STORED]
    assert s3.methods()[4:] == ["HEAD", "PUT"]


async def test_server_without_conditional_writes_is_asked_before(s3, opened):
    backend = await opened()
    s3.fail(
        Fault(501, "NotImplemented"),
        "PUT",
        matches=lambda request: "If-None-Match" in request.headers,
    )
    for _ in range(2):
        assert await backend.write([object_write(1, 1000)]) != [WriteOutcome.FULL]
    assert s3.methods() == ["PUT", "HEAD", "PUT", "HEAD"]
    assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.STORED]
    await assert_reads_back(backend, object_write(1, 1000), object_write(2, 1000))


async def test_every_upload_names_the_encryption(s3, opened):
    backend = await opened(encryption="aws:kms", kms_key="alias/hicache", part_size="5MiB")
    await backend.write([object_write(1, 1000), object_write(2, 6 * MIB)])
    asked = [
        headers["x-amz-server-side-encryption-aws-kms-key-id"]
        for method, headers in s3.seen
        if headers.get("x-amz-server-side-encryption") == "aws:kms"
    ]
    assert asked == ["alias/hicache"] * 2


async def test_objects_travel_unsigned_and_without_waiting_for_permission(s3, opened):
    backend = await opened()
    await backend.write([object_write(1, 1000)])
    (_, headers), *_ = s3.seen
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert not {"expect", "x-amz-checksum-crc32", "content-md5"} & headers.keys()


async def test_partial_failure_of_a_batched_delete_is_told(s3, opened):
    backend = await opened()
    await backend.write([object_write(1, 10), object_write(2, 10)])
    s3.fail(Fault(403, "AccessDenied"), "POST")
    with pytest.raises(BackendUnavailable, match="delete in bucket"):
        await backend.delete([object_name(1), object_name(2)])


async def test_credentials_are_never_logged(s3, opened, caplog):
    caplog.set_level(logging.INFO)
    backend = await opened()
    s3.fail(DENIED)
    with pytest.raises(BackendUnavailable):
        await backend.contains([object_name(1)])
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "S3 refuses contains in bucket" in told
    assert s3_servers.SECRET_KEY not in told
    assert s3_servers.ACCESS_KEY not in told

"""Objects in a bucket of S3, or of any server that speaks its protocol, through aiobotocore.

Keys are `PREFIX/NAMESPACE/HH/NAME`. Nothing is remembered about them, so that an object which a
lifecycle rule or somebody else removes is a miss.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import HEADER_BYTES, ObjectRead, ObjectWrite, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.counters import Counters
from vllm_hicache.storage_backends.s3_client import (
    BAD_RANGE,
    BROKEN_OFF,
    CLIENT_COUNTERS,
    CLIENT_ERRORS,
    CONFLICT,
    EXISTS_ALREADY,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    S3Address,
    S3Client,
    code,
    is_refusal,
    status,
)
from vllm_hicache.storage_backends.s3_records import S3Records
from vllm_hicache.storage_backends.s3_requests import Places, UploadBody, all_results, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_hicache.config import StorageConfig

logger = logging.getLogger(__name__)

COUNTERS = (
    "objects_read",
    "objects_written",
    "objects_deleted",
    "bytes_read",
    "bytes_written",
    "read_seconds",
    "write_seconds",
    "read_errors",
    "write_errors",
    "writes_refused",  # no permission or no room
    *CLIENT_COUNTERS,
)

_HUNG_AFTER_S = 0.5
_QUESTIONS = 32  # HEAD and DELETE requests at once, beside reads and writes
_DELETE_BATCH = 1000  # what S3 takes in one request, and lists in one
_CHUNK_BYTES = 256 * 1024
_CLOSE_S = 1.0


class S3Backend:
    """Stores objects below the prefix of an address.

    Objects above `part_size` are written in parts and read by concurrent ranges of that size.
    Requests are retried up to twice with growing random waits, and all waits together end with
    `operation_timeout_s`. A refusal to write (no permission, no room) is answered `FULL`; every
    other failure raises `BackendUnavailable`.
    """

    name = "s3"

    def __init__(self, address: S3Address, config: StorageConfig) -> None:
        if config.kms_key and not (config.encryption or "").startswith("aws:kms"):
            raise ConfigError('storage.kms_key needs storage.encryption to be "aws:kms"')
        self._address = address
        self._part_bytes = config.part_size_bytes
        self._timeout_s = config.operation_timeout_s
        self._encryption = {
            name: value
            for name, value in (
                ("ServerSideEncryption", config.encryption),
                ("SSEKMSKeyId", config.kms_key),
            )
            if value
        }
        self._counters = Counters(COUNTERS)
        limits = (config.read_concurrency, config.write_concurrency, _QUESTIONS)
        self._client = S3Client(address, self._counters, config, max_connections=2 * sum(limits))
        self._records = S3Records(address, self._client, self._encryption)
        self._readers, self._writers, self._askers = (
            Places(limit, hung_after_s=min(_HUNG_AFTER_S, self._timeout_s)) for limit in limits
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self._asks_first = False  # whether the next object to write is probably there
        self._has_conditions = True  # until the server says that it knows no conditional writes

    async def open(self) -> None:
        """Connect and ask for the bucket by HEAD; lists nothing. See `StorageBackend.open`."""
        await self._client.open()

    async def close(self) -> None:
        """As `StorageBackend.close`."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_CLOSE_S)
        await self._client.close()

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend.contains`, by one HEAD for each object; it must hold a header."""
        async with self._client.answering("contains"):
            lengths = await all_results([self._length(name) for name in names])
        return [length is not None and length >= HEADER_BYTES for length in lengths]

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """As `StorageBackend.read`; what arrives is copied once, into the views."""
        async with self._client.answering("read"):
            return await all_results([self._read_object(read) for read in reads])

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """As `StorageBackend.write`; header and payload are never joined."""
        async with self._client.answering("write"):
            return await all_results([self._write_object(write) for write in writes])

    async def delete(self, names: Sequence[str]) -> int:
        """As `StorageBackend.delete`; S3 does not tell what was there, so it is asked before."""
        found = await self.contains(names)
        present = [name for name, is_there in zip(names, found, strict=True) if is_there]
        async with self._client.answering("delete"):
            for first in range(0, len(present), _DELETE_BATCH):
                batch = present[first : first + _DELETE_BATCH]
                await self._delete_keys([self._address.key(name) for name in batch])
        return len(present)

    async def clear(self, namespace: str) -> int:
        """As `StorageBackend.clear`: lists the keys of the namespace and deletes 1,000 at once."""
        await self._records.remove(namespace)
        prefix = self._address.namespace_prefix(namespace)
        num_removed = 0
        while True:
            async with self._client.answering("clear"), self._askers.taken():
                listed = await self._client.requests.list_objects_v2(
                    Bucket=self._address.bucket, Prefix=prefix, MaxKeys=_DELETE_BATCH
                )
            keys = [item["Key"] for item in listed.get("Contents", ())]
            if not keys:
                return num_removed
            async with self._client.answering("clear"):
                await self._delete_keys(keys)
            num_removed += len(keys)

    async def write_record(self, namespace: str, record: bytes) -> WriteOutcome:
        """As `KeepsRecords.write_record`."""
        return await self._records.write(namespace, record)

    async def read_records(self) -> dict[str, bytes]:
        """As `KeepsRecords.read_records`."""
        return await self._records.read_all()

    async def room(self) -> dict[str, str | int | None]:
        """As `TellsRoom.room`: what a lifecycle rule of the bucket makes of objects here."""
        return await self._records.room()

    def stats(self) -> dict[str, float]:
        """As `StorageBackend.stats`, with the names in `COUNTERS` and one level."""
        hung = sum(places.num_hung() for places in self._places())
        return {**self._counters.snapshot(), "hung_requests_now": float(hung)}

    def oldest_running_s(self) -> float:
        """As `StorageBackend.oldest_running_s`."""
        return max(places.oldest_running_s() for places in self._places())

    def _places(self) -> tuple[Places, ...]:
        return self._readers, self._writers, self._askers

    # Requests -------------------------------------------------------------------------------

    async def _length(self, name: str) -> int | None:
        """Length of an object in bytes; None when it is not there."""
        async with self._askers.taken():
            try:
                found = await self._client.requests.head_object(
                    Bucket=self._address.bucket, Key=self._address.key(name)
                )
            except boto.ClientError as error:
                if status(error) == NOT_FOUND:
                    return None
                raise
        length: int = found["ContentLength"]
        return length

    async def _read_object(self, read: ObjectRead) -> ReadOutcome:
        started = time.monotonic()
        num_bytes = read.header.nbytes + read.payload.nbytes
        views = [read.header, read.payload]
        try:
            outcomes = await all_results(
                [
                    self._read_range(read.name, part_of(views, *part), part, num_bytes)
                    for part in self._parts(num_bytes)
                ]
            )
        except CLIENT_ERRORS:
            self._counters.add(read_errors=1)
            raise
        for bad in (ReadOutcome.MISSING, ReadOutcome.BAD_LENGTH):
            if bad in outcomes:
                return bad
        seconds = time.monotonic() - started
        self._counters.add(objects_read=1, bytes_read=num_bytes, read_seconds=seconds)
        return ReadOutcome.OK

    def _parts(self, num_bytes: int) -> list[tuple[int, int]]:
        """Start and stop of each part of an object."""
        starts = range(0, num_bytes, self._part_bytes)
        return [(start, min(start + self._part_bytes, num_bytes)) for start in starts]

    async def _read_range(
        self, name: str, views: Sequence[memoryview], part: tuple[int, int], num_bytes: int
    ) -> ReadOutcome:
        """Read one part into its views; once more where the connection breaks in between."""
        async with self._readers.taken():
            try:
                return await self._read_range_once(name, views, part, num_bytes)
            except BROKEN_OFF:
                self._counters.add(requests_retried=1)
                return await self._read_range_once(name, views, part, num_bytes)

    async def _read_range_once(
        self, name: str, views: Sequence[memoryview], part: tuple[int, int], num_bytes: int
    ) -> ReadOutcome:
        try:
            answer = await self._client.requests.get_object(
                Bucket=self._address.bucket,
                Key=self._address.key(name),
                Range=f"bytes={part[0]}-{part[1] - 1}",
            )
        except boto.ClientError as error:
            if status(error) == BAD_RANGE:
                return ReadOutcome.BAD_LENGTH
            if status(error) == NOT_FOUND and code(error) != "NoSuchBucket":
                return ReadOutcome.MISSING
            raise
        body = answer["Body"]
        is_read = False
        try:
            if _total_bytes(answer) != num_bytes:
                return ReadOutcome.BAD_LENGTH
            if answer["ContentLength"] != part[1] - part[0]:
                raise self._client.unavailable("read", "the server does not answer by ranges")
            for view in views:
                await _fill(view, body)
            is_read = True
        finally:
            if not is_read:
                body.close()
        return ReadOutcome.OK

    async def _write_object(self, write: ObjectWrite) -> WriteOutcome:
        started = time.monotonic()
        num_bytes = len(write.header) + write.payload.nbytes
        try:
            is_new = await self._store(write, num_bytes)
        except boto.ClientError as error:
            self._counters.add(write_errors=1)
            if not is_refusal(error):
                raise
            self._client.explain_once("write", error)
            self._counters.add(writes_refused=1)
            return WriteOutcome.FULL
        except CLIENT_ERRORS:
            self._counters.add(write_errors=1)
            raise
        if not is_new:
            return WriteOutcome.EXISTS
        seconds = time.monotonic() - started
        self._counters.add(objects_written=1, bytes_written=num_bytes, write_seconds=seconds)
        return WriteOutcome.STORED

    async def _store(self, write: ObjectWrite, num_bytes: int) -> bool:
        """Write an object unless one of its length is there; whether it was written.

        Small ones are written on condition that there is none. After one that was there, the next
        is asked for first: uploads that are in vain come in a row.
        """
        views = [memoryview(write.header), write.payload]
        key = self._address.key(write.name)
        if num_bytes > self._part_bytes:
            if await self._length(write.name) == num_bytes:
                return False
            await self._put_parts(key, views, num_bytes)
            return True
        if not self._asks_first and self._has_conditions:
            if await self._put_if_absent(key, views):
                return True
            self._asks_first = self._has_conditions
        if await self._length(write.name) == num_bytes:
            return False
        self._asks_first = False
        await self._put(key, views)
        return True

    async def _put_if_absent(self, key: str, views: Sequence[memoryview]) -> bool:
        try:
            await self._put(key, views, IfNoneMatch="*")
        except boto.ClientError as error:
            if status(error) == NOT_IMPLEMENTED:
                self._has_conditions = False
            elif status(error) not in (CONFLICT, EXISTS_ALREADY):
                raise
            return False
        return True

    async def _put(self, key: str, views: Sequence[memoryview], **options: str) -> None:
        body = UploadBody(views)
        async with self._writers.taken():
            try:
                await self._client.requests.put_object(
                    Bucket=self._address.bucket, Key=key, Body=body, **self._encryption, **options
                )
            finally:
                body.release()

    async def _put_parts(self, key: str, views: Sequence[memoryview], num_bytes: int) -> None:
        place = {"Bucket": self._address.bucket, "Key": key}
        client = self._client.requests
        upload = await client.create_multipart_upload(**place, **self._encryption)
        place["UploadId"] = upload["UploadId"]
        parts = [part_of(views, *part) for part in self._parts(num_bytes)]
        try:
            tags = await all_results(
                [self._put_part(place, number, part) for number, part in enumerate(parts, 1)]
            )
            listed = [{"ETag": tag, "PartNumber": number} for number, tag in enumerate(tags, 1)]
            await client.complete_multipart_upload(**place, MultipartUpload={"Parts": listed})
        except BaseException:
            task = asyncio.create_task(self._abort(client, place))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _put_part(
        self, place: dict[str, str], number: int, views: Sequence[memoryview]
    ) -> str:
        body = UploadBody(views)
        async with self._writers.taken():
            try:
                done = await self._client.requests.upload_part(
                    **place, PartNumber=number, Body=body
                )
            finally:
                body.release()
        tag: str = done["ETag"]
        return tag

    async def _abort(self, client: Any, place: dict[str, str]) -> None:
        """Remove the parts of an upload that came to nothing; a lifecycle rule takes the rest."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.abort_multipart_upload(**place)
        except CLIENT_ERRORS as error:
            logger.debug("could not remove the parts of %s: %s", place["Key"], error)

    async def _delete_keys(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        async with self._askers.taken():
            client, bucket = self._client.requests, self._address.bucket
            if len(keys) == 1:
                await client.delete_object(Bucket=bucket, Key=keys[0])
            else:
                wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
                done = await client.delete_objects(Bucket=bucket, Delete=wanted)
                if errors := done.get("Errors"):
                    raise self._client.unavailable(
                        "delete", f"{len(errors)} objects, {errors[0]['Code']}"
                    )
        self._counters.add(objects_deleted=len(keys))


async def _fill(view: memoryview, body: Any) -> None:
    """Fill a view with the next bytes of an answer, by one copy."""
    done = 0
    while done < view.nbytes:
        chunk = await body.read(min(_CHUNK_BYTES, view.nbytes - done))
        if not chunk:
            raise boto.IncompleteReadError(actual_bytes=done, expected_bytes=view.nbytes)
        view[done : done + len(chunk)] = chunk
        done += len(chunk)


def _total_bytes(answer: dict[str, Any]) -> int:
    """Length of the whole object that a part was read from."""
    total: str = answer.get("ContentRange", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else int(answer["ContentLength"])

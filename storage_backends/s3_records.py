"""Records of namespaces in a bucket: `{prefix}namespaces/{namespace}.json`.

Listing them lists nothing else. They are written anew while they are in use, so a lifecycle rule
that takes old objects takes the records that nobody renews.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto

from vllm_hicache.storage import MAX_RECORD_BYTES, MAX_RECORDS, WriteOutcome
from vllm_hicache.storage_backends.s3_client import (
    CONFLICT,
    EXISTS_ALREADY,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    code,
    is_refusal,
    status,
)
from vllm_hicache.storage_backends.s3_requests import all_results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_hicache.storage_backends.s3_client import S3Address, S3Client

_SUFFIX = ".json"
_IS_NAMESPACE = re.compile(r"[A-Za-z0-9]+-[0-9a-f]+").fullmatch
_LISTED = 1000  # one request


class S3Records:
    """The records below the prefix of one address."""

    def __init__(self, address: S3Address, client: S3Client, encryption: Mapping[str, str]) -> None:
        self._bucket = address.bucket
        self._prefix = f"{address.prefix}namespaces/"
        self._client = client
        self._encryption = encryption

    async def write(self, namespace: str, record: bytes) -> WriteOutcome:
        """As `KeepsRecords.write_record`."""
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(f"a record has {len(record)} bytes, at most {MAX_RECORD_BYTES}")
        async with self._client.answering("write of a record"):
            try:
                is_new = await self._put(namespace, record)
            except boto.ClientError as error:
                if not is_refusal(error):
                    raise
                return WriteOutcome.FULL
            if is_new:
                await self._forget_oldest()
        return WriteOutcome.STORED if is_new else WriteOutcome.EXISTS

    async def read_all(self) -> dict[str, bytes]:
        """As `KeepsRecords.read_records`."""
        async with self._client.answering("read of records"):
            namespaces = (await self._newest_first())[:MAX_RECORDS]
            contents = await all_results([self._get(name) for name in namespaces])
        found = zip(namespaces, contents, strict=True)
        return {name: record for name, record in found if record is not None}

    async def remove(self, namespace: str) -> None:
        """Remove the record of a namespace, if there is one."""
        async with self._client.answering("clear"):
            await self._client.requests.delete_object(Bucket=self._bucket, Key=self._key(namespace))

    async def room(self) -> dict[str, str | int | None]:
        """After how many days a lifecycle rule removes objects below this prefix."""
        async with self._client.answering("room"):
            try:
                answer = await self._client.requests.get_bucket_lifecycle_configuration(
                    Bucket=self._bucket
                )
            except boto.ClientError as error:
                is_asked = status(error) == NOT_FOUND
                return {"expires_after_days": "never" if is_asked else f"unknown: {code(error)}"}
        days = [
            rule["Expiration"]["Days"]
            for rule in answer.get("Rules", ())
            if rule.get("Status") == "Enabled"
            and "Days" in rule.get("Expiration", {})
            and self._prefix.startswith(_prefix_of(rule))
        ]
        return {"expires_after_days": min(days, default="never")}

    def _key(self, namespace: str) -> str:
        return f"{self._prefix}{namespace}{_SUFFIX}"

    async def _put(self, namespace: str, record: bytes) -> bool:
        """Write a record, also over an older one; whether there was none."""
        place = {"Bucket": self._bucket, "Key": self._key(namespace), "Body": record}
        client = self._client.requests
        try:
            await client.put_object(**place, **self._encryption, IfNoneMatch="*")
        except boto.ClientError as error:
            if status(error) not in (CONFLICT, EXISTS_ALREADY, NOT_IMPLEMENTED):
                raise
        else:
            return True
        was_there = await self._is_there(namespace)
        await client.put_object(**place, **self._encryption)
        return not was_there

    async def _is_there(self, namespace: str) -> bool:
        try:
            await self._client.requests.head_object(Bucket=self._bucket, Key=self._key(namespace))
        except boto.ClientError as error:
            if status(error) == NOT_FOUND:
                return False
            raise
        return True

    async def _newest_first(self) -> list[str]:
        listed = await self._client.requests.list_objects_v2(
            Bucket=self._bucket, Prefix=self._prefix, MaxKeys=_LISTED
        )
        found: list[tuple[Any, str]] = []
        for item in listed.get("Contents", ()):
            name = str(item["Key"]).removeprefix(self._prefix)
            if name.endswith(_SUFFIX) and _IS_NAMESPACE(name.removesuffix(_SUFFIX)):
                found.append((item["LastModified"], name.removesuffix(_SUFFIX)))
        return [name for _, name in sorted(found, reverse=True)]

    async def _get(self, namespace: str) -> bytes | None:
        try:
            answer = await self._client.requests.get_object(
                Bucket=self._bucket, Key=self._key(namespace)
            )
        except boto.ClientError as error:
            if status(error) == NOT_FOUND:
                return None
            raise
        async with answer["Body"] as body:
            if answer["ContentLength"] > MAX_RECORD_BYTES:
                return None
            record: bytes = await body.read()
        return record

    async def _forget_oldest(self) -> None:
        for namespace in (await self._newest_first())[MAX_RECORDS:]:
            await self._client.requests.delete_object(Bucket=self._bucket, Key=self._key(namespace))


def _prefix_of(rule: Mapping[str, Any]) -> str:
    """What keys under a lifecycle rule begin with; rules by tag or size do not count."""
    chosen = rule.get("Filter", rule)
    narrow = set(chosen) & {"Tag", "And", "ObjectSizeGreaterThan", "ObjectSizeLessThan"}
    return "\0" if narrow else str(chosen.get("Prefix", ""))

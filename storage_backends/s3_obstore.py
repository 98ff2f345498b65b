"""The S3 backend whose objects go through obstore, a client written in Rust.

Everything but the bytes of objects (the start, questions, deletion, listing, uploads in parts)
stays with aiobotocore, and so do errors, credentials and limits.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import obstore
from botocore import exceptions as boto
from obstore import exceptions as failures
from obstore.store import S3Store

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import ReadOutcome
from vllm_hicache.storage_backends.s3 import S3Backend
from vllm_hicache.storage_backends.s3_client import (
    BAD_RANGE,
    EXISTS_ALREADY,
    FORBIDDEN,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    code,
    status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_hicache.config import StorageConfig
    from vllm_hicache.storage_backends.s3_client import S3Address

_STATUS_OF = (
    ((failures.NotFoundError, FileNotFoundError), NOT_FOUND, "NoSuchKey"),
    (failures.PermissionDeniedError, FORBIDDEN, "AccessDenied"),
    (failures.UnauthenticatedError, FORBIDDEN, "AccessDenied"),
    (failures.AlreadyExistsError, EXISTS_ALREADY, "PreconditionFailed"),
    (failures.PreconditionError, EXISTS_ALREADY, "PreconditionFailed"),
    (failures.NotSupportedError, NOT_IMPLEMENTED, "NotImplemented"),
)
# Absence is told by a builtin error.
FAILURES = (failures.BaseError, OSError, NotImplementedError)
_find_status = re.compile(r"status code: (\d{3})").search
_find_code = re.compile(r"<Code>(\w+)</Code>").search
_find_message = re.compile(r"<Message>([^<]*)</Message>").search
_RETRIES = 2
_MAX_BACKOFF_S = 1


class ObstoreS3Backend(S3Backend):
    """As `S3Backend`. Reads and uploads take less CPU time, and cost one copy more.

    An upload is joined into bytes of its own and an answer is received outside the pool, because
    obstore goes on with a request whose caller has given it up. It tries again by itself, so
    `requests_retried` and `requests_throttled` do not count its requests.
    """

    def __init__(self, address: S3Address, config: StorageConfig) -> None:
        super().__init__(address, config)
        self._config = config
        self._objects: Any = None

    async def open(self) -> None:
        """As `S3Backend.open`, with the credentials that were found there."""
        await super().open()
        self._objects = _object_store(self._address, self._config, self._client)

    async def _read_range_once(
        self, name: str, views: Sequence[memoryview], part: tuple[int, int], num_bytes: int
    ) -> ReadOutcome:
        try:
            answer = await obstore.get_async(
                self._objects, self._address.key(name), options={"range": part}
            )
            if answer.meta["size"] != num_bytes:
                return ReadOutcome.BAD_LENGTH
            if answer.range != part:
                raise self._client.unavailable("read", "the server does not answer by ranges")
            data = memoryview(await answer.bytes_async())
        except FAILURES as error:
            known = _translated(error, "GetObject")
            if isinstance(known, boto.ClientError):
                if status(known) == BAD_RANGE:
                    return ReadOutcome.BAD_LENGTH
                if status(known) == NOT_FOUND and code(known) != "NoSuchBucket":
                    return ReadOutcome.MISSING
            raise known from error
        offset = 0
        for view in views:
            view[:] = data[offset : offset + view.nbytes]
            offset += view.nbytes
        return ReadOutcome.OK

    async def _put(self, key: str, views: Sequence[memoryview], **options: str) -> None:
        mode: Literal["create", "overwrite"] = "create" if "IfNoneMatch" in options else "overwrite"
        async with self._writers.taken():
            try:
                await obstore.put_async(
                    self._objects, key, b"".join(views), mode=mode, use_multipart=False
                )
            except FAILURES as error:
                raise _translated(error, "PutObject") from error


def _object_store(address: S3Address, config: StorageConfig, client: Any) -> Any:
    """The store of obstore for this address, with the credentials of aiobotocore."""
    options: dict[str, Any] = {}
    if address.endpoint_url is not None:
        options["endpoint"] = address.endpoint_url
    if config.encryption:
        options["server_side_encryption"] = config.encryption
    if config.kms_key:
        options["sse_kms_key_id"] = config.kms_key
    is_plain = (address.endpoint_url or "").startswith("http://")
    has_bucket_in_host = address.addressing_style == "virtual" or (
        address.addressing_style == "auto" and address.endpoint_url is None
    )
    try:
        return S3Store(
            address.bucket,
            region=client.requests.meta.region_name,
            virtual_hosted_style_request=has_bucket_in_host,
            unsigned_payload=True,
            conditional_put="etag",
            credential_provider=client.credentials,
            client_options={
                "allow_http": is_plain,
                "timeout": timedelta(seconds=config.operation_timeout_s),
                "connect_timeout": timedelta(seconds=config.connect_timeout_s),
                "user_agent": "vllm-hicache",
            },
            retry_config={
                "max_retries": _RETRIES,
                "backoff": {"max_backoff": timedelta(seconds=_MAX_BACKOFF_S)},
                "retry_timeout": timedelta(seconds=config.operation_timeout_s),
            },
            **options,
        )
    except FAILURES as error:
        raise ConfigError(f"S3 storage cannot be set up with client=obstore: {error}") from error


def _translated(error: Exception, operation: str) -> boto.ClientError | OSError:
    """The error that aiobotocore would have raised."""
    said = str(error)
    told, message = _find_code(said), _find_message(said)
    what = message[1] if message else "no reason given"
    for kind, number, usual_code in _STATUS_OF:
        if isinstance(error, kind):
            return _client_error(number, told[1] if told else usual_code, what, operation)
    if found := _find_status(said):
        return _client_error(int(found[1]), told[1] if told else "Error", what, operation)
    first_line = said.partition("\n")[0]
    is_late = "timed out" in said or "timeout" in first_line
    return TimeoutError(first_line) if is_late else OSError(first_line)


def _client_error(number: int, name: str, message: str, operation: str) -> boto.ClientError:
    response = {
        "Error": {"Code": name, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": number},
    }
    return boto.ClientError(response, operation)

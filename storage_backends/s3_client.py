"""Where an S3 URL points, the client that goes there, and what its errors mean.

Credentials have no place in the URL: they come from the standard chain of AWS clients.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import exceptions as boto
from botocore.handlers import add_expect_header

from vllm_hicache.errors import BackendError, BackendTimeout, BackendUnavailable, ConfigError
from vllm_hicache.storage_backends import file_names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm_hicache.config import StorageConfig
    from vllm_hicache.storage_backends.counters import Counters

logger = logging.getLogger(__name__)

CLIENT_COUNTERS = (
    "requests_retried",
    "requests_throttled",  # 429 and 503: the server asked for fewer requests
)
CLIENT_ERRORS = (boto.BotoCoreError, boto.ClientError, aiohttp.ClientError, OSError)
"""All that a request may raise, its timeouts included."""
BROKEN_OFF = (boto.HTTPClientError, boto.IncompleteReadError, aiohttp.ClientError)
"""What reading the body of an answer raises when the connection breaks."""

NOT_FOUND, FORBIDDEN, CONFLICT, EXISTS_ALREADY, BAD_RANGE = 404, 403, 409, 412, 416
NOT_IMPLEMENTED, NO_ROOM = 501, 507
_THROTTLED = frozenset({429, 503})
_HOPELESS = frozenset({301, 400, 401, FORBIDDEN, NOT_FOUND})  # at start, on the bucket itself
_NO_ROOM_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"})
_NEEDED_PERMISSIONS = (
    "s3:ListBucket on the bucket (without it, S3 does not tell absent objects from forbidden "
    "ones) and s3:GetObject, s3:PutObject, s3:DeleteObject on its objects"
)

# For so long, obstore takes credentials for fresh; the session renews them in time.
_CREDENTIALS_FRESH_S = 300

_ATTEMPTS = 3  # of each request, within the deadline of its operation
_DEFAULT_REGION = "us-east-1"
_CREDENTIALS = "the environment, the shared configuration files or the instance"

_FORM = "s3://BUCKET/PREFIX?endpoint_url=https://HOST:PORT&region=NAME&path_style=true"
_PARAMETERS = ("endpoint_url", "region", "path_style", "client")
CLIENTS = ("aiobotocore", "obstore")
_IS_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}").fullmatch
_IS_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/=+@:,-]*").fullmatch
_ADDRESSING = {"": "auto", "true": "path", "false": "virtual"}


@dataclass(frozen=True, slots=True)
class S3Address:
    """One bucket of one server, and the prefix of all keys.

    >>> address = S3Address.parse("s3://cache/llm?endpoint_url=http://127.0.0.1:9000")
    >>> address.bucket, address.endpoint_url, address.addressing_style
    ('cache', 'http://127.0.0.1:9000', 'auto')
    >>> address.key("ab" * 32 + "_hc1-0123456789abcdef_L0-8_H0")[:31]
    'llm/hc1-0123456789abcdef/ab/aba'
    """

    bucket: str
    prefix: str  # "" or ends with a slash
    endpoint_url: str | None
    region: str | None
    addressing_style: str  # auto, path or virtual
    client: str  # one of CLIENTS: who transfers the bytes of objects

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL, all parts but the bucket optional.

        Raises:
            ConfigError: It has another form. Values that may be secret are not shown.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ConfigError(
                f"an S3 storage URL must not hold credentials: they come from {_CREDENTIALS}"
            )
        if not _IS_BUCKET(parts.netloc) or parts.fragment:
            raise ConfigError(f"an S3 storage URL must be {_FORM}, got bucket {parts.netloc!r}")
        prefix = unquote(parts.path).strip("/")
        if not _IS_PREFIX(prefix) or "//" in prefix:
            raise ConfigError(
                "the prefix of an S3 storage URL may hold letters, digits and !_.*'()/=+@:,- "
                f"and no empty part, got {prefix!r}"
            )
        given = _parameters(parts.query)
        path_style = given.get("path_style", "")
        if path_style not in _ADDRESSING:
            raise ConfigError(f"path_style of an S3 storage URL must be true or false: {_FORM}")
        client = given.get("client", CLIENTS[0])
        if client not in CLIENTS:
            raise ConfigError(
                f"client of an S3 storage URL must be {' or '.join(CLIENTS)}, got {client!r}"
            )
        return cls(
            bucket=parts.netloc,
            prefix=f"{prefix}/" if prefix else "",
            endpoint_url=_endpoint(given.get("endpoint_url")),
            region=given.get("region") or None,
            addressing_style=_ADDRESSING[path_style],
            client=client,
        )

    def key(self, name: str) -> str:
        """Key of an object: below its namespace, spread over 256 parts by its first digits."""
        namespace = file_names.namespace_of(name)
        if namespace is None:
            raise ValueError(f"{name!r} is not the name of an object")
        return f"{self.namespace_prefix(namespace)}{name[:2]}/{name}"

    def namespace_prefix(self, namespace: str) -> str:
        """What the keys of all objects of a namespace, and no others, begin with."""
        return f"{self.prefix}{namespace}/"


def _parameters(query: str) -> dict[str, str]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - set(_PARAMETERS))
    if unknown:
        raise ConfigError(
            f"an S3 storage URL may have the parameters {', '.join(_PARAMETERS)}, got "
            f"{', '.join(unknown)}; credentials come from {_CREDENTIALS}"
        )
    return given


def _endpoint(text: str | None) -> str | None:
    """A checked endpoint URL; None for the one of AWS."""
    if not text:
        return None
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError(
            "endpoint_url of an S3 storage URL must be http://HOST:PORT or https://HOST:PORT, "
            "without user and password"
        )
    return text


class S3Client:
    """Connections to the bucket of one address. Requests are retried twice, ever later."""

    def __init__(
        self,
        address: S3Address,
        counters: Counters,
        config: StorageConfig,
        *,
        max_connections: int,
    ) -> None:
        self._address = address
        self._counters = counters
        self._timeout_s = config.operation_timeout_s
        self._connect_timeout_s = config.connect_timeout_s
        self._max_connections = max_connections
        self._resources = AsyncExitStack()
        self._connected: Any = None
        self._session: Any = None
        self._explained: set[tuple[str, str]] = set()

    @property
    def requests(self) -> Any:
        """The client of aiobotocore, whose methods are the requests of S3.

        Raises:
            BackendUnavailable: It is not open.
        """
        if self._connected is None:
            raise BackendUnavailable("S3 storage is not open", backend="s3")
        return self._connected

    async def open(self) -> None:
        """Connect and ask for the bucket by HEAD; lists nothing.

        Raises:
            ConfigError: The bucket does not exist or may not be used, or there are no credentials.
            BackendUnavailable: The server cannot be reached now.
        """
        await self.close()
        client = await self._make()
        async with self.answering("open", self._connect_timeout_s):
            try:
                await client.head_bucket(Bucket=self._address.bucket)
            except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
                raise ConfigError(
                    f"S3 storage has no credentials: {error}. They come from {_CREDENTIALS}"
                ) from error
            except boto.ClientError as error:
                if status(error) in _HOPELESS:
                    raise ConfigError(await self._reason(client, error)) from error
                raise
        self._connected = client

    async def credentials(self) -> dict[str, Any]:
        """What the chain of AWS clients finds now, in the form that obstore takes."""
        found = await self._session.get_credentials()
        if found is None:
            raise BackendUnavailable("S3 storage has lost its credentials", backend="s3")
        now = await found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_FRESH_S),
        }

    async def close(self) -> None:
        """Close all connections; requests that run fail."""
        self._connected = None
        await self._resources.aclose()
        self._resources = AsyncExitStack()

    @asynccontextmanager
    async def answering(
        self, operation: str, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Bound an operation in time, and turn what its requests raise into errors of storage."""
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                yield
        except BackendError:
            raise
        except (TimeoutError, boto.ReadTimeoutError, boto.ConnectTimeoutError) as error:
            raise BackendTimeout(
                f"{operation} in bucket {self._address.bucket!r} had no answer in time",
                backend="s3",
                operation=operation,
            ) from error
        except boto.ClientError as error:
            if status(error) in (FORBIDDEN, NOT_FOUND):
                self.explain_once(operation, error)
            raise self.unavailable(operation, text(error)) from error
        except (boto.BotoCoreError, aiohttp.ClientError, OSError) as error:
            raise self.unavailable(operation, str(error)) from error

    def unavailable(self, operation: str, reason: str) -> BackendUnavailable:
        """The error that says that an operation has failed."""
        message = f"{operation} in bucket {self._address.bucket!r} failed: {reason}"
        return BackendUnavailable(message, backend="s3", operation=operation)

    def explain_once(self, operation: str, refused: boto.ClientError) -> None:
        """Say what the server refuses and what may be missing, one time for each reason."""
        kind = (operation, text(refused))
        if kind not in self._explained:
            self._explained.add(kind)
            logger.warning(
                "S3 refuses %s in bucket %r: status %d, %s. Needed: %s",
                operation,
                self._address.bucket,
                status(refused),
                text(refused),
                _NEEDED_PERMISSIONS,
            )

    async def _make(self) -> Any:
        config = AioConfig(
            connect_timeout=self._connect_timeout_s,
            read_timeout=self._timeout_s / 2,  # of silence; leaves time for another try
            max_pool_connections=self._max_connections,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            s3={
                "addressing_style": self._address.addressing_style,
                "payload_signing_enabled": False,  # objects carry their own checksums
            },
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            parameter_validation=False,
            user_agent_extra="vllm-hicache",
        )
        session = self._session = get_session()
        try:
            region = self._address.region or session.get_config_variable("region")
            made = session.create_client(
                "s3",
                region_name=region or _DEFAULT_REGION,
                endpoint_url=self._address.endpoint_url,
                config=config,
            )
            client = await self._resources.enter_async_context(made)
        except (boto.BotoCoreError, ValueError) as error:
            raise ConfigError(f"S3 storage cannot be set up: {error}") from error
        # It costs a round trip before each upload, and some servers never answer it.
        client.meta.events.unregister("before-call.s3", add_expect_header)
        client.meta.events.register("needs-retry.s3", self._count_attempt)
        return client

    def _count_attempt(self, attempts: int, response: Any, **_: Any) -> None:
        """Called after each try of each request."""
        is_throttled = response is not None and response[0].status_code in _THROTTLED
        self._counters.add(requests_retried=attempts > 1, requests_throttled=is_throttled)

    async def _reason(self, client: Any, refused: boto.ClientError) -> str:
        """Why the bucket cannot be used. The answer to HEAD has no text, that to GET has."""
        bucket = self._address.bucket
        reason = "no reason given"
        try:
            key = f"{self._address.prefix}hicache-start"
            answer = await client.get_object(Bucket=bucket, Key=key)
            answer["Body"].close()
        except boto.ClientError as error:
            reason = text(error)
        advice = "" if status(refused) == NOT_FOUND else f". Needed: {_NEEDED_PERMISSIONS}"
        return (
            f"S3 storage cannot use bucket {bucket!r}: status {status(refused)}, {reason}{advice}"
        )


def is_refusal(error: boto.ClientError) -> bool:
    """Whether the server takes no writes, though it may well answer reads."""
    return status(error) in (FORBIDDEN, NO_ROOM) or code(error) in _NO_ROOM_CODES


def status(error: boto.ClientError) -> int:
    """Status of the answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code(error: boto.ClientError) -> str:
    """What S3 calls the error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def text(error: boto.ClientError) -> str:
    """What the server said, without the name of the client's method."""
    return f"{code(error)}: {error.response.get('Error', {}).get('Message', '')}"

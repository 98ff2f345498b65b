"""From a storage URL to a backend, constructed but not yet connected."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_backends.file import FileBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_hicache.config import StorageConfig
    from vllm_hicache.storage import StorageBackend


ENTRY_POINTS = "vllm_hicache.storage_backends"
"""Packages name their backend classes in this group; the entry's name is the scheme."""


def open_backend(url: str, config: StorageConfig) -> StorageBackend:
    """The backend that a URL names, constructed but not connected: call its `open`.

    Raises:
        ConfigError: The scheme is unknown, or the rest of the URL does not fit it. The message
            shows no user name, password or query of the URL.
    """
    scheme = urlsplit(url).scheme
    if scheme in _CONSTRUCTORS:
        return _CONSTRUCTORS[scheme](url, config)
    offered = entry_points(group=ENTRY_POINTS)
    if scheme not in offered.names:
        known = ", ".join(f"{name}://" for name in sorted({*_CONSTRUCTORS, *offered.names}))
        raise ConfigError(f"storage scheme {scheme!r} is unknown; known are {known}")
    return _from_class(offered[scheme].load, f"the package that offers {scheme}://", url, config)


def folder_of(url: str) -> Path:
    """The folder that a `file` URL names.

    >>> folder_of("file:///var/cache/hi%20cache")
    PosixPath('/var/cache/hi cache')

    Raises:
        ConfigError: It names a host, has a query or fragment, or no absolute path.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ConfigError("a file storage URL must be file:///ABSOLUTE/PATH and nothing else")
    if not path.startswith("/") or path.strip("/") == "" or "\0" in path:
        raise ConfigError(f"a file storage URL must name an absolute folder, got {path!r}")
    return Path(path)


def _file(url: str, config: StorageConfig) -> StorageBackend:
    return FileBackend(
        folder_of(url),
        capacity_bytes=config.capacity_bytes,
        min_free_bytes=config.min_free_bytes,
        read_threads=config.read_concurrency,
        write_threads=config.write_concurrency,
        operation_timeout_s=config.operation_timeout_s,
    )


def _s3(url: str, config: StorageConfig) -> StorageBackend:
    try:
        from vllm_hicache.storage_backends.s3 import S3Backend
        from vllm_hicache.storage_backends.s3_client import S3Address
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"s3:// storage needs the package {error.name}: pip install 'vllm-hicache[s3]'"
        ) from error
    address = S3Address.parse(url)
    if address.client == "aiobotocore":
        return S3Backend(address, config)
    try:
        from vllm_hicache.storage_backends.s3_obstore import ObstoreS3Backend
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"client=obstore needs the package {error.name}: pip install 'vllm-hicache[obstore]'"
        ) from error
    return ObstoreS3Backend(address, config)


def _redis(url: str, config: StorageConfig) -> StorageBackend:
    try:
        from vllm_hicache.storage_backends.redis import RedisBackend
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(
            f"Redis storage needs the package {package}: pip install 'vllm-hicache[redis]'"
        ) from error
    return RedisBackend.from_url(url, config)


def _plugin(url: str, config: StorageConfig) -> StorageBackend:
    """``plugin://PACKAGE.MODULE/CLASS?...``: what ``CLASS.from_url(url, config)`` returns."""
    parts = urlsplit(url)
    module, name = parts.netloc, parts.path.strip("/")
    form = f"a plugin storage URL must be plugin://PACKAGE.MODULE/CLASS, and {name!r}"
    return _from_class(
        lambda: getattr(importlib.import_module(module), name),
        f"{form} of {module!r}",
        url,
        config,
    )


def _from_class(
    load: Callable[[], Any], what: str, url: str, config: StorageConfig
) -> StorageBackend:
    try:
        found = load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be imported: {error}") from error
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{what} lacks {', '.join(missing)}")
    backend: StorageBackend = found.from_url(url, config)
    return backend


_CONSTRUCTORS: dict[str, Callable[[str, StorageConfig], StorageBackend]] = {
    "file": _file,
    "plugin": _plugin,
    "s3": _s3,
    "redis": _redis,
    "rediss": _redis,
    "redis+unix": _redis,
    "unix": _redis,
    "redis+cluster": _redis,
    "rediss+cluster": _redis,
}

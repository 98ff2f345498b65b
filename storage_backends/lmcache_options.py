"""Settings of the LMCache bridge: ours, and those of ``storage`` by their usual names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_hicache.config import StorageConfig

_OWN = ("cache_id", "layout", "load_timeout_s")


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """What an operator says about the bridge in LMCache's configuration.

    >>> options = BridgeOptions.parse({"url": "file:///cache", "cache_id": "rev-1"}, env={})
    >>> options.storage.scheme, options.cache_id, options.load_timeout_s
    ('file', 'rev-1', 10.0)
    """

    storage: StorageConfig
    cache_id: str
    """Becomes part of every name: what LMCache's keys leave out, such as the model's revision."""
    layout: str | None
    """Stands for the memory layout in every name, instead of the one that LMCache tells."""
    load_timeout_s: float
    """Longest time for one load of any number of chunks; those that arrived by then count."""

    @classmethod
    def parse(
        cls, given: Mapping[str, object], env: Mapping[str, str] | None = os.environ
    ) -> BridgeOptions:
        """Read settings; ``HICACHE_STORAGE_...`` variables override them as in the connector.

        Raises:
            ConfigError: A key is unknown, a value bad or the URL missing.
        """
        storage = {name: value for name, value in given.items() if name not in _OWN}
        config = HiCacheConfig.parse({"storage": storage}, env).storage
        if config is None:
            raise ConfigError("the LMCache bridge needs a storage URL: url=file:///...")
        layout = given.get("layout")
        return cls(
            config,
            _text("cache_id", given.get("cache_id", "")),
            None if layout is None else _text("layout", layout),
            _seconds(given.get("load_timeout_s", 10.0)),
        )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {value!r}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"load_timeout_s must be a positive number of seconds, got {value!r}")
    return float(value)

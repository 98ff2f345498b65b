"""The effective configuration: read from options, file and environment, refused whole or taken.

Nothing here is lenient: an unknown key, a bad value or a pair that contradicts itself stops
the start. All problems are told at once, and no message or repr shows a secret.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

from vllm_hicache.config_sources import Given, parsed, read_sources
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Fleet
from vllm_hicache.host_memory import HostMemory
from vllm_hicache.option import STORAGE, Option
from vllm_hicache.options import OPTIONS, STORAGE_OPTIONS, TOP_OPTIONS, default_of, unmet_need


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StorageConfig:
    """The table ``storage``; each field is documented at its option."""

    url: str
    capacity_bytes: int | None
    min_free_bytes: int
    part_size_bytes: int
    encryption: str | None
    kms_key: str | None
    key_prefix: str
    ttl_s: float | None
    username: str | None
    password: str | None
    ca_file: str | None
    read_concurrency: int
    write_concurrency: int
    operation_timeout_s: float
    connect_timeout_s: float
    exists_timeout_s: float
    write_backlog_bytes: int
    shutdown_grace_s: float
    integrity_key: str | None

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def is_attached(self) -> bool:
        """False for ``StorageConfig.detached()``."""
        return self.url != ""

    @classmethod
    def parse(cls, table: Mapping[str, object]) -> "StorageConfig":
        """The storage that a table of options names, as under the key ``storage``.

        Neither environment nor file are looked at. Raises ConfigError with every problem found.
        """
        storage = HiCacheConfig.parse({STORAGE: table}, env={}).storage
        if storage is None:
            raise ConfigError("storage.url must be given")
        return storage

    @classmethod
    def detached(cls) -> "StorageConfig":
        """No storage; the times of a storage process that serves none are the defaults."""
        return replace(cls.parse({"url": "file:///nowhere"}), url="")

    def __repr__(self) -> str:
        return f"StorageConfig({_shown_fields(self, STORAGE_OPTIONS)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HiCacheConfig:
    """All options of one engine, checked; each field is documented at its option."""

    config_file: str | None
    host_memory: HostMemory
    page_size: int | None
    write_policy: str
    save_after_uses: int
    admission: str
    pin_max_percent: int
    eviction: str
    load_mode: str
    sync_load_max_ms: float
    skip_slow_loads: bool
    draft_miss: str
    defer_max_blocks: int
    weights_id: str | None
    fixed_weights: bool
    fleet: Fleet | None
    storage_layer_partition: int
    storage_head_partition: int
    min_object_bytes: int
    prefetch_policy: str
    prefetch_timeout_base_s: float
    prefetch_timeout_per_1k_tokens_s: float
    prefetch_min_tokens: int
    prefetch_max_percent: int
    prefetch_tenant_max_percent: int
    prefetch_retry_s: float
    prefetch_max_retries: int
    log_interval_s: float
    kv_events: bool | None
    control_address: str | None
    control_token: str | None
    rank_consensus: str
    rank_consensus_events: int
    rank_consensus_folder: str | None
    rank_consensus_stall_s: float
    storage: StorageConfig | None

    @classmethod
    def parse(
        cls, extra: Mapping[str, object], env: Mapping[str, str] | None = os.environ
    ) -> "HiCacheConfig":
        """The configuration of ``kv_connector_extra_config`` and ``HICACHE_*`` variables.

        A variable overrides a key of ``extra``, which overrides the YAML file named by
        ``config_file``. ``storage: null`` also drops what a weaker source says about storage.
        Raises ConfigError that lists every problem found.
        """
        problems: list[str] = []
        given = read_sources(extra, env or {}, problems)
        values = {name: option.default for name, option in OPTIONS.items()}
        values |= {name: parsed(OPTIONS[name], entry, problems) for name, entry in given.items()}
        _raise_if(problems)
        url = values["storage.url"]
        values |= {n: default_of(option, url) for n, option in OPTIONS.items() if n not in given}
        problems.extend(_contradictions(given, values))
        _raise_if(problems)
        return cls._of_values(values)

    @classmethod
    def _of_values(cls, values: Mapping[str, object]) -> "HiCacheConfig":
        # The table decides the types of values; a test compares its fields with these classes.
        def fields(options: tuple[Option, ...]) -> dict[str, Any]:
            return {option.field: cast("Any", values[option.name]) for option in options}

        has_storage = values["storage.url"] is not None
        storage = StorageConfig(**fields(STORAGE_OPTIONS)) if has_storage else None
        return cls(**fields(TOP_OPTIONS), storage=storage)

    @property
    def initial_storage(self) -> StorageConfig | None:
        """What storage processes serve at the start; None when there are no such processes."""
        if self.storage is None and self.control_address is not None:
            return StorageConfig.detached()
        return self.storage

    def describe(self) -> dict[str, object]:
        """The options in effect as ``parse`` would read them, secrets masked.

        An option without effect (such as a storage option without storage) is left out.
        """
        values = {option.name: getattr(self, option.field) for option in TOP_OPTIONS}
        for option in STORAGE_OPTIONS:
            values[option.name] = getattr(self.storage, option.field, None)
        described: dict[str, object] = {}
        storage: dict[str, object] = {}
        for option in OPTIONS.values():
            if unmet_need(option, values) is None:
                table, _, bare = option.name.rpartition(".")
                (storage if table else described)[bare] = _shown_value(option, values[option.name])
        return described | {STORAGE: storage if self.storage else None}

    def __repr__(self) -> str:
        return f"HiCacheConfig({_shown_fields(self, TOP_OPTIONS)}, storage={self.storage!r})"


def _contradictions(given: Mapping[str, Given], values: Mapping[str, object]) -> Iterator[str]:
    for name, entry in given.items():
        need = unmet_need(OPTIONS[name], values)
        if need is not None and entry.value is not None:
            yield f"{entry.where} is given but has no effect: it needs {need}"
    if values["storage.url"] is None:
        return
    for smaller, larger in (
        ("min_object_bytes", "storage.capacity"),
        ("min_object_bytes", "storage.write_backlog"),
        ("storage.exists_timeout_s", "storage.operation_timeout_s"),
    ):
        low, high = cast("Any", values[smaller]), cast("Any", values[larger])
        if high is not None and low > high:
            yield (
                f"{_in_effect(smaller, given, values)} must not exceed "
                f"{_in_effect(larger, given, values)}"
            )
    for partition in ("storage_layer_partition", "storage_head_partition"):
        if values["fleet"] is not None and values[partition]:
            yield (
                f"{_in_effect(partition, given, values)} contradicts "
                f"{_in_effect('fleet', given, values)}, which computes it; give one of them"
            )
    if values["prefetch_policy"] == "wait_complete" and values["defer_max_blocks"] == 0:
        yield (
            f"{_in_effect('prefetch_policy', given, values)} contradicts "
            f"{_in_effect('defer_max_blocks', given, values)}, which lets no request wait"
        )


def _in_effect(name: str, given: Mapping[str, Given], values: Mapping[str, object]) -> str:
    where = given[name].where if name in given else f"{name} (default)"
    return f"{where} {_shown_value(OPTIONS[name], values[name])}"


def _shown_value(option: Option, value: object) -> object:
    return None if value is None else option.kind.show(value)


def _shown_fields(config: object, options: tuple[Option, ...]) -> str:
    return ", ".join(
        f"{option.field}={_shown_value(option, getattr(config, option.field))!r}"
        for option in options
    )


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))

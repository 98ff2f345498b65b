"""The effective configuration: contradictions, description, and secrets that never show."""

import dataclasses
import json
import logging

import pytest

from vllm_hicache.config import HiCacheConfig, StorageConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.host_memory import HostMemory
from vllm_hicache.options import OPTIONS, STORAGE_OPTIONS, TOP_OPTIONS

URL = "file:///var/cache/hicache"
SECRET = "swordfish0123456789"
KEY = "correct horse battery"


def _parse(extra: dict) -> HiCacheConfig:
    return HiCacheConfig.parse(extra, None)


def _refusal(extra: dict) -> str:
    with pytest.raises(ConfigError) as refusal:
        _parse(extra)
    return str(refusal.value)


def test_defaults():
    config = _parse({})
    assert config.storage is None
    assert config.host_memory == HostMemory("auto", 0.8)
    assert (config.page_size, config.eviction, config.prefetch_policy) == (
        None,
        "next_use",
        "timeout",
    )
    storage = _parse({"storage": URL}).storage
    assert (storage.url, storage.scheme, storage.capacity_bytes) == (URL, "file", None)
    assert (storage.read_concurrency, storage.write_concurrency) == (16, 8)


@pytest.mark.parametrize(("given", "seconds"), [({}, 0.5), ({"exists_timeout_s": 0.2}, 0.2)])
def test_default_of_a_scheme_gives_way_to_what_is_given(given, seconds):
    assert _parse({"storage": {"url": "s3://bucket", **given}}).storage.exists_timeout_s == seconds


# contradictions


NEED_STORAGE = [
    name
    for name, option in OPTIONS.items()
    if any(need.startswith("storage.url") for need in option.needs)
]


@pytest.mark.parametrize("name", NEED_STORAGE)
def test_option_of_a_tier_that_is_off_is_refused(name):
    table, _, bare = name.rpartition(".")
    example = OPTIONS[name].example
    message = _refusal({table: {bare: example}} if table else {bare: example})
    assert f"{name} is given but has no effect: it needs storage.url to be set" in message


def test_a_token_that_nobody_asks_for_is_refused():
    message = _refusal({"control_token": "sixteen characters"})
    assert "control_token is given but has no effect: it needs control_address" in message
    assert "sixteen" not in message


def test_processes_for_storage_exist_when_storage_can_be_attached_later():
    assert _parse({}).initial_storage is None
    initial = _parse({"control_address": "tcp:127.0.0.1:8790"}).initial_storage
    assert initial is not None
    assert not initial.is_attached
    later = {"control_address": "unix:/run/x", "weights_id": "v1", "fleet": {"tp": [1, 2]}}
    assert _parse(later).weights_id == "v1"
    assert "needs storage.url" in _refusal({**later, "storage": {"capacity": "1GB"}})
    assert _parse({"storage": "file:///a"}).initial_storage.is_attached


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("tcp:0.0.0.0:8790", "the token must not cross a network"),
        ("unix:relative.sock", ""),
        ("tcp:127.0.0.1:0", ""),
        ("unix:/" + 107 * "x", "at most 107 bytes"),
    ],
)
def test_a_control_address_is_a_socket_or_a_port_of_this_host(address, hint):
    message = _refusal({"control_address": address})
    assert 'control_address must be "unix:/PATH" or "tcp:127.0.0.1:PORT"' in message
    assert hint in message


@pytest.mark.parametrize("name", ["capacity", "min_free"])
def test_option_of_another_backend_is_refused(name):
    message = _refusal({"storage": {"url": "redis://cache:6379", name: "8GiB"}})
    need = 'it needs the scheme of storage.url to be "file" or "plugin"'
    assert f"storage.{name} is given but has no effect: {need}" in message


def test_option_of_the_folder_is_given_to_a_plugin():
    extra = {"storage": {"url": "plugin://package.module/Backend", "capacity": "1GiB"}}
    assert _parse(extra).storage.capacity_bytes == 1 << 30


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete"])
def test_prefetch_timeouts_contradict_another_policy(policy):
    extra = {"storage": URL, "prefetch_policy": policy, "prefetch_timeout_base_s": 1.0}
    assert 'it needs prefetch_policy to be "timeout"' in _refusal(extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"storage": {"url": URL, "capacity": "32KiB"}},
            "min_object_bytes (default) 64KiB must not exceed storage.capacity 32KiB",
        ),
        (
            {"storage": {"url": URL, "write_backlog": "2MiB"}, "min_object_bytes": "4MiB"},
            "min_object_bytes 4MiB must not exceed storage.write_backlog 2MiB",
        ),
        (
            {"storage": {"url": URL, "exists_timeout_s": 20}},
            "storage.exists_timeout_s 20.0 must not exceed "
            "storage.operation_timeout_s (default) 10.0",
        ),
        (
            {"storage": URL, "prefetch_policy": "wait_complete", "defer_max_blocks": 0},
            "prefetch_policy wait_complete contradicts defer_max_blocks 0",
        ),
        (
            {"storage": "file:///x", "fleet": {"tp": [2]}, "storage_head_partition": 1},
            "storage_head_partition 1 contradicts fleet {'tp': [2], 'pp': [1]}, which computes",
        ),
    ],
)
def test_contradictory_pair_is_refused_with_both_values(extra, message):
    assert message in _refusal(extra)


def test_equal_bounds_do_not_contradict():
    extra = {"storage": {"url": URL, "capacity": "64KiB", "write_backlog": "64KiB"}}
    assert _parse(extra).storage.capacity_bytes == 64 << 10


def test_all_contradictions_are_told_at_once():
    message = _refusal({"prefetch_policy": "timeout", "fixed_weights": True})
    assert len(message.splitlines()) == 2


# description


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"storage": URL},
        {"storage": "redis://cache:6379/0"},
        {"host_memory": "2x", "page_size": 64, "kv_events": False},
        {"host_memory": "500MB", "sync_load_max_ms": "5ms"},
        {"host_memory": 0.3, "storage": URL, "prefetch_policy": "best_effort"},
        {"storage": {"url": URL, "capacity": "1.5GiB", "min_free": 0, "shutdown_grace_s": 0}},
    ],
)
def test_description_parses_back_to_the_same_configuration(extra):
    config = _parse(extra)
    described = json.loads(json.dumps(config.describe()))
    assert _parse(described) == config


def test_description_names_every_option_in_effect():
    extra = {
        "storage": "plugin://package.module/Backend",
        "control_address": "unix:/run/x",
        "rank_consensus": "report",
        "write_policy": "write_through_selective",
        "eviction": "lru",
    }
    described = _parse(extra).describe()
    assert list(described) == [*(option.name for option in TOP_OPTIONS), "storage"]
    names = [option.name.removeprefix("storage.") for option in STORAGE_OPTIONS]
    assert list(described["storage"]) == names


def test_description_leaves_out_options_without_effect():
    described = _parse({"storage": "redis://cache", "prefetch_policy": "best_effort"}).describe()
    assert "capacity" not in described["storage"]
    assert "prefetch_timeout_base_s" not in described
    assert described["prefetch_policy"] == "best_effort"
    without_storage = _parse({}).describe()
    apply = {"sync_load_max_ms"}  # needs what is the default
    needing = {name for name, option in OPTIONS.items() if option.needs}
    assert needing & set(without_storage) == apply
    assert not apply & set(_parse({"load_mode": "layerwise"}).describe())


def test_time_of_a_synchronous_load_is_refused_where_every_load_is_layerwise():
    with pytest.raises(ConfigError, match=r'sync_load_max_ms .* load_mode to be "async"'):
        _parse({"load_mode": "layerwise", "sync_load_max_ms": 5})


# secrets


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@cache:6379/0",
        f"redis://:{SECRET}%2F@y:z@cache:6379/0",
        f"redis://cache/0?password={SECRET}",
        f"s3://bucket/prefix?region=a&secret_access_key={SECRET}&x=1",
    ],
)
def test_secrets_never_show_in_a_configuration(url):
    config = _parse({"storage": {"url": url, "integrity_key": KEY}})
    assert config.storage.url == url
    assert config.storage.integrity_key == KEY
    texts = [f(c) for f in (repr, str, "{}".format) for c in (config, config.storage)]
    for text in [*texts, json.dumps(config.describe())]:
        assert SECRET not in text
        assert KEY not in text
        assert text.count("***") >= 2


@pytest.mark.parametrize(
    "extra",
    [
        {"storage": f"redis://u:{SECRET}@cache:port"},
        {"storage": f"redis://:{SECRET}/x@y:z@cache:6379/0"},
        {"storage": f"redis//u:{SECRET}@cache"},
        {"storage": f"u:{SECRET}@cache:6379"},
        {"storage": [f"redis://u:{SECRET}@cache"]},
        {"storge": f"redis://u:{SECRET}@cache"},
        {"page_size": f"redis://u:{SECRET}@cache"},
        {f"redis://u:{SECRET}@cache": 1},
        {"storage": {"url": URL, "integrity_keey": SECRET}},
        {"storage": {"url": URL, "integrity_key": SECRET * 4}},
        {"storage": {"url": URL, "integrity_key": [SECRET]}},
        {"storage": {"url": f"redis://u:{SECRET}@cache", "capacity": "1GiB"}},
        {"storage": {"url": [f"redis://u:{SECRET}@cache"]}},
        {"integrity_key": SECRET},
        {"storage": {"integrity_key": SECRET}},
    ],
    ids=repr,
)
def test_secrets_never_show_in_a_refusal(extra):
    assert SECRET not in _refusal(extra)


def test_parsing_logs_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        _parse({"storage": {"url": URL, "integrity_key": KEY}})
    assert caplog.text == ""


# fields


def test_fields_of_the_configuration_are_the_options():
    top = [field.name for field in dataclasses.fields(HiCacheConfig)]
    assert top == [*(option.field for option in TOP_OPTIONS), "storage"]
    storage = [field.name for field in dataclasses.fields(StorageConfig)]
    assert storage == [option.field for option in STORAGE_OPTIONS]


@pytest.mark.parametrize("name", OPTIONS)
def test_values_have_the_type_of_their_field(name):
    option = OPTIONS[name]
    owner = StorageConfig if "." in name else HiCacheConfig
    types = {field.name: field.type for field in dataclasses.fields(owner)}
    assert isinstance(option.kind.parse(option.example), types[option.field])
    if name != "storage.url":
        assert isinstance(option.default, types[option.field])

"""Redis URLs and options: what they mean, and what is refused before anything is connected."""

import sys

import pytest
from redis_under_test import backend_of

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_backends.redis_servers import RedisAddress
from vllm_hicache.storage_backends.registry import open_backend

SECRET = "swordfish"


def address_of(url: str, **options) -> RedisAddress:
    config = HiCacheConfig.parse({"storage": {"url": url, **options}}, None)
    return RedisAddress.parse(url, config.storage)


@pytest.mark.parametrize(
    ("url", "label", "options"),
    [
        ("redis://", "localhost:6379", {}),
        ("redis://cache:7000/3", "cache:7000", {"db": 3}),
        ("redis://cache?db=3", "cache:6379", {"db": 3}),
        ("redis://[::1]:7000", "::1:7000", {"host": "::1"}),
        ("redis://:a%2Fb@cache", "cache:6379", {"password": "a/b"}),
        ("rediss://u:p@cache", "cache:6379", {"username": "u", "password": "p"}),
        ("unix:///run/r.sock?db=1", "/run/r.sock", {"path": "/run/r.sock", "db": 1}),
        ("redis+unix://:p@/run/r.sock", "/run/r.sock", {"password": "p"}),
        ("redis+cluster://cache:7000", "cache:7000", {"port": 7000}),
        ("rediss+cluster://u:p@cache", "cache:6379", {"username": "u"}),
    ],
)
def test_url_is_read_as_redis_py_reads_it(url, label, options):
    address = address_of(url)
    assert address.label == label
    assert {name: address.options[name] for name in options} == options
    assert address.is_cluster == ("cluster" in url)
    assert ("SSL" in address.connection_class.__name__) == ("rediss" in url)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis://cache?prefix=a", {}, "cannot have prefix behind its question mark"),
        ("redis://cache?password=swordfish", {}, "cannot have password behind"),
        ("redis://cache/a", {}, "a database is a number"),
        ("redis://cache?db=a", {}, "Invalid value for 'db'"),
        ("redis+cluster://cache/1", {}, "a cluster has no databases"),
        ("redis+cluster://cache?db=1", {}, "a cluster has no databases"),
        ("redis+unix://run/r.sock", {}, "redis+unix:///run/redis.sock"),
        ("redis+unix://", {}, "redis+unix:///run/redis.sock"),
        ("redis://user@cache", {}, "a Redis user needs a password"),
        ("redis://cache", {"username": "user"}, "a Redis user needs a password"),
        ("redis://:swordfish@cache", {"password": "other"}, "storage.password is given and so"),
        ("redis://cache", {"ca_file": "/etc/hosts"}, "storage.ca_file needs TLS"),
        ("rediss://cache", {"ca_file": "/no/such.pem"}, "/no/such.pem, named by ssl_ca_certs"),
        ("rediss://cache", {"ca_file": "/etc/hosts"}, "cannot be connected to like this"),
        ("rediss://cache?ssl_cert_reqs=some", {}, "cannot be connected to like this"),
        ("redis://cache?ssl_cert_reqs=none", {}, "cannot be connected to like this"),
        ("redis://cache", {"key_prefix": "{a}"}, "must not contain braces"),
    ],
)
def test_url_or_option_that_makes_no_sense_is_refused(url, options, message):
    with pytest.raises(ConfigError) as refusal:
        backend_of(url, **options)
    assert message in str(refusal.value)
    assert SECRET not in str(refusal.value)


def test_password_shows_nowhere():
    address = address_of(f"redis://u:{SECRET}@cache")
    assert SECRET not in repr(address)
    assert SECRET not in repr(address_of("redis://cache", password=SECRET))


@pytest.mark.parametrize("missing", ["redis", "hiredis"])
def test_missing_package_names_the_extra(missing, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("vllm_hicache.storage_backends.redis"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "redis":
        for name in [n for n in sys.modules if n.startswith("redis.")]:
            monkeypatch.delitem(sys.modules, name)
    config = HiCacheConfig.parse({"storage": "redis://cache"}, None)
    with pytest.raises(ConfigError, match=rf"{missing}: pip install 'vllm-hicache\[redis\]'"):
        open_backend("redis://cache", config.storage)

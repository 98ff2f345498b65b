"""Values: what each kind of option takes, and the hint when it does not."""

import json

import pytest

from vllm_hicache import option_kinds
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Fleet
from vllm_hicache.options import OPTIONS

URL = "plugin://package.module/Backend"  # a plug-in takes every option


def _extra(name: str, value: object) -> dict:
    """Connector options in which the option is given and has an effect."""
    extra: dict = {}
    for given, text in (*_needed(name).items(), (name, value)):
        table, _, bare = given.rpartition(".")
        (extra.setdefault(table, {}) if table else extra)[bare] = text
    return extra


def _needed(name: str) -> dict[str, str]:
    """Values of other options with which the option has an effect."""
    needed = {"storage.url": URL} if name.startswith("storage.") else {}
    for need in OPTIONS[name].needs:
        other, _, choices = need.partition("=")
        choice = choices.partition("|")[0]
        if other == "storage.url":
            needed[other] = f"{choice or 'file'}:///place"
        else:
            needed[other] = choice or str(OPTIONS[other].example)
    return needed


def _value(name: str, value: object) -> object:
    config = HiCacheConfig.parse(_extra(name, value), None)
    return getattr(config.storage if "." in name else config, OPTIONS[name].field)


def _refusal(name: str, value: object) -> str:
    with pytest.raises(ConfigError) as refusal:
        HiCacheConfig.parse(_extra(name, value), None)
    return str(refusal.value)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "config_file"])
def test_example_is_accepted(name):
    assert _value(name, OPTIONS[name].example) == OPTIONS[name].kind.parse(OPTIONS[name].example)


@pytest.mark.parametrize("name", OPTIONS)
def test_null_means_the_default_or_is_refused(name):
    if OPTIONS[name].nullable:
        assert _value(name, None) == OPTIONS[name].default
    else:
        assert f"{name} must be {OPTIONS[name].kind.allowed}, got null" in _refusal(name, None)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("wrong", [[], {}, {"a": 1}, float("nan"), -1, "", "\x00"], ids=repr)
def test_value_of_no_kind_is_refused_by_name(name, wrong):
    message = _refusal(name, wrong)
    assert message.startswith(f"{name} must be {OPTIONS[name].kind.allowed}, got ")
    if wrong == {"a": 1} and OPTIONS[name].kind.name != "secret":
        assert message.endswith("got a table")


@pytest.mark.parametrize("name", ["host_memory", "storage.capacity", "storage.write_backlog"])
@pytest.mark.parametrize(
    "wrong", ["8", 8, -1, 0, "8gb", "8G", 8.5, True, "GiB", "8 8GiB", "-8GiB", 1 << 61], ids=repr
)
def test_size_without_a_sane_unit_is_refused(name, wrong):
    message = _refusal(name, wrong)
    assert f"{name} must be" in message
    assert f"got {json.dumps(wrong)}" in message
    if wrong in ("8", 8):
        assert 'is a unit missing, as in "8GiB"?' in message


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500 * 10**6),
        ("2TB", 2 * 10**12),
        ("64KiB", 64 << 10),
        ("65536B", 64 << 10),
        (8 << 30, 8 << 30),
    ],
)
def test_size_with_a_unit_is_exact(text, num_bytes):
    assert _value("storage.write_backlog", text) == num_bytes


def test_size_in_bytes_by_name_takes_small_numbers():
    assert _value("min_object_bytes", 1) == 1
    assert "a size is positive" in _refusal("min_object_bytes", 0)


def test_free_space_may_be_zero_but_not_a_forgotten_unit():
    assert _value("storage.min_free", 0) == 0
    assert "is a unit missing" in _refusal("storage.min_free", 8)


@pytest.mark.parametrize(
    ("value", "seconds"), [("50ms", 0.05), ("2s", 2.0), (3, 3.0), (0.5, 0.5), ("1min", 60.0)]
)
def test_duration_is_seconds(value, seconds):
    parsed = _value("storage.connect_timeout_s", value)
    assert isinstance(parsed, float)
    assert parsed == seconds


@pytest.mark.parametrize(
    "wrong", ["8", 0, -1, "5000s", 5000, "2h", "50 msec", float("inf"), True], ids=repr
)
def test_duration_out_of_range_or_without_a_known_unit_is_refused(wrong):
    assert "storage.operation_timeout_s must be seconds from 0.001 to 3600" in _refusal(
        "storage.operation_timeout_s", wrong
    )


def test_milliseconds_take_numbers_and_text_with_a_unit():
    assert _value("sync_load_max_ms", 5) == 5.0
    assert _value("sync_load_max_ms", "0.5s") == 500.0
    assert _value("sync_load_max_ms", 0) == 0.0
    assert "sync_load_max_ms must be" in _refusal("sync_load_max_ms", "2h")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("page_size", "256"), ("defer_max_blocks", "0"), ("fixed_weights", "true")],
)
def test_quoted_number_or_flag_is_refused_with_the_reason(name, wrong):
    assert "write it without quotes" in _refusal(name, wrong)


@pytest.mark.parametrize("wrong", [1.0, 256.5, True, 0, -1, "256 tokens"], ids=repr)
def test_page_size_must_be_a_whole_positive_number(wrong):
    assert "page_size must be a whole number from 1" in _refusal("page_size", wrong)


@pytest.mark.parametrize("wrong", [0, 1, "yes", "on"], ids=repr)
def test_flag_must_be_true_or_false(wrong):
    assert "fixed_weights must be true or false, got " in _refusal("fixed_weights", wrong)


def test_unknown_choice_is_refused_with_the_choices():
    message = _refusal("eviction", "fifo")
    assert (
        message
        == 'eviction must be "next_use" or "lru" or "lfu" or "slru" or "priority", got "fifo"'
    )


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("/var/cache", 'did you mean "file:///var/cache"?'),
        ("file://var/cache", "three slashes"),
        ("file:///", "below the root"),
        ("file:///a b", "percent-encoded"),
        ("FILE:///a", "lower-case"),
        ("redis://host:port", "host or port"),
        ("redis://[::1", "host or port"),
        ("hicache", "must be a URL"),
    ],
)
def test_bad_url_is_refused_with_a_hint(url, hint):
    assert hint in _refusal("storage.url", url)
    with pytest.raises(ConfigError, match=r"^storage must be a URL"):
        HiCacheConfig.parse({"storage": url}, None)


@pytest.mark.parametrize(
    "url", ["file:///a@b", "redis://u:p@h:1/0", "s3://bucket/a", "rediss://[::1]:6379"]
)
def test_good_url_is_kept_as_given(url):
    assert HiCacheConfig.parse({"storage": url}, None).storage.url == url


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("package.module:Backend", "plugin://package.module/Backend"),
        ("my_module:Backend?file=/a:b", "plugin://my_module/Backend?file=/a:b"),
        ("plugin://my_module:Backend?a=1&b=2", "plugin://my_module/Backend?a=1&b=2"),
        ("plugin://my_module/Backend", "plugin://my_module/Backend"),
    ],
)
def test_a_module_and_its_class_are_a_url(given, kept):
    assert HiCacheConfig.parse({"storage": given}, None).storage.url == kept
    assert HiCacheConfig.parse({}, {"HICACHE_STORAGE": given}).storage.url == kept


@pytest.mark.parametrize("url", ["localhost:6379", "a b:Backend", "/a:Backend", "module:function"])
def test_what_is_no_module_and_class_is_refused(url):
    assert "must be a URL" in _refusal("storage.url", url)


def test_integrity_key_takes_16_to_64_bytes():
    for key in ("k" * 16, "k" * 64, "\u00e9" * 8):
        assert _value("storage.integrity_key", key) == key
    for key in ("k" * 15, "k" * 65, "\u00e9" * 33, "\udcff" * 16):
        assert "text of 16 to 64 bytes" in _refusal("storage.integrity_key", key)


def test_long_value_is_cut_in_the_message():
    message = _refusal("weights_id", "w" * 5000)
    assert len(message) < 300
    assert "..." in message


def test_fleet_takes_lists_of_sizes_and_shows_them_sorted():
    kind = option_kinds.fleet()
    assert kind.parse({"tp": [4, 2, 4]}) == Fleet(tp=(2, 4), pp=(1,))
    given = kind.parse(kind.from_text('{"tp": [1], "pp": [2, 1]}'))
    assert kind.show(given) == {"tp": [1], "pp": [1, 2]}


@pytest.mark.parametrize(
    "value",
    [None, 2, "tp2", [], {}, {"pp": [1]}, {"tp": 2}, {"tp": []}, {"tp": [0]}, {"tp": [True]},
     {"tp": ["2"]}, {"tp": [1], "cp": [1]}],
)  # fmt: skip
def test_fleet_refuses_what_is_no_list_of_sizes(value):
    with pytest.raises(ConfigError):
        option_kinds.fleet().parse(value)

"""Keys and places: misspelt keys, the environment, the YAML file, and which source wins."""

import dataclasses
import json

import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.config_sources import nearest_env_name, nearest_option
from vllm_hicache.errors import ConfigError
from vllm_hicache.options import ENV_NAMES, OPTIONS, TOP_OPTIONS

URL = "file:///var/cache/hicache"
ANY_OPTION_URL = "plugin://package.module/Backend"  # a plug-in takes every option


def _parse(extra: dict, **env: str) -> HiCacheConfig:
    return HiCacheConfig.parse(extra, {f"HICACHE_{name}": text for name, text in env.items()})


def _refusal(extra: dict, **env: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        _parse(extra, **env)
    return str(refusal.value)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "hicache.yaml"
        path.write_text(text)
        return str(path)

    return write


def _one_letter_off(name: str, letters: str = "") -> set[str]:
    """Every deletion and swap, and the letters inserted and replacing at every place."""
    wrong = set()
    for at in range(len(name)):
        wrong.add(name[:at] + name[at + 1 :])
        wrong.add(name[:at] + name[at : at + 2][::-1] + name[at + 2 :])
        for letter in letters:
            wrong |= {name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :]}
    return wrong - {name, ""}


# keys


@pytest.mark.parametrize("name", OPTIONS)
def test_key_misspelt_by_one_letter_is_refused_with_the_right_one(name):
    table, _, bare = name.rpartition(".")
    for wrong in _one_letter_off(bare, "exz"):
        assert nearest_option(wrong, in_storage=bool(table)) == f'"{bare}"', wrong
    message = _refusal({"storage": {"url": URL, wrong: 1}} if table else {wrong: 1})
    assert f'unknown option "{wrong}"' in message
    assert f'did you mean "{bare}"?' in message


@pytest.mark.parametrize("env_name", ENV_NAMES)
def test_variable_misspelt_by_one_letter_is_refused_with_the_right_one(env_name):
    for wrong in _one_letter_off(env_name.removeprefix("HICACHE_")):
        assert nearest_env_name(f"HICACHE_{wrong}") == env_name, wrong
    wrong = env_name[:-1] + "Q"
    message = _refusal({}, **{wrong.removeprefix("HICACHE_"): "1"})
    assert message == f"unknown environment variable {wrong}; did you mean {env_name}?"


@pytest.mark.parametrize(
    ("extra", "suggestion"),
    [
        ({"capacity": "1GiB"}, '"capacity" in the table storage?'),
        ({"storage_capacity": "1GiB"}, '"capacity" in the table storage?'),
        ({"storage.capacity": "1GiB"}, '"capacity" in the table storage?'),
        ({"url": URL}, '"url" in the table storage?'),
        ({"storage": {"page_size": 64}}, '"page_size" outside the table storage?'),
        ({"storage": {"storage": URL}}, '"storage" outside the table storage?'),
        ({"storage": {"storage_capacity": 8}}, '"capacity"?'),
        ({"storge": URL}, '"storage"?'),
        ({"Page-Size": 64}, '"page_size"?'),
    ],
    ids=str,
)
def test_key_at_the_wrong_place_is_refused_with_its_place(extra, suggestion):
    assert f"did you mean {suggestion}" in _refusal(extra)


def test_unknown_key_without_a_near_one_lists_the_known_ones():
    message = _refusal({"pd_backends": ["nixl"]})
    assert "did you mean" not in message
    assert all(option.name in message for option in TOP_OPTIONS)
    assert ", storage, " in message
    assert nearest_option("pd_backends") is None


def test_all_problems_are_told_at_once():
    message = _refusal({"page_sise": 1, "eviction": "fifo", "storage": {"capacity": 8}}, STORGE=URL)
    for part in ("page_sise", "eviction must be", "storage.capacity must be", "HICACHE_STORGE"):
        assert part in message
    assert len(message.splitlines()) == 4


def test_key_that_is_no_text_is_refused():
    assert "unknown option 8" in _refusal({8: 1})


@pytest.mark.parametrize("wrong", [8, True, [URL], {}], ids=repr)
def test_storage_that_is_neither_url_nor_table_is_refused(wrong):
    assert "storage must be a URL, a table of options or null, got " in _refusal({"storage": wrong})


def test_null_url_is_refused_with_how_to_have_no_storage():
    assert "write storage: null" in _refusal({"storage": {"url": None}})


# precedence


def test_environment_overrides_options_which_override_the_file(yaml_file):
    path = yaml_file("page_size: 16\neviction: lfu\ndefer_max_blocks: 7\n")
    config = _parse({"config_file": path, "eviction": "slru", "defer_max_blocks": 8})
    assert (config.page_size, config.eviction, config.defer_max_blocks) == (16, "slru", 8)
    config = _parse({"config_file": path, "eviction": "slru"}, EVICTION="priority", PAGE_SIZE="32")
    assert (config.page_size, config.eviction, config.defer_max_blocks) == (32, "priority", 7)


def test_tables_of_several_sources_are_merged(yaml_file):
    path = yaml_file(f"storage:\n  url: {URL}\n  capacity: 5GiB\n  read_concurrency: 3\n")
    extra = {"config_file": path, "storage": {"capacity": "6GiB"}}
    storage = _parse(extra, STORAGE_READ_CONCURRENCY="4").storage
    assert (storage.url, storage.capacity_bytes, storage.read_concurrency) == (URL, 6 << 30, 4)


def test_null_of_a_stronger_source_restores_the_default(yaml_file):
    path = yaml_file(f"storage: {{url: {URL}, capacity: 5GiB}}\n")
    extra = {"config_file": path, "storage": {"capacity": None}}
    assert _parse(extra).storage.capacity_bytes is None


def test_null_page_size_of_the_environment_leaves_it_to_the_model():
    assert _parse({"page_size": 64}, PAGE_SIZE="none").page_size is None


def test_null_storage_of_a_stronger_source_drops_all_about_storage(yaml_file):
    path = yaml_file(f"storage: {{url: {URL}, capacity: 5GiB}}\nprefetch_policy: best_effort\n")
    config = _parse({"config_file": path, "page_size": 64}, STORAGE="none")
    assert config.storage is None
    assert config.page_size == 64
    assert config.prefetch_policy == "timeout"


def test_null_storage_of_a_stronger_source_leaves_what_has_nothing_to_do_with_storage(yaml_file):
    path = yaml_file("rank_consensus: raise\nrank_consensus_events: 9\n")
    config = _parse({"config_file": path}, STORAGE="none")
    assert (config.rank_consensus, config.rank_consensus_events) == ("raise", 9)


@pytest.mark.parametrize(("text", "mode"), [("off", "off"), ('"off"', "off"), ("abort", "abort")])
def test_off_may_stand_in_yaml_without_quotes(yaml_file, text, mode):
    assert _parse({"config_file": yaml_file(f"rank_consensus: {text}\n")}).rank_consensus == mode


# environment


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "config_file"])
def test_every_option_can_be_given_by_the_environment(name):
    option = OPTIONS[name]
    is_json = isinstance(option.example, bool | dict)
    text = json.dumps(option.example) if is_json else str(option.example)
    env = {"STORAGE": ANY_OPTION_URL} if option.needs else {}
    if "control_address" in option.needs:
        env["CONTROL_ADDRESS"] = "unix:/run/hicache.sock"
    if any(need.startswith("rank_consensus=") for need in option.needs):
        env["RANK_CONSENSUS"] = "report"
    if name == "admission":
        env["EVICTION"] = "lru"
    if name == "save_after_uses":
        env["WRITE_POLICY"] = "write_through_selective"
    config = _parse({}, **env, **{option.env_name.removeprefix("HICACHE_"): text})
    owner = config.storage if "." in name else config
    assert getattr(owner, option.field) == option.kind.parse(option.example)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PAGE_SIZE": "big"}, "HICACHE_PAGE_SIZE must be a whole number from 1 to 1048576, got"),
        ({"SAVE_AFTER_USES": "none"}, "HICACHE_SAVE_AFTER_USES must be"),
        ({"HOST_MEMORY": "8"}, "is a unit missing"),
        ({"HOST_MEMORY": ""}, 'HICACHE_HOST_MEMORY is empty; unset it, or write "none" for null'),
        ({"KV_EVENTS": "yes"}, "HICACHE_KV_EVENTS must be true or false"),
        ({"STORAGE": URL, "STORAGE_URL": URL}, "both give storage.url; unset one"),
        (
            {"STORAGE": "none", "STORAGE_URL": URL},
            "HICACHE_STORAGE is null but HICACHE_STORAGE_URL",
        ),
        ({"STORAGE_URL": "/var/cache"}, 'did you mean "file:///var/cache"?'),
    ],
    ids=str,
)
def test_bad_variable_is_refused_by_its_name(env, message):
    assert message in _refusal({}, **env)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("False", False), ("0", False), (" none ", None)],
)
def test_flag_of_the_environment(text, value):
    assert _parse({"kv_events": True}, KV_EVENTS=text).kv_events is value


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR", "REDIS_PORT_1_TCP"]
)
def test_variables_that_kubernetes_adds_for_a_service_are_ignored(name):
    assert _parse({}, **{name: "tcp://10.0.0.1:80"}) == _parse({})


def test_variables_of_others_are_ignored():
    assert HiCacheConfig.parse({}, {"PATH": "x", "SGLANG_HICACHE_X": "1"}) == _parse({})
    assert HiCacheConfig.parse({}, None) == _parse({})


def test_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("HICACHE_PAGE_SIZE", "48")
    assert HiCacheConfig.parse({}).page_size == 48


def test_secrets_of_the_environment_never_show():
    for env in (
        {"STORAGE_INTEGRITY_KEY": "swordfish"},
        {"STORGE_INTEGRITY_KEY": "swordfish0123456789"},
        {"STORAGE": "redis://:swordfish@cache:port"},
    ):
        assert "swordfish" not in _refusal({}, **env)


# file


def test_file_is_named_by_the_environment(yaml_file):
    path = yaml_file("page_size: 16")
    assert _parse({}, CONFIG_FILE=path) == dataclasses.replace(
        _parse({}), config_file=path, page_size=16
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise: 16", 'unknown option "page_sise" in '),
        ("page_size: [", "is not valid YAML: line 1"),
        ("page_size: 16\npage_size: 32", 'is not valid YAML: line 2: "page_size" is given twice'),
        ("- page_size", "must hold a table of options, got a list"),
        ("config_file: /etc/other.yaml", "cannot name another"),
        ("weights_id: 2024-99-99", "is not valid YAML: it cannot be parsed"),
        ("weights_id: 2024-01-01", "got a date"),
        ("8: 16", "unknown option 8 in "),
        ("storage: {url: file:///a, urls: b}", 'unknown option "urls" in the table storage in '),
        ("storage: {url: file:///a, url: b}", '"url" is given twice'),
    ],
)
def test_bad_file_is_refused_with_its_path(yaml_file, text, message):
    path = yaml_file(text)
    refusal = _refusal({"config_file": path})
    assert message in refusal
    assert path in refusal


def test_file_that_cannot_be_read_is_refused(tmp_path):
    missing = str(tmp_path / "none.yaml")
    message = f"config_file {missing} cannot be read: No such file or directory"
    assert _refusal({"config_file": missing}) == message
    assert _refusal({}, CONFIG_FILE=missing) == message
    assert "cannot be read: Is a directory" in _refusal({"config_file": str(tmp_path)})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8" in _refusal({"config_file": str(binary)})


def test_relative_path_of_the_file_is_refused():
    message = _refusal({"config_file": "hicache.yaml"})
    assert 'config_file must be an absolute path, got "hicache.yaml": a relative path' in message


def test_path_of_the_file_may_start_at_the_home_folder(yaml_file, monkeypatch, tmp_path):
    path = yaml_file("page_size: 16")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = _parse({"config_file": "~/hicache.yaml"})
    assert (config.page_size, config.config_file) == (16, path)


def test_empty_file_gives_nothing(yaml_file):
    path = yaml_file("# nothing yet\n")
    assert _parse({"config_file": path}) == dataclasses.replace(_parse({}), config_file=path)


@pytest.mark.parametrize(
    "text",
    [
        "integrity_key: *swordfish",
        "storage: {integrity_key: 'swordfish",
        'storage: {integrity_key: "sword\\fish", url: "swordfish}',
        "storage: !swordfish {}",
        "storage: redis://u:swordfish@cache: x",
        "storage: {integrity_key: swordfish\nx",
    ],
)
def test_secrets_of_a_broken_file_never_show(yaml_file, text):
    with pytest.raises(ConfigError, match="is not valid YAML") as refusal:
        _parse({"config_file": yaml_file(text)})
    assert "swordfish" not in str(refusal.value)
    assert refusal.value.__suppress_context__

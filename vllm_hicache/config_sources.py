"""Where options are given: connector options, a YAML file and ``HICACHE_*`` variables.

Their keys are checked and merged here; a refusal names the place and the nearest known key.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from vllm_hicache.errors import ConfigError
from vllm_hicache.masking import shown
from vllm_hicache.option import ENV_PREFIX, STORAGE, Option
from vllm_hicache.options import ENV_NAMES, OPTIONS, STORAGE_OPTIONS, TOP_OPTIONS

# Kubernetes adds these for a service whose name starts with "hicache"; they are not options.
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)\w*)?)"
)


class Given(NamedTuple):
    """A value as given, and how messages name its place."""

    value: object
    where: str


def read_sources(
    extra: Mapping[str, object], env: Mapping[str, str], problems: list[str]
) -> dict[str, Given]:
    """What is given for each option, by option name; the strongest source wins.

    Order: environment, ``extra``, YAML file. A null ``storage`` drops what weaker sources say
    about storage. Problems are appended; an unreadable file raises ConfigError.
    """
    layers = [_flat(extra, "", problems), _flat_env(env, problems)]
    if path := _config_file(layers):
        layers.insert(0, _flat(_read_yaml(path), f" in {path}", problems, is_file=True))
    for layer in layers:
        if STORAGE in layer and "storage.url" in layer:
            where, other = layer[STORAGE].where, layer["storage.url"].where
            problems.append(f"{where} is null but {other} is given; leave one out")
    given = _merge(layers)
    given.pop(STORAGE, None)
    return given


def _flat(
    table: Mapping[str, object], source: str, problems: list[str], *, is_file: bool = False
) -> dict[str, Given]:
    """Values by option name; ``storage`` itself stays only where it is null."""
    flat: dict[str, Given] = {}
    for key, value in table.items():
        if key == STORAGE:
            flat.update(_flat_storage(value, source, problems))
        elif key not in OPTIONS or "." in key:
            problems.append(_unknown(key, source))
        elif key == "config_file" and is_file:
            problems.append(f"config_file{source}: a configuration file cannot name another")
        else:
            flat[key] = Given(value, f"{key}{source}")
    return flat


def _flat_storage(value: object, source: str, problems: list[str]) -> dict[str, Given]:
    if value is None:
        return {STORAGE: Given(None, f"{STORAGE}{source}")}
    if isinstance(value, str):
        return {"storage.url": Given(value, f"{STORAGE}{source}")}
    if not isinstance(value, Mapping) or not value:
        got = "an empty table" if isinstance(value, Mapping) else shown(value)
        problems.append(
            f"{STORAGE}{source} must be a URL, a table of options or null, got {got}; "
            'for example "file:///var/cache/hicache"'
        )
        return {}
    flat = {}
    for key, inner in value.items():
        name = f"{STORAGE}.{key}"
        if name in OPTIONS:
            flat[name] = Given(inner, f"{name}{source}")
        else:
            problems.append(_unknown(key, source, in_storage=True))
    return flat


def _unknown(key: object, source: str, *, in_storage: bool = False) -> str:
    # The value is not shown: it may be a secret under a misspelt key.
    nearest = nearest_option(str(key), in_storage=in_storage)
    options = STORAGE_OPTIONS if in_storage else TOP_OPTIONS
    known = sorted(option.name.rpartition(".")[2] for option in options)
    if not in_storage:
        known = sorted([*known, STORAGE])
    place = f" in the table {STORAGE}" if in_storage else ""
    hint = f"; did you mean {nearest}?" if nearest else "."
    return f"unknown option {shown(key)}{place}{source}{hint} Known here: {', '.join(known)}"


def _flat_env(env: Mapping[str, str], problems: list[str]) -> dict[str, Given]:
    flat: dict[str, Given] = {}
    for env_name in sorted(name for name in env if name.startswith(ENV_PREFIX)):
        if _SERVICE_LINK.fullmatch(env_name):
            continue
        name, text = ENV_NAMES.get(env_name), env[env_name].strip()
        if name is None:
            nearest = nearest_env_name(env_name)
            hint = f"; did you mean {nearest}?" if nearest else ""
            problems.append(f"unknown environment variable {env_name}{hint}")
        elif not text:
            problems.append(f'{env_name} is empty; unset it, or write "none" for null')
        else:
            value = _of_text(name, text)
            key = "storage.url" if name == STORAGE and value is not None else name
            if key in flat:
                problems.append(f"{env_name} and {flat[key].where} both give {key}; unset one")
            flat[key] = Given(value, env_name)
    return flat


def _of_text(name: str, text: str) -> object:
    if (name == STORAGE or OPTIONS[name].nullable) and text.lower() in ("none", "null"):
        return None
    return text if name == STORAGE else OPTIONS[name].kind.from_text(text)


def _config_file(layers: list[dict[str, Given]]) -> str | None:
    """The file of the strongest source; a bad path is reported when all values are parsed."""
    entries = [layer["config_file"] for layer in layers if "config_file" in layer]
    if not entries:
        return None
    return cast("str | None", parsed(OPTIONS["config_file"], entries[-1], []))


class _GivenTwice(yaml.MarkedYAMLError):
    """A key stands twice in one table."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; plain YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise _GivenTwice(problem=f"{shown(key)} is given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> Mapping[str, object]:
    try:
        table = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"config_file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config_file {path} cannot be read: it is not UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"config_file {path} is not valid YAML: {_yaml_reason(error)}") from None
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"config_file {path} must hold a table of options, got {shown(table)}")
    return table


def _yaml_reason(error: Exception) -> str:
    """Line and cause. The parser quotes the file, which may hold secrets: quotes are cut."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "it cannot be parsed"
    problem = str(error.problem)
    if not isinstance(error, _GivenTwice):
        problem = re.sub(r"'[^']*'|\"[^\"]*\"", "...", problem)
    return f"line {error.problem_mark.line + 1}: {problem}"


def _merge(layers: list[dict[str, Given]]) -> dict[str, Given]:
    """Later layers win; a null ``storage`` drops what weaker layers say about storage."""
    merged: dict[str, Given] = {}
    for layer in layers:
        if STORAGE in layer:
            merged = {
                name: entry
                for name, entry in merged.items()
                if "." not in name and not _needs_storage(OPTIONS[name])
            }
        merged.update(layer)
    return merged


def _needs_storage(option: Option) -> bool:
    return any(need.startswith(f"{STORAGE}.") for need in option.needs)


def parsed(option: Option, entry: Given, problems: list[str]) -> object:
    """The value of the option; its default, and a problem, when it is refused."""
    if entry.value is None:
        if not option.nullable:
            is_url = option.name == "storage.url"
            hint = "without storage, write storage: null" if is_url else "leave it out"
            problems.append(f"{entry.where} must be {option.kind.allowed}, got null: {hint}")
        return option.default
    try:
        return option.kind.parse(entry.value)
    except ConfigError as refusal:
        got = "a value that is not shown" if option.kind.name == "secret" else shown(entry.value)
        hint = f": {refusal}" if str(refusal) else ""
        problems.append(f"{entry.where} must be {option.kind.allowed}, got {got}{hint}")
        return option.default


def nearest_option(given: str, *, in_storage: bool = False) -> str | None:
    """The known key that ``given`` most likely means, told where it belongs; None without one.

    >>> nearest_option("host_memroy")
    '"host_memory"'
    >>> nearest_option("storage_capacity")
    '"capacity" in the table storage'
    """
    spellings: dict[str, str] = {}
    for name in OPTIONS:
        table, _, bare = name.rpartition(".")
        spellings[name.replace(".", "_")] = name
        if table:
            spellings.setdefault(bare, name)
    spellings.setdefault(STORAGE, STORAGE)
    normal = given.lower().replace("-", "_").replace(".", "_")
    close = difflib.get_close_matches(normal, spellings, n=1, cutoff=0.6)
    if not close:
        return None
    table, _, bare = spellings[close[0]].rpartition(".")
    if bool(table) == in_storage:
        return f'"{bare}"'
    return f'"{bare}" in the table {table}' if table else f'"{bare}" outside the table {STORAGE}'


def nearest_env_name(given: str) -> str | None:
    """The known environment variable that ``given`` most likely means; None without one."""
    names = [name.removeprefix(ENV_PREFIX) for name in ENV_NAMES]
    close = difflib.get_close_matches(given.upper().removeprefix(ENV_PREFIX), names, n=1)
    return ENV_PREFIX + close[0] if close else None

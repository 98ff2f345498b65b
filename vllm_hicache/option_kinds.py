"""Kinds of option values: how each is read from YAML, JSON or the environment, and shown."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from vllm_hicache.control_address import ControlAddress
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Fleet
from vllm_hicache.host_memory import HostMemory, parse_host_memory
from vllm_hicache.masking import MASK, mask_url
from vllm_hicache.quantities import (
    BARE_BYTES_MIN,
    DURATION_UNITS,
    LONG_UNITS,
    exact_size,
    parse_bytes,
    parse_number,
    parse_seconds,
)

DURATION_MAX_S = 3600.0  # a larger one is taken for milliseconds
_LIFETIME_MAX_S = 3650 * 86400.0
_KEY_BYTES = (16, 64)  # keys of BLAKE2b are not longer


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    ``parse`` takes a JSON or YAML value and raises ConfigError with a hint (or no text) that
    the caller completes with name, value and ``allowed``; ``from_text`` turns the text of an
    environment variable into such a value; ``show`` gives what ``parse`` reads back.
    """

    name: str
    allowed: str
    parse: Callable[[object], object]
    from_text: Callable[[str], object] = str
    show: Callable[[object], object] = lambda value: value


def whole(minimum: int = 0, maximum: int = 1 << 31) -> Kind:
    """A whole number in ``[minimum, maximum]``."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(_unquoted(value))
        if not minimum <= value <= maximum:
            raise ConfigError("")
        return value

    return Kind("whole number", f"a whole number from {minimum} to {maximum}", parse, _number)


def size(*, bare_min: int = BARE_BYTES_MIN, zero: bool = False) -> Kind:
    """Bytes; a number without a unit below ``bare_min`` is refused as a forgotten unit."""
    allowed = 'a size with a unit, such as "8GiB" or "500MB", or a number of bytes'
    if bare_min > 1:
        allowed += f" from {bare_min}"
    return Kind(
        "size",
        allowed + (", or 0" if zero else ""),
        lambda value: parse_bytes(value, bare_min=bare_min, zero=zero),
        _number,
        lambda value: exact_size(cast("int", value)),
    )


def duration(minimum_s: float = 0.001) -> Kind:
    """Seconds as a float, at least ``minimum_s``."""

    def parse(value: object) -> float:
        seconds = parse_seconds(value)
        if not minimum_s <= seconds <= DURATION_MAX_S:
            raise ConfigError(f"{seconds:g} s is out of range")
        return seconds

    allowed = (
        f"seconds from {minimum_s:g} to {DURATION_MAX_S:g}, "
        'as a number or as text such as "50ms" or "2s"'
    )
    return Kind("duration", allowed, parse, _number)


def lifetime() -> Kind:
    """Seconds as a float, from one second to ten years."""

    def parse(value: object) -> float:
        seconds = parse_seconds(value, DURATION_UNITS | LONG_UNITS)
        if not 1 <= seconds <= _LIFETIME_MAX_S:
            raise ConfigError(f"{seconds:g} s is out of range")
        return seconds

    allowed = 'seconds from 1 as a number, or text such as "90min", "12h" or "7d"'
    return Kind("lifetime", allowed, parse, _number)


def milliseconds() -> Kind:
    """Milliseconds as a float; text with a unit is converted."""

    def parse(value: object) -> float:
        result = parse_seconds(value) * 1000 if isinstance(value, str) else parse_number(value)
        if result > DURATION_MAX_S * 1000:
            raise ConfigError("")
        return result

    allowed = 'milliseconds as a number >= 0, or text such as "3ms"'
    return Kind("milliseconds", allowed, parse, _number)


def choice(*names: str) -> Kind:
    """One of ``names``. YAML reads ``off`` without quotes as false, which stands for "off"."""

    def parse(value: object) -> str:
        if value is False and "off" in names:
            return "off"
        if isinstance(value, str) and value in names:
            return value
        raise ConfigError("")

    return Kind("choice", " or ".join(json.dumps(name) for name in names), parse)


def flag() -> Kind:
    """true or false."""

    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(_unquoted(value))
        return value

    def from_text(text: str) -> object:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)

    return Kind("flag", "true or false", parse, from_text)


def label() -> Kind:
    """Printable text of up to 256 characters."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable():
            raise ConfigError("")
        return value

    return Kind("text", "printable text of 1 to 256 characters", parse)


def secret(min_bytes: int = _KEY_BYTES[0], max_bytes: int = _KEY_BYTES[1]) -> Kind:
    """Text that is never shown."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable():
            raise ConfigError("")
        if not min_bytes <= len(value.encode()) <= max_bytes:
            raise ConfigError("")
        return value

    allowed = f"printable text of {min_bytes} to {max_bytes} bytes in UTF-8"
    return Kind("secret", allowed, parse, show=lambda _: MASK)


def memory() -> Kind:
    """``host_memory``: bytes, ratio of the device pool, fraction of what is available, auto."""
    allowed = (
        'bytes for each worker ("8GiB", 8589934592), a ratio of its device pool ("2x"), '
        'a fraction of the available host memory ("50%", 0.5), or "auto"'
    )

    def show(value: object) -> object:
        return (
            value.value
            if isinstance(value, HostMemory) and value.kind == "fraction"
            else str(value)
        )

    return Kind("host memory", allowed, parse_host_memory, _number, show)


def fleet() -> Kind:
    """``fleet``: tensor and pipeline parallel sizes of all engines that share the storage."""
    allowed = (
        'a table of the parallel sizes of all engines, such as {"tp": [2, 4], "pp": [1, 2]}; '
        "pp is [1] unless given"
    )

    def show(value: object) -> object:
        return {"tp": list(value.tp), "pp": list(value.pp)} if isinstance(value, Fleet) else value

    def from_text(text: str) -> object:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return Kind("fleet", allowed, _parse_fleet, from_text, show)


def _parse_fleet(value: object) -> Fleet:
    if not isinstance(value, Mapping) or not {"tp"} <= set(value) <= {"tp", "pp"}:
        raise ConfigError("")
    sizes = {"pp": [1], **value}
    for key, numbers in sizes.items():
        if not isinstance(numbers, list) or not numbers:
            raise ConfigError(f"{key} must be a list of sizes")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
            raise ConfigError(f"{key} must hold whole numbers from 1")
    return Fleet(tuple(sorted(set(sizes["tp"]))), tuple(sorted(set(sizes["pp"]))))


def absolute_path() -> Kind:
    """Path of a file, absolute or from the home folder: workers may start elsewhere."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ConfigError("")
        path = Path(value).expanduser()
        if not path.is_absolute():
            raise ConfigError("a relative path means another file in another process")
        return str(path)

    return Kind("path", "an absolute path", parse)


def control_address() -> Kind:
    """Where an engine takes commands."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError("")
        return str(ControlAddress.parse(value))

    return Kind("address", '"unix:/PATH" or "tcp:127.0.0.1:PORT"', parse)


_PLUGIN = re.compile(r"\A(?:plugin://)?([A-Za-z_][\w.]*):([A-Z]\w*)(\?.*)?\Z", re.ASCII)
"""`MODULE:CLASS?...` and `plugin://MODULE:CLASS?...` are short for `plugin://MODULE/CLASS?...`."""


def storage_url() -> Kind:
    """A URL; which schemes exist is for the backends to say."""
    allowed = 'a URL such as "file:///var/cache/hicache"'
    return Kind("URL", allowed, _parse_url, show=lambda value: mask_url(str(value)))


def _parse_url(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError("")
    value = _PLUGIN.sub(r"plugin://\1/\2\3", value)
    if "://" not in value:
        raise ConfigError(f'did you mean "file://{value}"?' if value.startswith("/") else "")
    if not value.isprintable() or " " in value:
        raise ConfigError("spaces and control characters must be percent-encoded")
    if not re.match(r"[a-z][a-z0-9+.-]*://", value):
        raise ConfigError("the scheme is lower-case letters and digits")
    try:
        parts = urlsplit(value)
        has_valid_port = parts.port is None or parts.port > 0
    except ValueError:
        has_valid_port = False
    if not has_valid_port:
        raise ConfigError(
            "its host or port is not valid; /, : and @ in a password are percent-encoded"
        )
    if parts.scheme == "file":
        _check_file_url(parts.netloc, parts.path)
    return value


def _check_file_url(host: str, path: str) -> None:
    if host:
        raise ConfigError("a file URL has three slashes, as in file:///var/cache/hicache")
    if not path.strip("/"):
        raise ConfigError("it must name a folder below the root of the file system")


def _number(text: str) -> object:
    """The number that the text of an environment variable spells, else the text."""
    if re.fullmatch(r"-?[0-9]{1,20}", text):
        return int(text)
    if re.fullmatch(r"-?[0-9]{1,20}\.[0-9]{1,20}", text):
        return float(text)
    return text


def _unquoted(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+|true|false", value, re.IGNORECASE):
        return "write it without quotes"
    return ""

"""Sizes and durations as people write them: "8GiB", "500MB", "50ms", and back to text."""

import re
from collections.abc import Mapping
from fractions import Fraction

from vllm_hicache.errors import ConfigError
from vllm_hicache.masking import shown

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SIZE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
DURATION_UNITS = {"ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60)}
LONG_UNITS = {"h": Fraction(3600), "d": Fraction(86400)}

# A bare number of bytes below this is taken for a forgotten unit, as in 8 for 8 GiB.
BARE_BYTES_MIN = MIB
_BYTES_MAX = 1 << 60

_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)")


def parse_bytes(value: object, *, bare_min: int = BARE_BYTES_MIN, zero: bool = False) -> int:
    """Bytes of a whole number or of text with a unit; a fraction of a byte is cut off.

    ``bare_min`` is the least number accepted without a unit, ``zero`` accepts 0 as well.
    Raises ConfigError with a hint and without the option's name, which the caller adds.

    >>> parse_bytes("8GiB"), parse_bytes("500MB"), parse_bytes(8 << 30)
    (8589934592, 500000000, 8589934592)
    """
    if isinstance(value, str):
        num_bytes = _bytes_of_text(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
        if 0 < num_bytes < bare_min:
            raise ConfigError(missing_unit(str(value)))
    elif isinstance(value, float):
        raise ConfigError("a number of bytes has no decimal point")
    else:
        raise ConfigError("")
    if num_bytes < 0 or (num_bytes == 0 and not zero):
        raise ConfigError("a size is positive")
    if num_bytes > _BYTES_MAX:
        raise ConfigError("that is more than 1024 PiB")
    return num_bytes


def missing_unit(number: str) -> str:
    """The hint for a number that is too small to be meant as bytes."""
    return f'is a unit missing, as in "{number}GiB"?'


def _bytes_of_text(text: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError("")
    number, unit = match.groups()
    if unit in SIZE_UNITS:
        return int(Fraction(number) * SIZE_UNITS[unit])
    if not unit:
        raise ConfigError(missing_unit(number))
    letter = unit[0].upper()
    if letter in "KMGT" and unit[1:].lower() in ("", "b", "ib"):
        raise ConfigError(f'write "{number}{letter}iB" (binary) or "{number}{letter}B" (decimal)')
    raise ConfigError(f"{shown(unit)} is not a unit of size")


def parse_seconds(value: object, units: Mapping[str, Fraction] = DURATION_UNITS) -> float:
    """Seconds of a number or of text with one of ``units``; never negative.

    Raises ConfigError with a hint and without the option's name.

    >>> parse_seconds("50ms"), parse_seconds("2s"), parse_seconds(3)
    (0.05, 2.0, 3.0)
    """
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise ConfigError("")
        number, unit = match.groups()
        if not unit:
            raise ConfigError("write a number without quotes, or add a unit")
        if unit not in units:
            *others, last = units
            known = f"{', '.join(others)} and {last} are"
            raise ConfigError(f"{shown(unit)} is not a unit of time; {known}")
        return float(Fraction(number) * units[unit])
    return parse_number(value)


def parse_number(value: object) -> float:
    """A finite number >= 0 as a float; ConfigError with a hint otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("")
    if not 0 <= value < float("inf"):
        raise ConfigError("")
    return float(value)


def exact_size(num_bytes: int) -> str:
    """The bytes as text that ``parse_bytes`` reads back unchanged.

    >>> exact_size(8 << 30), exact_size(500_000_000), exact_size(0)
    ('8GiB', '500000000B', '0B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % SIZE_UNITS[unit] == 0:
            return f"{num_bytes // SIZE_UNITS[unit]}{unit}"
    return f"{num_bytes}B"


def rounded_size(num_bytes: int) -> str:
    """The bytes for people, to two decimals.

    >>> rounded_size(3 << 29), rounded_size(1000)
    ('1.50 GiB', '1000 B')
    """
    for unit in ("TiB", "GiB", "MiB"):
        if num_bytes >= SIZE_UNITS[unit]:
            return f"{num_bytes / SIZE_UNITS[unit]:.2f} {unit}"
    return f"{num_bytes} B"

"""Values as the rank-consensus checker keeps them: small, unchangeable, equal where the originals
are equal, and the same in every process."""

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cache
from hashlib import blake2b
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

Plain: TypeAlias = None | bool | int | float | str

MAX_ITEMS = 16
"""Longer collections become their length and a digest: a plan may hold thousands of rows."""
MAX_TEXT = 200
MAX_INT = 1 << 63
"""Larger numbers do not travel as numbers."""


def plain(value: object) -> Plain:
    """The value now; what becomes of the original later does not matter. Collections and objects
    with fields become text. Of an object that has neither fields nor words of its own only the
    type is kept, because its address differs from process to process.

    >>> plain({3, 1, 2}), plain(["a", None])
    ('[1, 2, 3]', "['a', None]")
    >>> plain(np.zeros((6, 4), np.int32))
    '6x4 int32 3ce10289'
    """
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return cast("Plain", value)
    if kind is int:
        number = cast("int", value)
        return number if -MAX_INT <= number < MAX_INT else str(number)
    if kind is str:
        text = cast("str", value)
        return text if len(text) <= MAX_TEXT else f"{text[:40]}... {_digest(text.encode())}"
    if kind is tuple or kind is list:
        return _bounded(cast("list[object]", value)) if value else "[]"
    return _plain_object(value)


def _plain_object(value: object) -> Plain:
    if isinstance(value, np.ndarray):
        shape = "x".join(map(str, value.shape))
        return f"{shape} {_dtype_name(value.dtype)} {_digest(value.tobytes())}"
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return data.hex() if len(data) <= MAX_ITEMS else f"{len(data)} B {_digest(data)}"
    if isinstance(value, Mapping):
        return _bounded([(key, value[key]) for key in sorted(value, key=_inner)])
    if isinstance(value, AbstractSet):
        return _bounded(sorted(value, key=_inner))
    if isinstance(value, tuple | list):
        return _bounded(value)
    return _plain_fields(value)


def _bounded(items: Iterable[object]) -> str:
    texts = [_inner(item) for item in items]
    joined = ", ".join(texts)
    if len(texts) > MAX_ITEMS:
        return f"{len(texts)} items {_digest(joined.encode())}"
    return f"[{joined}]"


def _inner(value: object) -> str:
    """Text of a part. Strings are quoted, so that different collections read differently."""
    return repr(plain(value)) if isinstance(value, str) else str(plain(value))


def _plain_fields(value: object) -> Plain:
    kind: Any = type(value)  # mypy takes no type for hashable
    fields = _fields(kind)
    if fields is None:
        return plain(repr(value))
    if not fields:
        return type(value).__name__
    inner = ", ".join([f"{field}={_inner(getattr(value, field))}" for field in fields])
    return f"{type(value).__name__}({inner})"


@cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of objects of this type; None where they are told by their ``repr``."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return () if kind.__repr__ is object.__repr__ else None


@cache
def _dtype_name(dtype: "np.dtype[np.generic]") -> str:
    return str(dtype)  # numpy takes longer for this than for all the rest


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=4).hexdigest()

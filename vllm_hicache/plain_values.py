"""Values as the rank-consensus checker keeps them: small, unchangeable, equal where the originals
are equal, and the same in every process."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from hashlib import blake2b
from typing import TypeAlias, cast

import msgspec
import numpy as np

Plain: TypeAlias = "None | bool | int | float | str | tuple[Plain, ...]"

MAX_ITEMS = 16
"""Longer collections become their length and a digest: a plan may hold thousands of rows."""
MAX_TEXT = 200


def plain(value: object) -> Plain:
    """The value now; what becomes of the original later does not matter.

    Of objects that have no fields and no words of their own only the type is kept, because their
    address differs from process to process.

    >>> plain({3, 1, 2})
    (1, 2, 3)
    >>> plain(np.zeros((6, 4), np.int32))
    '6x4 int32 3ce10289'
    """
    if value is None or type(value) in (int, float, bool):
        return cast("Plain", value)
    if type(value) is str:
        return value if len(value) <= MAX_TEXT else f"{value[:40]}... {_digest(value.encode())}"
    if type(value) is tuple and not value:
        return ()
    return _plain_object(value)


def _plain_object(value: object) -> Plain:
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.ndarray):
        shape = "x".join(str(size) for size in value.shape)
        return f"{shape} {value.dtype} {_digest(value.tobytes())}"
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return data.hex() if len(data) <= MAX_ITEMS else f"{len(data)} B {_digest(data)}"
    if isinstance(value, Mapping):
        return _bounded([(plain(key), plain(value[key])) for key in sorted(value, key=repr)])
    if isinstance(value, AbstractSet):
        return _bounded(sorted((plain(item) for item in value), key=repr))
    if isinstance(value, tuple | list):
        return _bounded([plain(item) for item in value])
    return _plain_fields(value)


def _bounded(items: "list[Plain] | list[tuple[Plain, Plain]]") -> Plain:
    if len(items) <= MAX_ITEMS:
        return tuple(items)
    return f"{len(items)} items {_digest(repr(items).encode())}"


def _plain_fields(value: object) -> Plain:
    name = type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(value))
    elif isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
    elif type(value).__repr__ is object.__repr__:
        return name
    else:
        return plain(repr(value))
    inner = ", ".join(f"{field}={spelled(plain(getattr(value, field)))}" for field in fields)
    return f"{name}({inner})"


def spelled(value: Plain) -> str:
    """A plain value in a message: text without quotes, collections in brackets."""
    if isinstance(value, tuple):
        return f"[{', '.join(spelled(item) for item in value)}]"
    return str(value)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=4).hexdigest()

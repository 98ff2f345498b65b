"""Records of namespaces: what a digest in a store stands for, and how two of them differ.

A record is the JSON of a ``Namespace`` in the order of its fields, so that anyone can compute the
digest again, also of records with fields that this version does not know.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import msgspec

from vllm_hicache.keys import Namespace
from vllm_hicache.masking import shown
from vllm_hicache.storage import MAX_RECORD_BYTES

Fields: TypeAlias = Mapping[str, str | int]
ABSENT = "-"
"""Stands for a field that one of two records does not have."""
MAX_NEAR = 3
"""So many records a message names."""

# With the same checkpoint, dtype or quantisation may change row sizes and grid along with
# themselves; another checkpoint is near only when it is nearly all that differs.
_MAX_DIFFERENCES = 8
_MAX_DIFFERENCES_OF_WEIGHTS = 2
_decode = msgspec.json.Decoder(dict[str, str | int]).decode


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which another namespace differs from this one."""

    field: str
    here: str | int
    there: str | int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A namespace that a store holds, and all its differences from this one, in field order."""

    digest: str
    differences: tuple[Difference, ...]


def encode_record(namespace: Namespace) -> bytes:
    """The record of a namespace: compact JSON, a few hundred bytes."""
    return msgspec.json.encode(namespace)


def decode_record(digest: str, record: bytes) -> dict[str, str | int] | None:
    """The fields of a record; None unless ``digest`` is what its fields hash to."""
    if len(record) > MAX_RECORD_BYTES:
        return None
    try:
        fields = _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    computed = "hc1-" + sha256(msgspec.msgpack.encode(fields)).hexdigest()[:16]
    return fields if computed == digest else None


def record_digest(record: bytes) -> str:
    """The digest of a record that is known to be sound."""
    return "hc1-" + sha256(msgspec.msgpack.encode(_decode(record))).hexdigest()[:16]


def differences(here: Fields, there: Fields) -> tuple[Difference, ...]:
    """Every field in which two records differ, in the order of ``here``."""
    names = [*here, *(name for name in there if name not in here)]
    return tuple(
        Difference(name, here.get(name, ABSENT), there.get(name, ABSENT))
        for name in names
        if here.get(name, ABSENT) != there.get(name, ABSENT)
    )


def neighbours(own: bytes, records: Mapping[str, bytes]) -> list[Neighbour]:
    """All sound records but one's own, the nearest first."""
    here = _decode(own)
    found = []
    for digest, record in records.items():
        there = decode_record(digest, record)
        if there is not None and record != own:
            found.append(Neighbour(digest, differences(here, there)))
    return sorted(found, key=_distance)


def near_misses(own: bytes, records: Mapping[str, bytes]) -> list[Neighbour]:
    """Records of the same model that differ in few fields; the nearest first, ``MAX_NEAR`` at
    most."""
    return [one for one in neighbours(own, records) if _is_near(one)][:MAX_NEAR]


def near_miss_line(near: Iterable[Neighbour]) -> str:
    """What the log says of near misses."""
    parts = [
        f"this engine uses {_listed(one, 'here')}, the store holds objects of the same model with "
        f"{_listed(one, 'there')} (namespace {one.digest})"
        for one in near
    ]
    return f"HiCache storage: 0 hits so far; {'; '.join(parts)}"


def _listed(one: Neighbour, side: str) -> str:
    # What another process wrote is shown escaped and short.
    return ", ".join(f"{d.field}={_bare(getattr(d, side))}" for d in one.differences)


def _bare(value: str | int) -> str:
    return shown(value)[1:-1] if isinstance(value, str) else str(value)


def _checkpoint(weights: str | int) -> str:
    """The part of a fingerprint that names the files, without dtype, quantisation, overrides."""
    return str(weights).partition(";")[0]


def _is_other_checkpoint(one: Neighbour) -> bool:
    return any(
        d.field == "weights" and _checkpoint(d.here) != _checkpoint(d.there)
        for d in one.differences
    )


def _is_near(one: Neighbour) -> bool:
    if any(d.field == "model_id" for d in one.differences):
        return False
    limit = _MAX_DIFFERENCES_OF_WEIGHTS if _is_other_checkpoint(one) else _MAX_DIFFERENCES
    return len(one.differences) <= limit


def _distance(one: Neighbour) -> tuple[bool, int, str]:
    return _is_other_checkpoint(one), len(one.differences), one.digest

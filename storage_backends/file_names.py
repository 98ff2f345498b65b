"""Which names in the folder are ours: objects, temporary files and who writes them.

Everything else in the folder belongs to someone else and is neither counted nor touched.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

NUM_FOLDERS = 4096
"""Folders named by the first three hex digits of the page hash. At 10 million objects each holds
2,400 (listed in 5 ms); fewer folders make listing under the lock slow, more cost inodes."""

_OBJECT = (
    r"[0-9a-f]{64}_(?P<namespace>[A-Za-z0-9]+-[0-9a-f]+)_L[0-9]+-[0-9]+"
    r"(?:_H[0-9]+(?:_P[0-9a-f]{8})?)?"
)
_IS_OBJECT = re.compile(_OBJECT).fullmatch
_IS_TEMPORARY = re.compile(
    rf"\.{_OBJECT}\.(?P<boot>[0-9a-f]{{32}})-(?P<pid_namespace>[0-9]+)-(?P<pid>[0-9]+)"
    r"-(?P<start>[0-9]+)\.[0-9]+\.tmp"
).fullmatch

_UNDECIDABLE_AGE_S = 3600.0
"""A temporary file of another host, container or boot is a leftover when it is this old: its
writer cannot be asked, and a write that runs for an hour is far beyond any deadline."""

_sequence = itertools.count()


@dataclass(frozen=True, slots=True)
class Writer:
    """A process, named so that no later process is ever taken for it."""

    boot: str  # 32 hex digits
    pid_namespace: int
    pid: int
    start: int  # clock ticks from boot to the start of the process

    @classmethod
    def current(cls) -> Writer:
        """The calling process."""
        return _identify(os.getpid())


def is_object(name: str) -> bool:
    """Whether a name is an object's.

    >>> is_object("ab" * 32 + "_hc1-0123456789abcdef_L0-8_H0"), is_object("README")
    (True, False)
    >>> is_object("ab" * 32 + "_hc1-0123456789abcdef_L0-8_H0_P89abcdef")
    True
    """
    return _IS_OBJECT(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a name is a temporary file's of any writer."""
    return _IS_TEMPORARY(name) is not None


def namespace_of(name: str) -> str | None:
    """The namespace in an object's name; None when it is not an object's name."""
    matched = _IS_OBJECT(name)
    return matched["namespace"] if matched else None


def folder_index(name: str) -> int:
    """Number of the folder that holds this object.

    >>> folder_index("00f" + "0" * 61 + "_hc1-0123456789abcdef_L0-8_H0")
    15
    """
    return int(name[:3], 16)


def folder_name(index: int) -> str:
    """Name of a folder by its number.

    >>> folder_name(15)
    '00f'
    """
    return f"{index:03x}"


def temporary_name(name: str, writer: Writer) -> str:
    """A name beside the object that no other write uses, and that tells who writes."""
    identity = f"{writer.boot}-{writer.pid_namespace}-{writer.pid}-{writer.start}"
    return f".{name}.{identity}.{next(_sequence)}.tmp"


def is_leftover(temporary: str, modified_s: float, observer: Writer) -> bool:
    """Whether the writer of a temporary file is dead. In doubt, age decides.

    `modified_s` is the file's time of modification in seconds since the epoch.
    """
    matched = _IS_TEMPORARY(temporary)
    if matched is None:
        return False
    same_boot = matched["boot"] == observer.boot
    if not same_boot or int(matched["pid_namespace"]) != observer.pid_namespace:
        return time.time() - modified_s > _UNDECIDABLE_AGE_S
    return _start_ticks(int(matched["pid"])) != int(matched["start"])


@functools.lru_cache(maxsize=1)
def _identify(pid: int) -> Writer:
    """The process `pid`, which is this one: a fork has another pid and so misses the cache."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return Writer(
        boot=boot.strip().replace("-", ""),
        pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
        pid=pid,
        start=_start_ticks(pid) or 0,
    )


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])

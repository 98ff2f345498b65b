"""How much host memory a worker's pool may take: what was asked, what the machine has left.

The kernel's estimate and the limits of every enclosing control group (version 1 and 2) count.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Literal

from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.quantities import GIB, MIB, exact_size, parse_bytes, rounded_size

logger = logging.getLogger(__name__)

# Left to vLLM, the page cache and everybody else before the default takes its fraction.
AUTO_RESERVE_BYTES = 10 * GIB
AUTO_FRACTION = 0.8

_LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USAGE_FILES = {1: "memory.usage_in_bytes", 2: "memory.current"}

_RATIO = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?x")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The ``host_memory`` option.

    ``bytes``: that many for each worker. ``device_ratio``: times the worker's device pool.
    ``fraction``: of what the host has available, shared evenly by its workers. ``auto``:
    the same after a reserve of 10 GiB.
    """

    kind: Literal["bytes", "device_ratio", "fraction", "auto"]
    value: float

    def __str__(self) -> str:
        if self.kind == "auto":
            return "auto"
        if self.kind == "bytes":
            return exact_size(int(self.value))
        return f"{self.value}x" if self.kind == "device_ratio" else f"{self.value}"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What one source leaves: ``available_bytes`` more until its limit, after reclaim."""

    source: str
    available_bytes: int


def parse_host_memory(value: object) -> HostMemory:
    """The option from its text or number; ConfigError with a hint, without the option's name.

    >>> parse_host_memory("2x")
    HostMemory(kind='device_ratio', value=2.0)
    >>> parse_host_memory("50%") == parse_host_memory(0.5)
    True
    """
    if value is None or value == "auto":
        return HostMemory("auto", AUTO_FRACTION)
    if isinstance(value, float):
        return _fraction(value)
    if isinstance(value, str):
        if match := _RATIO.fullmatch(value):
            return _ratio(float(match[1]))
        if match := _PERCENT.fullmatch(value):
            return _fraction(float(Fraction(match[1]) / 100))
    if value in (0, "0") and not isinstance(value, bool):
        raise ConfigError(
            "storage is reached through host memory too, so there must be some; "
            "to run without it, remove the connector"
        )
    return HostMemory("bytes", parse_bytes(value))


def _ratio(ratio: float) -> HostMemory:
    if ratio == 0:
        raise ConfigError("a ratio of the device pool is positive")
    return HostMemory("device_ratio", ratio)


def _fraction(fraction: float) -> HostMemory:
    if not 0 < fraction <= 1:
        raise ConfigError(
            "a number with a decimal point is a fraction, above 0 and up to 1; "
            'write "2.5x" for a ratio of the device pool'
        )
    return HostMemory("fraction", fraction)


def resolve_host_bytes(
    spec: HostMemory,
    *,
    device_pool_bytes: int,
    workers_on_host: int,
    available: int,
    limited_by: str = "",
) -> int:
    """Bytes of the pool of ONE worker; the pools of all workers of the host fit ``available``.

    device_pool_bytes  vLLM's KV cache of this worker
    workers_on_host    all workers that will allocate a pool on this host, this one included
    available          bytes left on the host, before any of them has allocated
    limited_by         what sets ``available``, for the message

    Raises ConfigError with asked, available and what to change when it does not fit.
    """
    if workers_on_host < 1 or device_pool_bytes < 0 or available < 0:
        raise InvariantBroken(
            f"workers on host {workers_on_host} must be >= 1, "
            f"device pool {device_pool_bytes} and available {available} bytes >= 0"
        )
    limit = f"{rounded_size(available)} are available on this host" + (
        f" (limited by {limited_by})" if limited_by else ""
    )
    if spec.kind == "auto":
        return _auto_bytes(spec, workers_on_host, available, limit)
    if spec.kind == "fraction":
        num_bytes = int(spec.value * available) // workers_on_host
    elif spec.kind == "device_ratio":
        num_bytes = int(spec.value * device_pool_bytes)
    else:
        num_bytes = int(spec.value)
    if num_bytes * workers_on_host > available:
        raise ConfigError(
            f"host_memory {spec} asks for {rounded_size(num_bytes)} for each of "
            f"{workers_on_host} workers, {rounded_size(num_bytes * workers_on_host)} together, "
            f"but {limit}. "
            f'Lower host_memory to at most "{available // workers_on_host // MIB}MiB", run fewer '
            "workers on this host, free memory, or raise the memory limit of the container"
        )
    if num_bytes <= device_pool_bytes:
        logger.warning(
            "host_memory %s gives %s, no more than the device pool of %s: "
            "most of what it keeps is on the device as well",
            spec,
            rounded_size(num_bytes),
            rounded_size(device_pool_bytes),
        )
    return num_bytes


def _auto_bytes(spec: HostMemory, workers_on_host: int, available: int, limit: str) -> int:
    budget = available - AUTO_RESERVE_BYTES
    num_bytes = int(spec.value * budget) // workers_on_host
    if num_bytes <= 0:
        raise ConfigError(
            f"host_memory is not set, and its default leaves {rounded_size(AUTO_RESERVE_BYTES)} "
            f"to others, but {limit}. "
            f'Set host_memory, for example to "{available // (2 * workers_on_host) // MIB}MiB", '
            "free memory, or raise the memory limit of the container"
        )
    return num_bytes


def available_host_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes that this process may still allocate: the least of the kernel and all cgroups."""
    return tightest_memory_limit(proc).available_bytes


def tightest_memory_limit(proc: Path = Path("/proc")) -> MemoryLimit:
    """The source that leaves least: MemAvailable, or a control group of this process.

    A group leaves its limit (memory.max, memory.high; version 1: memory.limit_in_bytes) minus
    what its tree uses, page cache and reclaimable slab not counted. Raises ConfigError where
    the kernel tells nothing.
    """
    limits = [_mem_available(proc), *_cgroup_limits(proc)]
    return min(limits, key=lambda limit: limit.available_bytes)


def _mem_available(proc: Path) -> MemoryLimit:
    fields = _key_values(proc / "meminfo")
    if "MemAvailable:" not in fields:
        raise ConfigError(
            f"{proc / 'meminfo'} has no MemAvailable, so host_memory cannot be checked: "
            "a Linux kernel from 3.14 on is needed"
        )
    return MemoryLimit("MemAvailable of the kernel", fields["MemAvailable:"] * 1024)


def _cgroup_limits(proc: Path) -> Iterator[MemoryLimit]:
    for version, directory in _cgroup_directories(proc):
        prefix = "" if version == 2 else "total_"
        used = _number(directory / _USAGE_FILES[version])
        if used is None:
            continue
        stat = _key_values(directory / "memory.stat")
        reclaimable = sum(
            stat.get(prefix + name, 0)
            for name in ("active_file", "inactive_file", "slab_reclaimable")
        )
        for name in _LIMIT_FILES[version]:
            limit = _number(directory / name)
            if limit is not None:
                left = limit - max(0, used - reclaimable)
                yield MemoryLimit(str(directory / name), max(0, left))


def _cgroup_directories(proc: Path) -> Iterator[tuple[int, Path]]:
    """(version, directory) of this process's memory groups, innermost first, up to the mount."""
    group_of_version = _own_groups(proc)
    for root, mount_point, filesystem, options in _mounts(proc):
        version = {"cgroup2": 2, "cgroup": 1}.get(filesystem)
        if version not in group_of_version or (version == 1 and "memory" not in options):
            continue
        group = group_of_version[version]
        # A group outside the mounted subtree (another cgroup namespace) shows only the mount.
        inside = group.is_relative_to(root) and ".." not in group.parts
        relative = group.relative_to(root) if inside else PurePosixPath()
        for path in (relative, *relative.parents):
            yield version, mount_point / path


def _own_groups(proc: Path) -> dict[int, PurePosixPath]:
    groups = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            groups[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            groups[1] = PurePosixPath(path)
    return groups


def _mounts(proc: Path) -> Iterator[tuple[str, Path, str, list[str]]]:
    """(root inside the file system, mount point, file system type, super options)."""
    for line in _lines(proc / "self" / "mountinfo"):
        mount, _, device = line.partition(" - ")
        root, mount_point = mount.split(" ")[3:5]
        filesystem, _, options = device.split(" ")[:3]
        yield _unescape(root), Path(_unescape(mount_point)), filesystem, options.split(",")


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The file's number; None without the file or for ``max``."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _key_values(path: Path) -> dict[str, int]:
    words = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) >= 2 and pair[1].isdecimal()}

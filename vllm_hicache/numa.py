"""NUMA nodes: which one a PCI device is on, and how a thread gets its memory from there."""

import ctypes
import os
import platform
from pathlib import Path

_SYSFS = Path("/sys")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_MAX_NODES = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def pci_node(address: str, sysfs: Path = _SYSFS) -> int | None:
    """NUMA node of a PCI device such as ``0000:9b:00.0``; None where the host has one node only,
    or does not say."""
    nodes = list((sysfs / "devices/system/node").glob("node[0-9]*"))
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and len(nodes) > 1 else None


def prefer_node(node: int, sysfs: Path = _SYSFS) -> bool:
    """Memory that this thread touches first comes from ``node`` as long as that has some.

    Asks the kernel for it or, where a container may not, runs on the node's own CPUs. False where
    neither is possible.
    """
    return _set_mempolicy(node) or _run_on(node, sysfs)


def _set_mempolicy(node: int) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or node >= _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    done: int = ctypes.CDLL(None).syscall(number, _MPOL_PREFERRED, mask, _MAX_NODES + 1)
    return done == 0


def _run_on(node: int, sysfs: Path) -> bool:
    """Linux takes the affinity of process 0 for that of the calling thread."""
    try:
        text = (sysfs / "devices/system/node" / f"node{node}" / "cpulist").read_text()
        cpus = _cpus(text) & os.sched_getaffinity(0)
        if cpus:
            os.sched_setaffinity(0, cpus)
    except (OSError, ValueError):
        return False
    return bool(cpus)


def _cpus(text: str) -> set[int]:
    """Numbers of a list such as ``0-2,8``.

    >>> _cpus("0-2,8")
    {0, 1, 2, 8}
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus

"""Memory from the NUMA node of a device."""

import ctypes
import os
import platform
import threading
from pathlib import Path

import pytest

from vllm_hicache import numa

GPU = "0000:9b:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A host of two nodes with one GPU on the second; its nodes are this host's CPUs, in turn."""
    device = tmp_path / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    cpus = sorted(os.sched_getaffinity(0))
    for node, own in enumerate((cpus[1:], cpus[:1])):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, own)) + "\n")
    return tmp_path


def test_a_device_is_on_the_node_that_the_kernel_names(sysfs):
    assert numa.pci_node(GPU, sysfs) == 1
    assert numa.pci_node("0000:00:00.0", sysfs) is None


def test_where_there_is_no_choice_there_is_no_node(sysfs):
    (sysfs / "bus/pci/devices" / GPU / "numa_node").write_text("-1\n")
    assert numa.pci_node(GPU, sysfs) is None
    (sysfs / "bus/pci/devices" / GPU / "numa_node").write_text("0\n")
    assert numa.pci_node(GPU, sysfs) == 0
    (sysfs / "devices/system/node/node1/cpulist").unlink()
    (sysfs / "devices/system/node/node1").rmdir()
    assert numa.pci_node(GPU, sysfs) is None


def _in_a_thread(work) -> object:
    """What a thread of its own returns: policy and affinity are the thread's."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def _policy() -> tuple[int, int]:
    """The thread's memory policy and the first 64 nodes of its mask."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, 1025, None, 0) == 0
    return mode.value, mask[0]


def test_a_thread_prefers_its_node_and_no_other_thread_does():
    assert _in_a_thread(lambda: (numa.prefer_node(0), _policy())) == (True, (1, 1))
    assert _policy() == (0, 0)


def test_where_the_kernel_lets_nobody_choose_the_thread_runs_on_the_nodes_cpus(sysfs, monkeypatch):
    monkeypatch.setattr(numa, "_SET_MEMPOLICY", {})
    before = os.sched_getaffinity(0)
    near = _in_a_thread(lambda: (numa.prefer_node(1, sysfs), os.sched_getaffinity(0)))
    assert near == (True, set(sorted(before)[:1]))
    assert os.sched_getaffinity(0) == before
    assert _in_a_thread(lambda: numa.prefer_node(7, sysfs)) is False

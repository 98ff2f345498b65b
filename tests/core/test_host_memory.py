"""Available host memory from fake kernel files, and the share of one worker."""

import logging
from pathlib import Path

import pytest

from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.host_memory import (
    HostMemory,
    available_host_bytes,
    parse_host_memory,
    resolve_host_bytes,
    tightest_memory_limit,
)

GIB = 1 << 30
MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


class FakeKernel:
    """A /proc and cgroup mounts in a folder, with 64 GiB available."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mount = folder / "cgroup fs"
        (self.proc / "self").mkdir(parents=True)
        self.set_meminfo("MemTotal: 99 kB", f"MemAvailable: {64 * GIB // 1024} kB")

    def set_meminfo(self, *lines: str) -> None:
        (self.proc / "meminfo").write_text("\n".join(lines) + "\n")

    def set_groups(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def set_mount(self, filesystem: str, options: str, root: str = "/") -> None:
        escaped = str(self.mount).replace(" ", r"\040")
        line = f"31 23 0:28 {root} {escaped} rw,relatime shared:9 - {filesystem} none {options}\n"
        (self.proc / "self" / "mountinfo").write_text("1 0 8:1 / / rw - ext4 /dev/a rw\n" + line)

    def write(self, group: str, **files: object) -> None:
        folder = self.mount / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")

    def available(self) -> int:
        return available_host_bytes(self.proc)


@pytest.fixture
def kernel(tmp_path):
    return FakeKernel(tmp_path)


@pytest.fixture
def kernel_v2(kernel):
    kernel.set_groups("0::/pod/box")
    kernel.set_mount("cgroup2", "rw,nsdelegate")
    return kernel


@pytest.fixture
def kernel_v1(kernel):
    kernel.set_groups("9:name=systemd:/", "4:cpu,memory:/pod/box", "0::/")
    kernel.set_mount("cgroup", "rw,cpu,memory")
    return kernel


def test_without_cgroups_the_kernel_estimate_is_available(kernel):
    assert kernel.available() == 64 * GIB


def test_cgroup_limit_minus_use_is_available(kernel_v2):
    kernel_v2.write("pod/box", memory_max=8 * GIB, memory_current=3 * GIB)
    assert kernel_v2.available() == 5 * GIB
    limit = tightest_memory_limit(kernel_v2.proc)
    assert limit.source == str(kernel_v2.mount / "pod/box/memory.max")


def test_cgroup_limit_above_the_kernel_estimate_does_not_raise_it(kernel_v2):
    kernel_v2.write("pod/box", memory_max=900 * GIB, memory_current=0)
    assert kernel_v2.available() == 64 * GIB


def test_memory_high_counts_as_a_limit(kernel_v2):
    kernel_v2.write("pod/box", memory_max="max", memory_high=6 * GIB, memory_current=GIB)
    assert kernel_v2.available() == 5 * GIB


def test_limit_of_an_enclosing_group_counts_with_its_whole_use(kernel_v2):
    kernel_v2.write("pod/box", memory_max="max", memory_high="max", memory_current=GIB)
    kernel_v2.write("pod", memory_max=10 * GIB, memory_current=7 * GIB)
    assert kernel_v2.available() == 3 * GIB


def test_page_cache_of_the_group_is_available(kernel_v2):
    stat = f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}\nslab_reclaimable {GIB}\nshmem 5"
    kernel_v2.write("pod/box", memory_max=8 * GIB, memory_current=5 * GIB, memory_stat=stat)
    assert kernel_v2.available() == 7 * GIB


def test_group_above_its_limit_has_nothing_available(kernel_v2):
    kernel_v2.write("pod/box", memory_high=GIB, memory_current=2 * GIB)
    assert kernel_v2.available() == 0


def test_version_1_limit_minus_use_is_available(kernel_v1):
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    kernel_v1.write(
        "pod/box",
        memory_limit_in_bytes=8 * GIB,
        memory_usage_in_bytes=3 * GIB,
        memory_stat=stat,
    )
    assert kernel_v1.available() == 6 * GIB


def test_version_1_limit_of_an_enclosing_group_counts(kernel_v1):
    kernel_v1.write("pod/box", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=GIB)
    kernel_v1.write("pod", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)
    kernel_v1.write("", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=9 * GIB)
    assert kernel_v1.available() == GIB


def test_unlimited_version_1_group_leaves_the_kernel_estimate(kernel_v1):
    kernel_v1.write("pod/box", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=GIB)
    assert kernel_v1.available() == 64 * GIB


def test_container_that_sees_only_its_own_group_reads_the_mount(kernel):
    kernel.set_groups("4:memory:/docker/1234")
    kernel.set_mount("cgroup", "rw,memory", root="/docker/1234")
    kernel.write("", memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=GIB)
    assert kernel.available() == 3 * GIB


@pytest.mark.parametrize(
    ("group", "root"), [("/../other", "/"), ("/../other", "/docker"), ("/elsewhere", "/docker")]
)
def test_group_outside_the_mounted_tree_falls_back_to_the_mount(kernel, group, root):
    kernel.set_groups(f"0::{group}")
    kernel.set_mount("cgroup2", "rw", root=root)
    kernel.write("", memory_max=4 * GIB, memory_current=GIB)
    kernel.write("../other", memory_max=GIB, memory_current=GIB)
    assert kernel.available() == 3 * GIB


def test_version_1_mount_of_another_controller_is_ignored(kernel):
    kernel.set_groups("4:memory:/", "3:cpu:/")
    kernel.set_mount("cgroup", "rw,cpu")
    kernel.write("", memory_limit_in_bytes=GIB, memory_usage_in_bytes=0)
    assert kernel.available() == 64 * GIB


def test_kernel_that_tells_nothing_is_refused(kernel):
    kernel.set_meminfo("MemTotal: 99 kB")
    with pytest.raises(ConfigError, match="no MemAvailable"):
        kernel.available()


def test_this_machine_has_memory_available():
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < available_host_bytes() <= total_kib * 1024


def _resolve(
    option: object, *, device: int = GIB, workers: int = 1, available: int = 64 * GIB
) -> int:
    return resolve_host_bytes(
        parse_host_memory(option),
        device_pool_bytes=device,
        workers_on_host=workers,
        available=available,
        limited_by="memory.max",
    )


@pytest.mark.parametrize(
    ("option", "workers", "expected"),
    [
        ("8GiB", 1, 8 * GIB),
        ("8GiB", 8, 8 * GIB),
        (8 * GIB, 2, 8 * GIB),
        ("64GiB", 1, 64 * GIB),
        ("2.5x", 4, 5 * GIB // 2),
        ("50%", 1, 32 * GIB),
        (0.5, 4, 8 * GIB),
        (1.0, 1, 64 * GIB),
    ],
)
def test_share_of_one_worker(option, workers, expected):
    assert _resolve(option, workers=workers) == expected


def test_default_is_four_fifths_of_what_is_left_after_the_reserve():
    assert _resolve(None, workers=4) == int(0.8 * 54 * GIB) // 4


def test_pools_of_all_workers_fit_what_is_available():
    for workers in range(1, 17):
        for option in (None, 1.0, "33%", 0.1):
            assert _resolve(option, workers=workers) * workers <= 64 * GIB


def test_more_than_available_is_refused_with_asked_available_and_what_to_change():
    with pytest.raises(ConfigError) as refusal:
        _resolve("20GiB", workers=4)
    message = str(refusal.value)
    for part in ("20GiB", "20.00 GiB for each of 4 workers", "80.00 GiB together"):
        assert part in message
    assert "64.00 GiB are available on this host (limited by memory.max)" in message
    assert 'Lower host_memory to at most "16384MiB"' in message
    assert _resolve("16384MiB", workers=4) == 16 * GIB


def test_one_byte_more_than_available_is_refused():
    assert _resolve(64 * GIB) == 64 * GIB
    with pytest.raises(ConfigError, match="asks for"):
        _resolve(64 * GIB + 1)


def test_ratio_beyond_what_is_available_is_refused():
    with pytest.raises(ConfigError, match=r"host_memory 3\.0x asks for 120\.00 GiB for each of 1"):
        _resolve("3x", device=40 * GIB)


@pytest.mark.parametrize("available", [0, 6 * GIB, 10 * GIB])
def test_default_without_room_beyond_the_reserve_is_refused(available):
    with pytest.raises(ConfigError, match="host_memory is not set") as refusal:
        _resolve(None, workers=2, available=available)
    assert f'Set host_memory, for example to "{available // 4 // MIB}MiB"' in str(refusal.value)


def test_pool_no_larger_than_the_device_pool_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, logger="vllm_hicache"):
        _resolve("1GiB", device=2 * GIB)
        assert "no more than the device pool of 2.00 GiB" in caplog.text
        caplog.clear()
        _resolve("3GiB", device=2 * GIB)
        assert caplog.text == ""


@pytest.mark.parametrize("workers", [0, -1])
def test_host_without_workers_breaks_an_invariant(workers):
    with pytest.raises(InvariantBroken, match="workers on host"):
        _resolve("8GiB", workers=workers)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("8GiB", "8GiB"),
        (8 * GIB, "8GiB"),
        ("500MB", "500000000B"),
        ("2x", "2.0x"),
        ("50%", "0.5"),
        (None, "auto"),
        ("auto", "auto"),
    ],
)
def test_option_is_shown_as_written(option, text):
    assert str(parse_host_memory(option)) == text


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("8", 'as in "8GiB"'),
        (8, 'as in "8GiB"'),
        (1048575, "is a unit missing"),
        (-1, "positive"),
        ("-8GiB", ""),
        (0, "remove the connector"),
        ("0", "remove the connector"),
        ("0GiB", "positive"),
        ("0x", "positive"),
        ("0%", "up to 1"),
        ("101%", "up to 1"),
        (1.5, 'write "2.5x"'),
        (-0.5, "up to 1"),
        (float("nan"), "up to 1"),
        ("8gib", '"8GiB" (binary) or "8GB"'),
        ("8G", '"8GiB" (binary) or "8GB"'),
        ("8 gallons", "not a unit"),
        (True, ""),
        (False, ""),
        ([8], ""),
    ],
    ids=repr,
)
def test_bad_option_is_refused_with_a_hint(option, hint):
    with pytest.raises(ConfigError) as refusal:
        parse_host_memory(option)
    assert hint in str(refusal.value)


def test_smallest_number_without_a_unit_is_one_mebibyte():
    assert parse_host_memory(MIB) == HostMemory("bytes", MIB)
    assert parse_host_memory("64KiB") == HostMemory("bytes", 64 << 10)

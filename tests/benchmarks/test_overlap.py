"""The profile of copies beside the forward: what it makes of a device's events."""

from dataclasses import dataclass

import pytest

from vllm_hicache.benchmarks.overlap import lanes_of, overlap_ms, parse_options, plan, plot, report


@dataclass(frozen=True)
class Event:
    """What `lanes_of` asks of an event of torch's profiler; times in us."""

    kernel: str
    begin: int
    length: int
    num_bytes: int = 0
    device: str = "DeviceType.CUDA"

    def name(self):
        return self.kernel

    def start_ns(self):
        return self.begin * 1000

    def duration_ns(self):
        return self.length * 1000

    def nbytes(self):
        return self.num_bytes

    def device_type(self):
        return self.device


EVENTS = [
    Event("gemm", 1000, 400),
    Event("gemm", 1400, 100),
    Event("move_units", 1450, 100),
    Event("Memcpy HtoD (Pinned -> Device)", 1300, 400, 1 << 20),
    Event("Memcpy HtoD (Pinned -> Device)", 1900, 1, 64),
    Event("Memcpy DtoH (Device -> Pinned)", 2000, 100, 1 << 20),
    Event("Memset (Device)", 2200, 100),
    Event("cudaLaunchKernel", 900, 10, device="DeviceType.CPU"),
]


def test_events_are_told_apart_and_count_from_the_first():
    lanes = lanes_of(EVENTS)
    assert lanes["forward"] == [pytest.approx((0.0, 0.5))]
    assert lanes["relayout"] == [pytest.approx((0.45, 0.55))]
    assert lanes["copies to the device"] == [pytest.approx((0.3, 0.7))]
    assert lanes["copies to host"] == [pytest.approx((1.0, 1.1))]
    assert overlap_ms(lanes["copies to the device"], lanes["forward"]) == pytest.approx(0.2)


def test_the_table_says_how_much_of_each_ran_beside_the_forward(tmp_path):
    lanes = lanes_of(EVENTS)
    lines = {line.split("  ")[0]: line.split() for line in report(lanes).splitlines()}
    assert lines["copies to the device"][-3:] == ["0.4", "0.2", "50%"]
    assert lines["copies to host"][-3:] == ["0.1", "0.0", "0%"]
    plot(tmp_path / "overlap.png", lanes, "title")
    assert (tmp_path / "overlap.png").read_bytes()[:4] == b"\x89PNG"


def test_the_device_holds_both_prompts_and_host_memory_all(tmp_path):
    options = parse_options(["--tokens", "4096", "--load-mode", "layerwise"])
    planned = plan(options, tmp_path)
    tokens = planned.engine["kv_cache_memory_bytes"] // planned.bytes_per_token
    assert tokens > 3 * 4096
    assert planned.connector_options["host_memory"] > planned.engine["kv_cache_memory_bytes"]
    assert planned.connector_options["load_mode"] == "layerwise"

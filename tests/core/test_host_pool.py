"""Memory behind host slots."""

import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from vllm_hicache import host_pool
from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.host_pool import HostPool

MIB = 1 << 20


@pytest.fixture
def pool():
    pool = HostPool(8, [4096])
    yield pool
    pool.close()


def _resident_shared_bytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def test_slots_begin_empty_and_one_after_the_other(pool):
    assert pool.tensors[0].shape == (8, 4096)
    assert pool.tensors[0].is_contiguous()
    assert not pool.tensors[0].any()
    assert pool.tensors[0].data_ptr() % mmap.PAGESIZE == 0


def test_child_process_shares_the_memory_through_the_inherited_descriptor(pool):
    pool.tensors[0][3] = 7
    child = (
        "import mmap, sys; memory = mmap.mmap(int(sys.argv[1]), 8 * 4096);"
        "assert memory[3 * 4096 - 1 : 4 * 4096 + 1] == bytes(1) + bytes([7]) * 4096 + bytes(1);"
        "memory[5 * 4096] = 9"
    )
    command = [sys.executable, "-c", child, str(pool.fd)]
    subprocess.run(command, pass_fds=[pool.fd], check=True)
    assert pool.tensors[0][5, 0] == 9
    assert pool.tensors[0].sum(dtype=torch.int64) == 7 * 4096 + 9


def test_regions_of_one_memory_begin_at_memory_pages_and_do_not_touch():
    pool = HostPool(3, [4096, 1000, 8192])
    assert pool.bases == (0, 12288, 16384)
    assert pool.num_bytes == 16384 + 3 * 8192 == os.fstat(pool.fd).st_size
    for i, region in enumerate(pool.tensors):
        assert region.shape == (3, (4096, 1000, 8192)[i])
        assert region.is_contiguous()
        assert region.data_ptr() - pool.tensors[0].data_ptr() == pool.bases[i]
        region.fill_(i + 1)
    memory = mmap.mmap(pool.fd, pool.num_bytes)
    found = bytes([1]) * 12288 + bytes([2]) * 3000 + bytes(1096) + bytes([3]) * 24576
    assert memory[:] == found
    memory.close()
    pool.close()


def test_pool_made_in_inference_mode_can_be_written_in_any():
    with torch.inference_mode():
        pool = HostPool(4, [4096])
        half = pool.tensors[0].split(2)[1]
    half.view(-1)[::4096].bitwise_or_(3)
    assert pool.tensors[0][:, 0].tolist() == [0, 0, 3, 3]
    pool.close()


def test_descriptor_is_not_inherited_by_accident(pool):
    assert not os.get_inheritable(pool.fd)
    assert os.fstat(pool.fd).st_size == 8 * 4096


def test_memory_is_resident_only_where_touched_and_gone_after_close():
    before = _resident_shared_bytes()
    pool = HostPool(64, [4 * MIB])
    assert _resident_shared_bytes() - before < MIB
    pool.tensors[0][10:14] = 1
    touched = _resident_shared_bytes() - before
    assert 16 * MIB <= touched < 20 * MIB
    pool.close()
    gc.collect()
    assert _resident_shared_bytes() - before < MIB


def test_close_releases_the_descriptor_and_may_be_repeated():
    pool = HostPool(1, [4096])
    descriptor = pool.fd
    pool.close()
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(InvariantBroken, match="closed"):
        _ = pool.tensors


def test_view_outlives_the_pool():
    pool = HostPool(2, [4096])
    view = pool.tensors[0][1]
    view.fill_(5)
    pool.close()
    gc.collect()
    assert (view == 5).all()


@pytest.mark.parametrize("shape", [(0, 4096), (4, 0), (-1, 4096)])
def test_pool_without_a_slot_is_refused(shape):
    with pytest.raises(ConfigError, match=f"got {shape[0]} of {shape[1]} bytes"):
        HostPool(shape[0], [shape[1]])


@pytest.mark.parametrize(("strides", "said"), [([], "0"), ([4096, 0], r"4096 \+ 0")])
def test_pool_without_a_region_or_with_an_empty_one_is_refused(strides, said):
    with pytest.raises(ConfigError, match=f"got 4 of {said} bytes"):
        HostPool(4, strides)


def test_pool_that_cannot_be_made_leaves_no_descriptor_behind():
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, ValueError, OverflowError)):
        HostPool(1 << 40, [1 << 22])
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_is_made_ready_is_resident_and_keeps_what_it_holds(monkeypatch):
    monkeypatch.setattr("vllm_hicache.layout.REGISTRATION_BYTES", 8 * MIB)
    pool = HostPool(16, [MIB, 2 * MIB])
    pool.tensors[1][5] = 7
    before = _resident_shared_bytes()
    assert [pool.make_ready(piece) for piece in pool.pieces[:2]] == ["", ""]
    assert 14 * MIB - MIB <= _resident_shared_bytes() - before <= 16 * MIB + MIB
    assert [pool.make_ready(piece) for piece in pool.pieces[2:]] == [""] * 4
    assert _resident_shared_bytes() - before <= 48 * MIB
    assert pool.tensors[1].sum(dtype=torch.int64) == 7 * 2 * MIB
    pool.close()


def test_an_old_kernel_backs_memory_by_touching_it(monkeypatch):
    monkeypatch.setattr("vllm_hicache.memory_pages._POPULATE_WRITE", 999)  # EINVAL
    pool = HostPool(8, [MIB])
    pool.tensors[0][2] = 9
    before = _resident_shared_bytes()
    assert pool.make_ready(pool.pieces[0]) == ""
    assert _resident_shared_bytes() - before >= 7 * MIB - MIB
    assert pool.tensors[0].sum(dtype=torch.int64) == 9 * MIB
    pool.close()


def test_memory_that_the_kernel_does_not_have_is_a_refusal_and_no_crash(pool):
    os.ftruncate(pool.fd, 0)  # pages behind the end of a file cannot be backed
    assert "no memory for 32768 bytes more (" in pool.make_ready(pool.pieces[0])


def test_a_pool_without_a_cuda_device_has_no_node_and_pins_nothing():
    pool = HostPool(4, [4096], device=torch.device("cpu"))
    assert (pool.is_pinned, pool.numa_node) == (False, None)
    assert pool.make_ready(pool.pieces[0]) == ""
    assert not pool.tensors[0].is_pinned()
    pool.close()


@pytest.fixture
def slow_driver(monkeypatch):
    """Unpinning takes 50 ms a piece; the addresses of pieces that were unpinned."""
    unpinned: list[int] = []

    class Driver:
        def cudaHostUnregister(self, address):  # noqa: N802
            time.sleep(0.05)
            unpinned.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    return unpinned


def test_closing_does_not_wait_for_the_driver_and_the_next_pool_does(slow_driver):
    pool = HostPool(8, [MIB])
    addresses = [slot.data_ptr() for slot in pool.tensors[0]]
    pool._pinned += addresses
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 0.05
    assert len(slow_driver) < 8
    HostPool(1, [MIB]).close()
    assert sorted(slow_driver) == addresses


def test_the_memory_stays_mapped_while_it_is_unpinned_and_no_longer(slow_driver):
    pool = HostPool(4, [MIB], name="seldom-name")
    pool._pinned += [slot.data_ptr() for slot in pool.tensors[0]]
    pool.close()
    assert "seldom-name" in Path("/proc/self/maps").read_text()
    host_pool._await_releases(10)
    assert len(slow_driver) == 4
    gc.collect()
    assert "seldom-name" not in Path("/proc/self/maps").read_text()


def test_an_earlier_pool_that_is_never_let_go_delays_the_next_one_for_a_while_only(
    slow_driver, monkeypatch
):
    monkeypatch.setattr(host_pool, "RELEASE_S", 0.1)
    pool = HostPool(20, [MIB])
    pool._pinned += [slot.data_ptr() for slot in pool.tensors[0]]
    pool.close()
    started = time.monotonic()
    HostPool(1, [MIB]).close()
    assert 0.1 <= time.monotonic() - started < 0.5
    assert len(slow_driver) < 20
    host_pool._await_releases(10)


@pytest.mark.gpu
def test_pinned_pieces_are_seen_by_the_device_and_released(monkeypatch):
    monkeypatch.setattr("vllm_hicache.layout.REGISTRATION_BYTES", 3 * MIB)
    pool = HostPool(5, [2 * MIB, MIB], device=torch.device("cuda:0"))
    assert {pool.make_ready(piece) for piece in pool.pieces} == {""}
    assert all(slot.is_pinned() for region in pool.tensors for slot in region)
    device = torch.arange(2 * MIB, device="cuda").to(torch.uint8)
    for slot in pool.tensors[0]:
        slot.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(slot, device.cpu()) for slot in pool.tensors[0])
    pool.unpin()
    assert not any(slot.is_pinned() for region in pool.tensors for slot in region)
    pool.close()


@pytest.mark.gpu
def test_pieces_are_pinned_while_another_thread_captures_a_graph(monkeypatch):
    """vLLM captures its graphs while the pool grows; what is not allowed then spoils both."""
    monkeypatch.setattr("vllm_hicache.layout.REGISTRATION_BYTES", MIB)
    pool = HostPool(64, [MIB], device=torch.device("cuda:0"))
    refusals: list[str] = []

    def pin() -> None:
        pool.enter_thread()
        refusals.extend(pool.make_ready(piece) for piece in pool.pieces)

    thread = threading.Thread(target=pin)
    numbers, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    numbers += 0  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        thread.start()
        numbers += 1
        thread.join()
    graph.replay()
    graph.replay()
    assert numbers.tolist() == [2.0] * 8
    assert refusals == [""] * 64
    pool.close()


@pytest.mark.gpu
def test_a_refusal_of_the_driver_spoils_nothing_else():
    """An error of CUDA belongs to the thread that met it."""
    pool = HostPool(4, [MIB], device=torch.device("cuda:0"))
    refusals: list[str] = []

    def pin_twice() -> None:
        pool.enter_thread()
        refusals.extend(pool.make_ready(pool.pieces[0]) for _ in range(2))

    thread = threading.Thread(target=pin_twice)
    thread.start()
    thread.join()
    assert refusals[0] == ""
    assert "could not be pinned" in refusals[1]
    assert pool.tensors[0].is_pinned()
    assert pool.tensors[0].to("cuda").sum().item() == 0
    pool.close()


@pytest.mark.gpu
def test_a_pinned_pool_that_was_closed_makes_room_for_the_next_one():
    device = torch.device("cuda:0")
    for _ in range(2):
        pool = HostPool(16, [64 * MIB], name="seldom-pinned", device=device)
        assert {pool.make_ready(piece) for piece in pool.pieces} == {""}
        assert pool.tensors[0][15].is_pinned()
        pool.close()
    host_pool._await_releases(60)
    gc.collect()
    assert "seldom-pinned" not in Path("/proc/self/maps").read_text()
    assert torch.ones(8, device=device).sum().item() == 8

"""The copy engine: order, completion, failure and shutdown."""

import queue
import threading
import time

import numpy as np
import pytest
import torch

from vllm_hicache.device_layout import DeviceGroup, RowFormat, TensorPlacement, device_layers
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_pool import HostPool
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.layout import LayerSpan, PageLayout
from vllm_hicache.tiers import Direction
from vllm_hicache.transfer import CopyEngine

SAVE, LOAD = Direction.SAVE, Direction.LOAD
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUT = PageLayout(4, LayerSpan(0, 2), 2, 0, 2, 2, 2, 32, 0)  # 4 tokens, 2 layers, 2 heads
NUM_BLOCKS = 6
NOTHING = (np.zeros((0, 4), dtype=np.int32),)
OUT_OF_RANGE = (np.array([[0, 0, NUM_BLOCKS, 0]], dtype=np.int32),)


def _copy(slot, block):
    return (np.array([[slot, 0, block, 0]], dtype=np.int32),)


class Gate:
    """A copier whose copies wait until they are let through, one by one."""

    def __init__(self, copier):
        self._copier = copier
        self._permits = threading.Semaphore(0)
        self.started = queue.SimpleQueue()
        self.threads = set()

    def open(self, times=1):
        self._permits.release(times)

    def save(self, copies, host):
        self._pass(self._copier.save, copies, host)

    def load(self, copies, host):
        self._pass(self._copier.load, copies, host)

    def _pass(self, copy, copies, host):
        self.threads.add(threading.current_thread().name)
        self.started.put(copies)
        assert self._permits.acquire(timeout=10)
        copy(copies, host)


class Rig:
    """An engine over a real pool, a real copier and a KV buffer of known bytes."""

    def __init__(self, device="cpu", gated=False):
        self.device = torch.device(device)
        block = LAYOUT.page_bytes // 2
        placement = TensorPlacement((0, 1), NUM_BLOCKS, NUM_BLOCKS * block, block)
        rows = RowFormat(2, 16, 16, 2)
        layers = device_layers(placement, rows, layout_name="LBNHC", block_size=4)
        self.kv = torch.arange(2 * NUM_BLOCKS * block, device=device).to(torch.uint8)
        self.pool = HostPool(4, [LAYOUT.slot_stride], device=self.device)
        assert [self.pool.make_ready(piece) for piece in self.pool.pieces] == [""]
        self.published = []
        self.seconds = []
        group = DeviceGroup(0, 4, (layers,))
        copier = PoolsCopier([PageCopier(self.kv, [group], LAYOUT)])
        self.gate = Gate(copier) if gated else None
        self.engine = CopyEngine(
            self.gate or copier,
            self.pool,
            publish=self._note,
            device=self.device,
        )

    def _note(self, direction, op_id, is_ok, seconds):
        self.published.append((direction, op_id, is_ok))
        self.seconds.append(seconds)

    def page(self, block):
        """Bytes of a block in page order: layer after layer."""
        return self.kv.view(2, NUM_BLOCKS, -1)[:, block].flatten().cpu()

    def slot(self, slot):
        return self.pool.tensors[0][slot, : LAYOUT.page_bytes]


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **options):
        rigs.append(Rig(*args, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.gate is not None:
            rig.gate.open(100)
        assert rig.engine.close(10)
        rig.pool.close()


@pytest.mark.parametrize("device", DEVICES)
def test_saved_pages_come_back_and_are_published_in_order(make_rig, device):
    rig = make_rig(device)
    pages = [rig.page(block).clone() for block in range(NUM_BLOCKS)]
    for op_id, (slot, block) in enumerate([(0, 3), (1, 5), (2, 1)]):
        rig.engine.submit(SAVE, op_id, _copy(slot, block), rig.engine.fence())
    assert rig.engine.wait(SAVE, 2, 10)
    assert rig.published == [(SAVE, op_id, True) for op_id in range(3)]
    assert [torch.equal(rig.slot(s), pages[b]) for s, b in [(0, 3), (1, 5), (2, 1)]] == [True] * 3
    rig.kv.zero_()
    rig.engine.submit(LOAD, 0, _copy(1, 4), rig.engine.fence())
    assert rig.engine.wait(LOAD, 0, 10)
    assert torch.equal(rig.page(4), pages[5])
    assert not rig.page(5).any()


class Recorder:
    """A copier that only remembers what it was given."""

    def __init__(self):
        self.given = []

    def save(self, copies, host):
        self.given.append((copies, host))

    def load(self, copies, host):
        raise OSError("told to fail")


def test_copier_gets_the_lists_of_all_groups_and_the_regions_of_all_pools(caplog):
    pool, copier, published = HostPool(2, [4096, 8192]), Recorder(), []
    engine = CopyEngine(
        copier,
        pool,
        publish=lambda *outcome: published.append(outcome[:3]),
        device=torch.device("cpu"),
    )
    copies = (*_copy(0, 1), *_copy(1, 2), *NOTHING)
    engine.submit(SAVE, 0, copies)
    engine.submit(LOAD, 0, copies)
    assert engine.close(10)
    ((lists, regions),) = copier.given
    assert lists is copies
    assert [region.data_ptr() for region in regions] == [t.data_ptr() for t in pool.tensors]
    assert sorted(published, key=str) == [(LOAD, 0, False), (SAVE, 0, True)]
    assert "Copy 0 of 2 granules failed" in caplog.text
    pool.close()


@pytest.mark.parametrize("device", DEVICES)
def test_failure_is_published_in_its_place_and_later_copies_go_on(make_rig, device, caplog):
    rig = make_rig(device)
    for op_id, copies in enumerate([_copy(0, 1), OUT_OF_RANGE, _copy(1, 2), NOTHING]):
        rig.engine.submit(SAVE, op_id, copies, rig.engine.fence())
    assert rig.engine.wait(SAVE, 3, 10)
    assert rig.published == [(SAVE, 0, True), (SAVE, 1, False), (SAVE, 2, True), (SAVE, 3, True)]
    assert torch.equal(rig.slot(1), rig.page(2))
    assert "Copy 1 of 1 granules failed" in caplog.text
    assert "is not below" in caplog.text


def test_the_seconds_of_a_copy_are_not_those_it_stood_in_line(make_rig):
    rig = make_rig(gated=True)
    for op_id in range(3):
        rig.engine.submit(SAVE, op_id, _copy(op_id, 1))
    rig.gate.started.get(timeout=10)
    time.sleep(0.2)  # the first one runs, the others wait for it
    rig.gate.open(3)
    assert rig.engine.wait(SAVE, 2, 10)
    first, *others = rig.seconds
    assert first >= 0.2
    assert max(others) < 0.1


@pytest.mark.gpu
def test_the_seconds_of_a_copy_are_not_those_of_the_forward_before_it(make_rig):
    rig = make_rig("cuda")
    rig.engine.submit(LOAD, 0, _copy(0, 1), rig.engine.fence())
    assert rig.engine.wait(LOAD, 0, 10)
    started = time.monotonic()
    torch.cuda._sleep(1_000_000_000)  # half a second and more
    rig.engine.submit(LOAD, 1, _copy(0, 1), rig.engine.fence())
    assert rig.engine.wait(LOAD, 1, 10)
    assert time.monotonic() - started > 0.3
    assert 0 < rig.seconds[1] < 0.05


def test_submit_returns_while_a_copy_runs_and_nothing_is_published_early(make_rig):
    rig = make_rig(gated=True)
    start = time.monotonic()
    for op_id in range(3):
        rig.engine.submit(SAVE, op_id, _copy(op_id, 1))
    assert time.monotonic() - start < 1
    rig.gate.started.get(timeout=10)
    assert rig.published == []
    assert not rig.engine.wait(SAVE, 0, 0.01)
    rig.gate.open()
    assert rig.engine.wait(SAVE, 0, 10)
    assert rig.published == [(SAVE, 0, True)]
    assert not rig.engine.wait(SAVE, 2, 0)


def test_loads_do_not_wait_for_saves(make_rig):
    rig = make_rig(gated=True)
    rig.engine.submit(SAVE, 0, _copy(0, 1))
    rig.gate.started.get(timeout=10)
    rig.engine.submit(LOAD, 0, _copy(1, 2))
    rig.gate.started.get(timeout=10)
    assert rig.gate.threads == {"hicache-save", "hicache-load"}


def test_wait_covers_gaps_between_numbers(make_rig):
    rig = make_rig(gated=True)
    assert rig.engine.wait(SAVE, 100, 0)
    rig.engine.submit(SAVE, 3, NOTHING)
    rig.engine.submit(SAVE, 7, NOTHING)
    assert rig.engine.wait(SAVE, 2, 0)
    assert not rig.engine.wait(SAVE, 5, 0)
    rig.gate.open()
    assert rig.engine.wait(SAVE, 5, 10)
    assert not rig.engine.wait(SAVE, 7, 0)
    assert rig.engine.wait(LOAD, 7, 0)


@pytest.mark.parametrize("op_id", [4, 5])
def test_number_that_does_not_ascend_breaks_an_invariant(make_rig, op_id):
    rig = make_rig()
    rig.engine.submit(SAVE, 5, NOTHING)
    rig.engine.submit(LOAD, 1, NOTHING)
    with pytest.raises(InvariantBroken, match=f"copy {op_id} came after copy 5"):
        rig.engine.submit(SAVE, op_id, NOTHING)


def test_close_finishes_what_was_submitted(make_rig):
    rig = make_rig()
    for op_id in range(50):
        rig.engine.submit(SAVE, op_id, _copy(op_id % 4, op_id % NUM_BLOCKS))
    assert rig.engine.close(10)
    assert rig.published == [(SAVE, op_id, True) for op_id in range(50)]
    with pytest.raises(InvariantBroken, match="after close"):
        rig.engine.submit(SAVE, 50, NOTHING)


def test_close_with_a_stuck_copy_returns_in_time_and_drops_the_rest(make_rig):
    rig = make_rig(gated=True)
    rig.engine.submit(SAVE, 0, _copy(0, 1))
    rig.engine.submit(SAVE, 1, _copy(1, 2))
    rig.gate.started.get(timeout=10)
    start = time.monotonic()
    assert not rig.engine.close(0.05)
    assert 0.04 < time.monotonic() - start < 1
    rig.gate.open(2)
    assert rig.engine.wait(SAVE, 1, 10)
    assert rig.published == []
    assert torch.equal(rig.slot(0), rig.page(1))
    assert not rig.slot(1).any()


def test_current_stream_waits_for_a_load_on_a_cpu_by_its_end(make_rig):
    rig = make_rig(gated=True)
    expected = torch.full((LAYOUT.page_bytes,), 9, dtype=torch.uint8)
    rig.slot(2).copy_(expected)
    rig.engine.submit(LOAD, 4, _copy(2, 3))
    assert not rig.engine.make_current_stream_wait(4, 0.01)
    rig.gate.open()
    assert rig.engine.make_current_stream_wait(4, 10)
    assert torch.equal(rig.page(3), expected)


def test_buffer_made_in_inference_mode_can_be_loaded():
    with torch.inference_mode():
        rig = Rig()
    rig.engine.submit(LOAD, 0, _copy(2, 3))
    assert rig.engine.close(10)
    assert rig.published == [(LOAD, 0, True)]
    assert not rig.page(3).any()


def test_threads_started_later_keep_torchs_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    rig = Rig()
    try:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [2]
        assert torch.get_num_threads() == 2
    finally:
        rig.engine.close(10)
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_save_waits_for_its_fence_and_sees_what_was_written_before_it(make_rig):
    rig = make_rig("cuda")
    torch.cuda._sleep(200_000_000)
    rig.kv.view(2, NUM_BLOCKS, -1)[:, 1] = 77
    rig.engine.submit(SAVE, 0, _copy(0, 1), rig.engine.fence())
    assert rig.published == []
    assert rig.engine.wait(SAVE, 0, 10)
    assert (rig.slot(0) == 77).all()


@pytest.mark.gpu
def test_current_stream_waits_for_a_load_without_the_caller_waiting(make_rig):
    rig = make_rig("cuda")
    rig.pool.tensors[0].fill_(55)
    torch.cuda._sleep(400_000_000)
    rig.engine.submit(LOAD, 0, _copy(2, 3), rig.engine.fence())
    assert rig.engine.make_current_stream_wait(0, 10)
    copied = rig.kv.view(2, NUM_BLOCKS, -1)[:, 3].clone()
    assert rig.published == []
    torch.cuda.synchronize()
    assert (copied == 55).all()
    assert rig.engine.wait(LOAD, 0, 10)


@pytest.mark.gpu
def test_saves_and_loads_at_once_keep_every_byte(make_rig):
    rig = make_rig("cuda")
    rng = np.random.default_rng(0)
    start = rig.kv.clone()
    for op_id in range(200):
        slot, block = int(rng.integers(2)), int(rng.integers(3))
        rig.engine.submit(SAVE, op_id, _copy(slot, block), rig.engine.fence())
        rig.engine.submit(LOAD, op_id, _copy(2 + slot, 3 + block), rig.engine.fence())
    assert rig.engine.wait(SAVE, 199, 30)
    assert rig.engine.wait(LOAD, 199, 30)
    assert sorted(rig.published, key=lambda outcome: outcome[0].value) == [
        (direction, op_id, True) for direction in (LOAD, SAVE) for op_id in range(200)
    ]
    half = start.view(2, NUM_BLOCKS, -1)
    assert torch.equal(rig.kv.view(2, NUM_BLOCKS, -1)[:, :3], half[:, :3])
    saved = {bytes(rig.slot(slot).numpy()) for slot in range(2)}
    assert saved <= {bytes(half[:, block].flatten().cpu().numpy()) for block in range(3)}

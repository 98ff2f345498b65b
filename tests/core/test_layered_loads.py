"""Loads of one step on the copy thread, span by span: who waits for what, what failure means."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from vllm_hicache.device_layout import DeviceGroup, RowFormat, TensorPlacement, device_layers
from vllm_hicache.errors import InvariantBroken, LayerLoadFailed
from vllm_hicache.host_pool import HostPool
from vllm_hicache.kernels.layer_spans import LayerSpans
from vllm_hicache.layered_loads import LayeredLoads
from vllm_hicache.layout import LayerSpan, PageLayout
from vllm_hicache.tiers import Direction
from vllm_hicache.transfer import CopyEngine

SAVE, LOAD = Direction.SAVE, Direction.LOAD
ROWS = np.zeros((3, 4), dtype=np.int32)
NUM_SPANS = 3


class Idle:
    """Nothing is copied but in spans here."""

    def save(self, copies: object, host: object) -> None:
        pass

    def load(self, copies: object, host: object) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.pool = HostPool(2, [4096])
        self.published: list[tuple[Direction, int, bool]] = []
        self.engine = CopyEngine(
            Idle(),
            self.pool,
            publish=lambda *outcome: self.published.append(outcome[:3]),
            device=torch.device("cpu"),
        )
        self.permits = threading.Semaphore(0)
        self.given: list[Sequence[np.ndarray]] = []
        self.fails_at: int | None = None

    def start(self, *op_ids: int) -> LayeredLoads:
        loads = LayeredLoads(op_ids, [ROWS] * len(op_ids))
        self.engine.submit_layered(loads, self._spans, self.engine.fence())
        return loads

    def _spans(self, copies: Sequence[np.ndarray]) -> Iterator[None]:
        self.given.append(copies)
        for span in range(NUM_SPANS):
            assert self.permits.acquire(timeout=10)
            if span == self.fails_at:
                raise OSError("told to fail")
            yield None

    def let_through(self, count: int) -> None:
        self.permits.release(count)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.let_through(100)
    assert made.engine.close(10)
    made.pool.close()


def test_a_layer_waits_for_its_own_span_and_not_for_those_behind_it(rig: Rig) -> None:
    loads = rig.start(1)
    with pytest.raises(LayerLoadFailed, match=r"did not start in 0\.01 s"):
        loads.make_current_stream_wait(0, 0.01)
    rig.let_through(2)
    loads.make_current_stream_wait(0, 10)
    loads.make_current_stream_wait(1, 10)
    with pytest.raises(LayerLoadFailed):
        loads.make_current_stream_wait(2, 0.01)
    rig.let_through(1)
    loads.make_current_stream_wait(2, 10)
    loads.make_current_stream_wait(0, 10)


def test_all_loads_of_a_step_are_published_in_order_behind_the_last_span(rig: Rig) -> None:
    rig.start(4, 5, 7)
    rig.let_through(NUM_SPANS - 1)
    assert not rig.engine.wait(LOAD, 4, 0.05)
    assert rig.published == []
    rig.let_through(1)
    assert rig.engine.wait(LOAD, 7, 10)
    assert rig.published == [(LOAD, op_id, True) for op_id in (4, 5, 7)]
    assert [len(copies) for copies in rig.given] == [3]


def test_steps_are_copied_one_after_the_other(rig: Rig) -> None:
    first, second = rig.start(1), rig.start(2)
    rig.let_through(NUM_SPANS + 1)
    second.make_current_stream_wait(0, 10)
    first.make_current_stream_wait(NUM_SPANS - 1, 0)
    assert rig.published == [(LOAD, 1, True)]


def test_a_span_that_fails_fails_every_load_of_the_step_and_whoever_waits(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.fails_at = 1
    loads = rig.start(1, 2)
    rig.let_through(NUM_SPANS)
    assert rig.engine.wait(LOAD, 2, 10)
    assert rig.published == [(LOAD, 1, False), (LOAD, 2, False)]
    loads.make_current_stream_wait(0, 0)  # it was there before
    for span in (1, 2):
        with pytest.raises(LayerLoadFailed, match=r"it failed: OSError.*told to fail") as caught:
            loads.make_current_stream_wait(span, 10)
        assert isinstance(caught.value.__cause__, OSError)
    assert "Copy 1, 2 of 6 granules failed" in caplog.text
    rig.engine.submit(SAVE, 1, (ROWS,))
    rig.engine.submit(LOAD, 3, (ROWS,))
    assert rig.engine.wait(LOAD, 3, 10)
    assert rig.engine.wait(SAVE, 1, 10)
    assert sorted(rig.published[2:]) == [(LOAD, 3, True), (SAVE, 1, True)]


def test_who_waits_is_woken_by_the_failure(rig: Rig) -> None:
    rig.fails_at = 0
    loads = rig.start(1)
    seen: list[Exception] = []

    def wait() -> None:
        try:
            loads.make_current_stream_wait(2, 10)
        except LayerLoadFailed as error:
            seen.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    rig.let_through(1)
    waiter.join(5)
    assert len(seen) == 1


@pytest.mark.parametrize(("op_ids", "last"), [((3, 4), 4), ((5, 5), 5), ((6, 5), 6)])
def test_numbers_ascend_over_steps_and_within_one(
    rig: Rig, op_ids: tuple[int, int], last: int
) -> None:
    rig.start(4)
    with pytest.raises(InvariantBroken, match=f"copy {min(op_ids)} came after copy {last}"):
        rig.start(*op_ids)


class Mark:
    """The end of a span on a device."""

    def __init__(self, order: Callable[[], None]) -> None:
        self.wait = order


def test_the_stream_of_the_caller_is_ordered_behind_the_span_on_a_device(rig: Rig) -> None:
    ordered: list[int] = []
    loads = LayeredLoads([1], [ROWS])
    marks = [Mark(lambda span=span: ordered.append(span)) for span in range(NUM_SPANS)]
    loads.run(lambda copies: iter(marks))
    for span in (0, 0, 2):  # two streams may wait for one layer
        loads.make_current_stream_wait(span, 0)
    assert ordered == [0, 0, 2]


@pytest.mark.gpu
def test_the_forward_waits_on_the_device_alone_and_gets_each_layer_behind_the_fence() -> None:
    layout = PageLayout(64, LayerSpan(0, 16), 16, 0, 2, 2, 1, 256, 0)
    num_blocks, block = 8, layout.page_bytes // 16
    placement = TensorPlacement(tuple(range(16)), num_blocks, num_blocks * block, block)
    layers = device_layers(placement, RowFormat(2, 128, 128, 2), layout_name="LBNHC", block_size=64)
    kv = torch.zeros(16 * num_blocks * block, dtype=torch.uint8, device="cuda")
    pool = HostPool(8, [layout.slot_stride], device=kv.device)
    assert [pool.make_ready(piece) for piece in pool.pieces] == [""]
    pool.tensors[0].fill_(55)
    spans = LayerSpans(kv, DeviceGroup(0, 64, (layers,)), layout)
    published: list[tuple[Direction, int, bool]] = []
    engine = CopyEngine(
        Idle(), pool, publish=lambda *one: published.append(one[:3]), device=torch.device("cuda", 0)
    )
    rows = np.array([[slot, 0, 7 - slot, 0] for slot in range(7)], dtype=np.int32)
    torch.cuda._sleep(400_000_000)
    kv.fill_(9)  # a forward before the load, which writes over it if it does not wait
    loads = LayeredLoads([1, 2], [rows[:3], rows[3:]])
    engine.submit_layered(loads, partial(spans.load, host=pool.tensors[0]), engine.fence())
    seen = []
    for place in range(16):
        loads.make_current_stream_wait(spans.span_of(place), 30)
        seen.append(kv.view(16, num_blocks, -1)[place, 1:].clone())
    assert published == []
    torch.cuda.synchronize()
    assert [bool((layer == 55).all()) for layer in seen] == [True] * 16
    assert engine.wait(LOAD, 2, 10)
    assert published == [(LOAD, 1, True), (LOAD, 2, True)]
    assert bool((kv.view(16, num_blocks, -1)[:, 0] == 9).all())
    assert engine.close(10)
    pool.close()

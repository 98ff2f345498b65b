"""Pages that come span of layers by span of layers, against the copy of whole pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from dense_worker import Case as OneTensor

from vllm_hicache.device_layout import (
    LAYOUT_NAMES,
    DeviceGroup,
    RowFormat,
    TensorPlacement,
    device_layers,
)
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.kernels.layer_spans import LayerSpans, span_starts
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.layout import LayerSpan, PageLayout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_SLOTS = 7


@dataclass(frozen=True)
class Case(OneTensor):
    """One worker's shape, also with layers in several tensors."""

    num_layers: int = 5
    num_blocks: int = 16
    places: tuple[tuple[int | None, ...], ...] | None = None
    """Of the layers of each tensor; one with all of them unless given."""

    def group(self) -> tuple[DeviceGroup, int]:
        """All layers, and the bytes of the buffer that has them."""
        size, tensors = 0, []
        for places in self.places or (tuple(range(self.num_layers)),):
            placement = self._placement(places, size)
            rows = RowFormat(self.num_heads, self.k_bytes, self.v_bytes, 2, self.packing)
            tensors.append(
                device_layers(
                    placement,
                    rows,
                    layout_name=self.layout_name,
                    block_size=self.block_size,
                    kernel_block_size=self.kernel_block_size,
                )
            )
            block_bytes = self.num_heads * self.block_size * self.row_bytes
            size += len(places) * self.num_blocks * block_bytes
        return DeviceGroup(0, self.block_size, tuple(tensors)), size

    def _placement(self, places: tuple[int | None, ...], offset: int) -> TensorPlacement:
        """Axes in the order of the layout's name, nothing between them."""
        extents = {"L": len(places), "B": self.num_blocks, "H": self.num_heads}
        extents |= {"N": self.block_size, "C": self.row_bytes}
        strides, stride = {}, 1
        for axis in reversed(self.layout_name):
            strides[axis] = stride
            stride *= extents[axis]
        return TensorPlacement(places, self.num_blocks, strides["L"], strides["B"], offset)

    def some_copies(self, rng: np.random.Generator, part: float) -> np.ndarray:
        """Some granules of pages that lie in any slots and blocks."""
        num_pages = min(NUM_SLOTS, self.num_pages)
        slots = rng.permutation(NUM_SLOTS)[:num_pages]
        rows = self.copies(slots, rng.permutation(np.arange(1, self.num_blocks)))
        return rng.permutation(rows[rng.random(len(rows)) < part])


CASES = {
    **{name: Case(name) for name in LAYOUT_NAMES},
    "one layer": Case(num_layers=1),
    "more layers than spans": Case(num_layers=21),
    "blocks above pages": Case(page_size=4, block_size=16, num_blocks=6),
    "pages above blocks": Case("BLNHC", page_size=32, block_size=4, num_blocks=40),
    "split blocks": Case(block_size=8, page_size=16, kernel_block_size=2),
    "pages that fill their slots": Case(num_layers=8, k_bytes=64, v_bytes=64, page_size=16),
    "one head group": Case("BHLNC", heads_per_group=2, num_heads=2),
    "latents": Case("LBNHC", num_heads=1, k_bytes=24, v_bytes=0),
    "transposed keys": Case(packing="k_transposed"),
    "two tensors": Case(places=((0, 3), (1, 2, 4))),
    "layers of another pool between": Case(places=((None, 0, 1, None, 2), (3, None, 4))),
}
cases = pytest.mark.parametrize("name", CASES)


class Worker:
    """The same bytes three times: as they were, loaded whole, and loaded span by span."""

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case, self.layout = case, case.layout
        self.group, size = case.group()
        self.before = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)).to(device)
        self.whole, self.kv = self.before.clone(), self.before.clone()
        shape = (NUM_SLOTS, self.layout.slot_stride)
        self.host = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
        if device == "cuda":
            self.host = self.host.pin_memory()
        self.rng = rng

    def load_whole(self, copies: Sequence[np.ndarray]) -> None:
        copier = PoolsCopier([PageCopier(self.whole, [self.group], self.layout)])
        for rows in copies:
            copier.load((rows,), (self.host,))

    def spans(self, chunk_bytes: int | None = None) -> LayerSpans:
        return LayerSpans(self.kv, self.group, self.layout, chunk_bytes=chunk_bytes)

    def places_loaded(self) -> list[bool]:
        """Of each layer, whether its bytes are those of the whole load; else as they were."""
        found = []
        for place in range(self.case.num_layers):
            views = [self._layer(buffer, place) for buffer in (self.kv, self.whole, self.before)]
            assert torch.equal(views[0], views[1]) or torch.equal(views[0], views[2])
            found.append(torch.equal(views[0], views[1]))
        return found

    def _layer(self, buffer: torch.Tensor, place: int) -> torch.Tensor:
        layers = next(one for one in self.group.layers if place in one.layers)
        start = layers.base_bytes + layers.indices[layers.layers.index(place)] * layers.layer_stride
        case, part = self.case, layers.parts[0]
        row = case.k_bytes + case.v_bytes
        shape = (layers.num_blocks, layers.num_heads, layers.block_size, row)
        strides = (part.block_stride, part.head_stride, part.token_stride, 1)
        if case.packing != "rows":
            strides = (part.block_stride, part.head_stride, row, 1)
        return buffer.as_strided(shape, strides, start)


def run(steps: Iterator[object], device: str) -> int:
    """Every span; how many there were."""
    num_spans = sum(1 for _ in steps)
    if device == "cuda":
        torch.cuda.synchronize()
    return num_spans


@cases
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", [1.0, 0.6], ids=["whole pages", "parts of pages"])
def test_all_spans_together_are_the_copy_of_whole_pages(name: str, device: str, part: float):
    worker = Worker(CASES[name], device)
    copies = [CASES[name].some_copies(worker.rng, part)]
    worker.load_whole(copies)
    spans = worker.spans()
    assert run(spans.load(copies, worker.host), device) == len(spans.starts)
    assert not torch.equal(worker.whole, worker.before)
    assert torch.equal(worker.kv, worker.whole)


@cases
@pytest.mark.parametrize("device", DEVICES)
def test_a_span_brings_its_own_layers_of_every_load_and_no_other(name: str, device: str):
    worker = Worker(CASES[name], device)
    rows = CASES[name].some_copies(worker.rng, 1.0)
    copies = [rows[: len(rows) // 2], rows[len(rows) // 2 :], rows[:0]]
    worker.load_whole(copies)
    spans = worker.spans()
    for number, end in enumerate(spans.load(copies, worker.host)):
        if device == "cuda":
            end.synchronize()
        expected = [spans.span_of(place) <= number for place in range(CASES[name].num_layers)]
        assert worker.places_loaded() == expected
    assert torch.equal(worker.kv, worker.whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 20])
def test_pieces_of_any_size_give_the_same(device: str, chunk_bytes: int):
    for name in ("BLHNC", "pages that fill their slots"):
        worker = Worker(CASES[name], device)
        copies = [CASES[name].some_copies(worker.rng, 1.0)]
        worker.load_whole(copies)
        run(worker.spans(chunk_bytes).load(copies, worker.host), device)
        assert torch.equal(worker.kv, worker.whole)


def test_spans_give_long_runs_and_are_eight_to_sixteen():
    large = PageLayout(256, LayerSpan(0, 32), 32, 0, 8, 8, 1, 512, 0)
    assert large.layer_bytes == 128 << 10
    assert span_starts(large) == tuple(range(0, 32, 2))
    small = replace(large, row_bytes=16)
    assert span_starts(small) == tuple(range(0, 32, 4))
    huge = replace(large, row_bytes=4096)
    assert span_starts(huge) == tuple(range(0, 32, 2))
    few = PageLayout(256, LayerSpan(0, 9), 9, 0, 8, 8, 1, 4096, 0)
    assert span_starts(few) == tuple(range(9))
    assert span_starts(PageLayout(256, LayerSpan(3, 4), 32, 0, 8, 8, 1, 512, 0)) == (0,)


def test_every_layer_is_in_the_span_that_brings_it():
    worker = Worker(CASES["more layers than spans"], "cpu")
    spans = worker.spans()
    assert spans.starts == (0, 3, 6, 9, 12, 15, 18)
    assert [spans.span_of(place) for place in range(21)] == [place // 3 for place in range(21)]


def test_an_index_out_of_range_is_refused_before_anything_is_written():
    worker = Worker(CASES["LBHNC"], "cpu")
    rows = CASES["LBHNC"].some_copies(worker.rng, 1.0)
    wrong = np.array([[NUM_SLOTS, 0, 1, 0]], dtype=np.int32)
    with pytest.raises(InvariantBroken, match="is not below"):
        run(worker.spans().load([rows, wrong], worker.host), "cpu")
    assert torch.equal(worker.kv, worker.before)

"""Every topology writes the same objects and reads every other's, byte for byte, up to TP8 x PP8.

All workers of a topology copy a known KV out of blocks of their own and cut it into named objects;
a plain NumPy transposition says what those must be. What all write alike, all can read.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from vllm_hicache.device_layout import (
    LAYOUT_NAMES,
    DeviceGroup,
    RowFormat,
    TensorPlacement,
    device_layers,
)
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Fleet, Grid, coarsest_grid, even_stage_starts
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, PageLayout

LAYERS, PAGE, NUM_PAGES = 12, 8, 3
NAMESPACE = "hc1-0123456789abcdef"
HASHES = [bytes([page]) * 32 for page in range(NUM_PAGES)]
BY_HAND = ((5, 7), (11, 1), (3, 3, 6), (2, 4, 2, 4), (1, 1, 1, 1, 1, 1, 1, 5))


@dataclass(frozen=True)
class Attention:
    """KV heads of a model and the bytes of K and V of one token of one head."""

    total_heads: int
    k_bytes: int
    v_bytes: int
    replicated: bool = False
    """Each tensor-parallel rank holds all heads, as with latent attention."""

    @property
    def row_bytes(self) -> int:
        return self.k_bytes + self.v_bytes


ATTENTION = {
    "mha": Attention(16, 32, 32),
    "gqa": Attention(8, 32, 32),
    "gqa with fewer heads than TP8": Attention(4, 32, 32),
    "mla": Attention(1, 512 * 2, 64 * 2, replicated=True),
    "fp8 with scales in the row": Attention(8, 16, 16 + 8),
}


@dataclass(frozen=True)
class Topology:
    tp: int
    stages: tuple[int, ...]
    """Layers of each pipeline stage."""
    layout_name: str = "LBHNC"
    block_size: int = 4

    @property
    def spans(self) -> list[LayerSpan]:
        ends = np.cumsum((0, *self.stages)).tolist()
        return [LayerSpan(start, stop) for start, stop in pairwise(ends)]

    def heads(self, attention: Attention) -> list[tuple[int, int]]:
        if attention.replicated:
            return [(0, attention.total_heads)] * self.tp
        share = attention.total_heads // self.tp
        return [(rank * share, (rank + 1) * share) for rank in range(self.tp)]

    def fits(self, attention: Attention, grid: Grid) -> bool:
        """Whether no object crosses a border between two workers; nothing of the product."""
        layers_fit = all(
            grid.layer_partition == 0 or span.start % grid.layer_partition == 0
            for span in self.spans
        )
        if attention.replicated:
            return layers_fit
        share, rest = divmod(attention.total_heads, self.tp)
        return layers_fit and rest == 0 and share > 0 and share % grid.heads_per_group == 0

    def pages(self, attention: Attention, grid: Grid) -> Iterator[PageLayout]:
        """One layout a worker; ConfigError for a share that does not fit."""
        for span in self.spans:
            for head_start, head_stop in self.heads(attention):
                yield PageLayout(
                    PAGE,
                    span,
                    LAYERS,
                    head_start,
                    head_stop,
                    attention.total_heads,
                    grid.heads_per_group,
                    attention.row_bytes,
                    grid.layer_partition,
                )


EVEN = [
    tuple(b - a for a, b in pairwise((*even_stage_starts(LAYERS, size), LAYERS)))
    for size in range(1, 9)
]
FEW = [EVEN[0], EVEN[1], EVEN[2], EVEN[4], EVEN[7], BY_HAND[0], BY_HAND[1]]
"""Stages of a push; the others are for the full tier."""
GRIDS = [Grid(1, 1), Grid(2, 1), Grid(3, 2), Grid(4, 4), Grid(6, 2), Grid(12, 1), Grid(5, 1)]


def _topologies(stages: list[tuple[int, ...]]) -> list[Topology]:
    """Each has another order of axes or another size of blocks than its neighbour."""
    sizes = [(tp, each) for tp in (1, 2, 4, 8) for each in stages]
    return [
        Topology(tp, each, LAYOUT_NAMES[i % 6], (4, 8, 16)[i % 3])
        for i, (tp, each) in enumerate(sizes)
    ]


def _global_kv(attention: Attention) -> np.ndarray:
    """[tokens, layers, heads, row bytes]; every four bytes name their place."""
    shape = (NUM_PAGES * PAGE, LAYERS, attention.total_heads, attention.row_bytes)
    words = np.arange(np.prod(shape) // 4, dtype=np.uint32) * 2654435761 + 7
    return words.view(np.uint8).reshape(shape)


def _oracle(attention: Attention, grid: Grid, kv: np.ndarray) -> dict[str, bytes]:
    """All objects of the pages, by plain transposition and names spelt out."""
    step, group, objects = grid.layer_partition, grid.heads_per_group, {}
    for page, page_hash in enumerate(HASHES):
        tokens = kv[page * PAGE : (page + 1) * PAGE]
        for first in range(0, LAYERS, step):
            stop = min(first + step, LAYERS)
            for head in range(0, attention.total_heads, group):
                part = tokens[:, first:stop, head : head + group]
                name = f"{page_hash.hex()}_{NAMESPACE}_L{first}-{stop}_H{head // group}"
                objects[name] = part.transpose(1, 0, 2, 3).tobytes()
    return objects


class Worker:
    """Blocks of one worker in vLLM's order of axes, host slots beside them, and its copier."""

    def __init__(self, layout: PageLayout, topology: Topology, attention: Attention) -> None:
        self.layout = layout
        block = topology.block_size
        self.block_ids = np.arange(-(-NUM_PAGES * PAGE // block), 0, -1)
        extents = {
            "L": layout.layers.num_layers,
            "B": len(self.block_ids) + 1,
            "H": layout.num_heads,
            "N": block,
            "C": layout.row_bytes,
        }
        raw = torch.zeros(int(np.prod(list(extents.values()))), dtype=torch.uint8)
        whole = raw.view(*(extents[axis] for axis in topology.layout_name))
        self.blocks = whole.permute([topology.layout_name.index(axis) for axis in "LBHNC"])
        placement = TensorPlacement(
            tuple(range(extents["L"])), extents["B"], self.blocks.stride(0), self.blocks.stride(1)
        )
        rows = RowFormat(layout.num_heads, attention.k_bytes, attention.v_bytes, 1)
        layers = device_layers(placement, rows, layout_name=topology.layout_name, block_size=block)
        group = DeviceGroup(0, block, (layers,))
        self.copier = PoolsCopier([PageCopier(raw, [group], layout)])
        self.host = torch.zeros((NUM_PAGES, layout.slot_stride), dtype=torch.uint8)
        granule = min(PAGE, block)
        tokens = np.arange(0, NUM_PAGES * PAGE, granule)
        columns = (
            tokens // PAGE,
            tokens % PAGE // granule,
            self.block_ids[tokens // block],
            tokens % block // granule,
        )
        self.copies = np.stack(columns, axis=1).astype(np.int32)

    def share_of(self, kv: np.ndarray) -> np.ndarray:
        span, layout = self.layout.layers, self.layout
        return kv[:, span.start : span.stop, layout.head_start : layout.head_stop]

    def write(self, kv: np.ndarray) -> dict[str, bytes]:
        """The objects that this worker stores of its share of the KV."""
        view = self._by_token()
        view[: len(kv)] = torch.from_numpy(self.share_of(kv).copy())
        self._set_blocks(view)
        self.copier.save((self.copies,), (self.host,))
        return {name: memory.tobytes() for name, memory in self._objects()}

    def forget(self) -> None:
        """Overwrite the blocks and the host pages."""
        self.blocks.fill_(0xEE)
        self.host.fill_(0xEE)

    def read(self, objects: Mapping[str, bytes]) -> np.ndarray:
        """[tokens, layers, heads, row bytes] in the blocks after loading all pages."""
        for name, memory in self._objects():
            memory[:] = np.frombuffer(objects[name], np.uint8)
        self.copier.load((self.copies,), (self.host,))
        return self._by_token()[: NUM_PAGES * PAGE].numpy()

    def _objects(self) -> Iterator[tuple[str, np.ndarray]]:
        for slot, page_hash in enumerate(HASHES):
            page = self.host[slot].numpy()
            for shard in self.layout.shards:
                memory = page[shard.offset : shard.offset + shard.length]
                yield shard_name(page_hash, NAMESPACE, shard), memory

    def _by_token(self) -> torch.Tensor:
        """A copy of the blocks as [tokens, layers, heads, row bytes]."""
        chosen = self.blocks[:, self.block_ids.copy()]
        return chosen.permute(1, 3, 0, 2, 4).flatten(0, 1).contiguous()

    def _set_blocks(self, by_token: torch.Tensor) -> None:
        split = by_token.unflatten(0, (len(self.block_ids), -1)).permute(2, 0, 3, 1, 4)
        self.blocks[:, self.block_ids.copy()] = split


def _workers(topology: Topology, attention: Attention, grid: Grid) -> list[Worker]:
    pages = topology.pages(attention, grid)
    return [Worker(layout, topology, attention) for layout in pages]


def _aligned(attention: Attention, grid: Grid, stages: list[tuple[int, ...]]) -> list[Topology]:
    return [topology for topology in _topologies(stages) if topology.fits(attention, grid)]


CELLS = [
    pytest.param(name, grid, id=f"{name}, {grid.layer_partition} layers, {grid.heads_per_group}")
    for name, attention in ATTENTION.items()
    for grid in GRIDS
    if attention.total_heads % grid.heads_per_group == 0
]


@pytest.mark.parametrize(
    "stages", [FEW, pytest.param([*EVEN, *BY_HAND], marks=pytest.mark.full)], ids=["few", "all"]
)
@pytest.mark.parametrize(("name", "grid"), CELLS)
def test_every_aligned_topology_writes_and_reads_the_objects_of_a_plain_transposition(
    name: str, grid: Grid, stages: list[tuple[int, ...]]
) -> None:
    attention = ATTENTION[name]
    kv = _global_kv(attention)
    expected, topologies = _oracle(attention, grid, kv), _aligned(attention, grid, stages)
    assert len(topologies) >= 2, "a grid that nobody else fits shows nothing"
    for topology in topologies:
        written: dict[str, bytes] = {}
        workers = _workers(topology, attention, grid)
        for worker in workers:
            for object_name, content in worker.write(kv).items():
                # Only replicas may write one object twice, and then the same.
                assert attention.replicated or object_name not in written, topology
                assert written.setdefault(object_name, content) == content, topology
        assert written == expected, topology
        for worker in workers:
            worker.forget()
            read = worker.read(expected)
            assert np.array_equal(read, worker.share_of(kv)), (topology, worker.layout)


@pytest.mark.parametrize(("name", "grid"), CELLS)
def test_a_topology_that_does_not_fit_is_refused_with_the_numbers(name: str, grid: Grid) -> None:
    attention = ATTENTION[name]
    topologies = _topologies([*EVEN, *BY_HAND])
    misaligned = [t for t in topologies if not t.fits(attention, grid)]
    if attention.total_heads < 8 or grid != Grid(1, 1):
        assert misaligned or attention.replicated
    for topology in misaligned:
        if not attention.replicated and attention.total_heads < topology.tp:
            continue  # such a worker has no layout; see the fleet below
        with pytest.raises(ConfigError) as refusal:
            list(topology.pages(attention, grid))
        said = str(refusal.value)
        by_stages = [
            f"[{s.start}, {s.stop}) does not fit storage_layer_partition {grid.layer_partition}"
            for s in topology.spans
        ]
        share = attention.total_heads // topology.tp
        by_heads = (
            f"the model's {attention.total_heads} KV heads and this worker's {share}, got "
            f"{grid.heads_per_group}"
        )
        assert by_heads in said or any(stage in said for stage in by_stages), said


def test_fewer_kv_heads_than_tensor_parallel_ranks_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"4 KV heads .* tensor parallel size 8; .* divisors of 4"
    ):
        coarsest_grid(Fleet((2, 8), (1, 2)), total_layers=LAYERS, total_kv_heads=4)


def test_an_object_of_another_topology_that_is_damaged_is_seen() -> None:
    """That the comparisons above can fail: one byte of one object."""
    attention, grid = ATTENTION["gqa"], Grid(2, 1)
    kv = _global_kv(attention)
    objects = _oracle(attention, grid, kv)
    damaged = sorted(objects)[17]
    objects[damaged] = bytes([objects[damaged][0] ^ 1]) + objects[damaged][1:]
    topology = next(t for t in _aligned(attention, grid, EVEN) if t.tp == 4 and len(t.stages) == 2)
    wrong = [
        not np.array_equal(worker.read(objects), worker.share_of(kv))
        for worker in _workers(topology, attention, grid)
    ]
    assert wrong.count(True) == 1


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_random_pairs_of_writer_and_reader(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(10):
        attention = source.choice(list(ATTENTION.values()))
        grids = [g for g in GRIDS if attention.total_heads % g.heads_per_group == 0]
        grid = source.choice(grids)
        topologies = [
            Topology(t.tp, t.stages, source.choice(LAYOUT_NAMES), source.choice((2, 4, 8, 16, 24)))
            for t in source.sample(_aligned(attention, grid, [*EVEN, *BY_HAND]), 2)
        ]
        kv = np.frombuffer(source.randbytes(_global_kv(attention).size), np.uint8)
        kv = kv.reshape(_global_kv(attention).shape)
        writer, reader = topologies
        stored: dict[str, bytes] = {}
        for worker in _workers(writer, attention, grid):
            stored.update(worker.write(kv))
        for worker in _workers(reader, attention, grid):
            np.testing.assert_array_equal(worker.read(stored), worker.share_of(kv))

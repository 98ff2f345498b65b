"""Every way of copying moves the same bytes as torch does: kernels by the interpreter on a CPU."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from dense_worker import Case, dense_buffer, host_region, own_stream, synchronize

from vllm_hicache.device_layout import LAYOUT_NAMES
from vllm_hicache.kernels.dispatch import Path

FAST_PATHS = [Path.TRITON, Path.COPY_ENGINE]
KINDS = {
    "several heads": Case(num_heads=4, heads_per_group=2, k_bytes=32, v_bytes=32),
    "one head": Case(num_heads=1, k_bytes=64, v_bytes=64),
    "latents": Case(num_layers=1, num_heads=1, k_bytes=1152, v_bytes=0),
    "fp8": Case(num_heads=4, k_bytes=24, v_bytes=24),
    "scales in the rows": Case(num_heads=2, k_bytes=36, v_bytes=36),
    "unequal and odd": Case(num_heads=3, heads_per_group=3, k_bytes=7, v_bytes=6),
}
SIZES = list(product((16, 32, 64, 128), (256, 64)))
"""Block and page."""
EVERY = list(product(LAYOUT_NAMES, KINDS, SIZES))
SOME = [
    (layout_name, kind, SIZES[5 * i % len(SIZES)])
    for i, (layout_name, kind) in enumerate(product(LAYOUT_NAMES, KINDS))
]


def _case(layout_name, kind, sizes, num_pages=2):
    block, page = sizes
    num_blocks = num_pages * page // block + 3
    return replace(
        KINDS[kind],
        layout_name=layout_name,
        num_layers=min(2, KINDS[kind].num_layers),
        block_size=block,
        page_size=page,
        num_blocks=num_blocks,
    )


def _some_of(copies, rng):
    """Some granules in any order: partial pages, and never a round number of them."""
    kept = rng.permutation(copies)[: max(1, len(copies) * 3 // 4)]
    return kept[: len(kept) - 1 + len(kept) % 2] if len(kept) > 1 else kept


def _assert_same_as_torch(case, path, device="cpu", **options):
    """The same saves and loads by both ways, each in a buffer of its own."""
    rng = np.random.default_rng(5)
    buffer = dense_buffer(case)
    buffer.raw[:] = torch.from_numpy(rng.integers(0, 256, buffer.raw.shape, np.uint8))
    twin_raw, twin = buffer.copier(path=Path.TORCH)
    raw, copier = replace(buffer, raw=buffer.raw.clone()).copier(device, path=path, **options)
    num_blocks = case.num_pages * case.page_size // case.block_size
    block_ids = rng.permutation(np.arange(1, case.num_blocks))[:num_blocks]
    slots = rng.permutation(case.num_pages + 1)[: case.num_pages]
    copies = case.copies(slots, block_ids)
    saved = _some_of(copies, rng)
    twin_host = host_region(case, case.num_pages + 1)
    host = host_region(case, case.num_pages + 1, device)
    twin.save(saved, twin_host)
    with own_stream(device):
        copier.save(saved, host)
    page_bytes = case.layout.page_bytes  # what lies behind, up to the next slot, is nobody's
    assert torch.equal(host[:, :page_bytes], twin_host[:, :page_bytes])
    assert (twin_host != 0xEE).any()
    twin_host[:] = torch.from_numpy(rng.integers(0, 256, twin_host.shape, np.uint8))
    host.copy_(twin_host)
    loaded = _some_of(copies, rng)
    before = twin_raw.clone()
    twin.load(loaded, twin_host)
    with own_stream(device):
        copier.load(loaded, host)
    assert torch.equal(raw.cpu(), twin_raw)
    assert not torch.equal(twin_raw, before)


@pytest.mark.parametrize("path", FAST_PATHS)
@pytest.mark.parametrize(("layout_name", "kind", "sizes"), SOME)
def test_every_path_moves_the_bytes_that_torch_moves(layout_name, kind, sizes, path):
    _assert_same_as_torch(_case(layout_name, kind, sizes), path)


@pytest.mark.full
@pytest.mark.parametrize("path", FAST_PATHS)
@pytest.mark.parametrize(("layout_name", "kind", "sizes"), EVERY)
def test_every_path_moves_the_bytes_that_torch_moves_in_all_sizes(layout_name, kind, sizes, path):
    _assert_same_as_torch(_case(layout_name, kind, sizes, num_pages=3), path)


@pytest.mark.gpu
@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize(("layout_name", "kind", "sizes"), SOME)
def test_every_path_moves_the_same_bytes_on_a_device(layout_name, kind, sizes, path):
    case = replace(_case(layout_name, kind, sizes, num_pages=9), num_layers=5)
    for chunk_bytes in (1, 3 * case.layout.slot_stride, 1 << 25):
        _assert_same_as_torch(case, path, "cuda", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("path", FAST_PATHS)
@pytest.mark.parametrize("packing", ["rows", "k_transposed"])
@pytest.mark.parametrize("heads", [1, 3])
def test_nothing_is_written_beside_a_unit_that_is_no_whole_number_of_tiles(heads, packing, path):
    case = Case(
        num_layers=1,
        num_heads=heads,
        heads_per_group=heads,
        k_bytes=66,
        v_bytes=66,
        block_size=16,
        page_size=64,
        packing=packing,
    )
    buffer = dense_buffer(case)
    buffer.raw[:] = torch.randint(1, 256, buffer.raw.shape, dtype=torch.uint8)
    before = buffer.raw.clone()
    raw, copier = buffer.copier(path=path)
    host = host_region(case, 1)
    (second,) = copies = case.copies([0], [1, 2, 3, 4])[1:2]
    copier.save(copies, host)
    unit = 16 * heads * case.row_bytes
    saved = host[0, unit : 2 * unit]
    block = before[second[2] * unit :][:unit]
    assert torch.equal(saved.sort().values, block.sort().values)
    saved[:] = 0xEE
    assert (host == 0xEE).all()
    copier.load(copies, host)
    block[:] = 0xEE
    assert torch.equal(raw, before)


LARGE = Case(
    num_layers=32,
    num_blocks=1100,
    num_heads=8,
    k_bytes=256,
    v_bytes=256,
    block_size=16,
    page_size=256,
)


@pytest.mark.gpu
@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("layout_name", LAYOUT_NAMES)
def test_a_device_buffer_of_more_than_2_gib_is_addressed_whole(layout_name, path):
    case = replace(LARGE, layout_name=layout_name)
    _assert_far_blocks_come_back(case, [*range(1, 25), *range(1099, 1075, -1)], path, "cuda")


@pytest.mark.parametrize("path", FAST_PATHS)
@pytest.mark.parametrize("layout_name", ["LBNHC", "LHBNC", "BHLNC"])
def test_offsets_beyond_4_gib_are_not_cut(layout_name, path):
    """The buffer is virtual memory: only blocks that are written take any."""
    odd = Case(num_layers=2, k_bytes=7, v_bytes=6, block_size=16, page_size=32)  # words of a byte
    case = replace(odd, layout_name=layout_name, num_blocks=5_500_000)
    _assert_far_blocks_come_back(case, [5_499_999 - i for i in range(4)], path, "cpu")


def _assert_far_blocks_come_back(case, block_ids, path, device):
    """Compared are the blocks that are copied, and the first ones, where cut offsets end."""
    num_bytes = case.num_layers * case.num_blocks * case.num_heads * 16 * case.row_bytes
    num_pages = len(block_ids) * case.block_size // case.page_size
    buffer = dense_buffer(case, torch.empty(num_bytes, dtype=torch.uint8, device=device))
    assert num_bytes > 1 << 31
    written = sorted({0, 1, *block_ids})
    content = torch.randint(
        0, 256, (case.num_layers, len(written), *buffer.views[0].shape[1:]), dtype=torch.uint8
    ).to(device)
    for view, layer in zip(buffer.views, content, strict=True):
        view[written] = layer
    copies = case.copies(range(num_pages), block_ids)
    pages = []
    for each in (Path.TORCH, path):
        _, copier = buffer.copier(device, path=each)
        host = host_region(case, num_pages, device)
        copier.save(copies, host)
        synchronize(device)
        pages.append(host)
    assert torch.equal(*pages)
    for view in buffer.views:
        view[block_ids] = 0
    copier.load(copies, pages[1])
    synchronize(device)
    for view, layer in zip(buffer.views, content, strict=True):
        assert torch.equal(view[written], layer)


@pytest.mark.parametrize("path", FAST_PATHS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_rows_that_a_block_keeps_transposed_are_moved_by_elements(block_size, path):
    case = Case(
        packing="k_transposed", block_size=block_size, page_size=32, num_blocks=6, num_layers=2
    )
    _assert_same_as_torch(case, path)


@pytest.mark.parametrize("path", FAST_PATHS)
@pytest.mark.parametrize(("page_size", "kernel_block_size"), [(8, 4), (32, 8)])
def test_blocks_split_for_kernels_are_moved_alike(page_size, kernel_block_size, path):
    case = Case(block_size=16, page_size=page_size, kernel_block_size=kernel_block_size)
    _assert_same_as_torch(case, path)

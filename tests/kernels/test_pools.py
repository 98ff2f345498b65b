"""Pools fed by several KV cache groups that share one buffer. Each scenario is a small model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_worker import (
    NUM_PAGES,
    Groups,
    Layer,
    PoolWorker,
    packed_buffer,
    settle,
    state,
    vllm_buffer,
)

from vllm_hicache.device_layout import LAYOUT_NAMES, DeviceGroup
from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.kernels import reference
from vllm_hicache.kernels.dispatch import Path
from vllm_hicache.kernels.reference import PageCopier
from vllm_hicache.layout import LayerSpan
from vllm_hicache.tiers import Direction

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WINDOW = Layer(1, kind="window")
COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
PACKED = ("BLHNC", "BLNHC")
ONE_HEAD = Layer(heads=1, content=64)
LATENT = Layer(heads=1, content=1152, kind="latent")
SCENARIOS: dict[str, tuple[Groups, tuple[str, ...]]] = {
    "five window groups and a full one": (((WINDOW,),) * 5 + ((Layer(),),), LAYOUT_NAMES),
    "groups of several layers": (((WINDOW,) * 2,) * 2 + ((Layer(),) * 2,), LAYOUT_NAMES),
    "groups of other block sizes in one pool": (
        ((Layer(padded=576),) * 2, (Layer(block=8, padded=576),) * 2),
        COMPACT,
    ),
    "groups of other block sizes, one for every page size": (
        ((Layer(0, 4, block=8, kernel_block=4),), (Layer(1, 2, block=16, page=8),)),
        ("LBHNC", "LBNHC"),
    ),
    "states with padding": (
        ((ONE_HEAD,) * 3, (state(1, 220, 256),) * 3, (state(1, 220, 256),) * 2),
        LAYOUT_NAMES,
    ),
    "states of an odd size": (((Layer(),), (state(1, 251, 256),), (state(1, 251, 256),)), COMPACT),
    "draft layers of the target's shape": (((Layer(),) * 3 + (Layer(1),),), LAYOUT_NAMES),
    "draft layers between the target's": (
        ((Layer(1), Layer(), Layer(1), Layer(), Layer()),),
        LAYOUT_NAMES,
    ),
    "draft layers of another shape": (((Layer(),) * 3 + (Layer(1, 4, 16),),), COMPACT),
    "draft of other heads": (((Layer(),) * 2 + (Layer(1, 3),),), COMPACT),
    "scales in the rows": (
        ((Layer(content=40, kind="scaled"),) * 3,),
        COMPACT,
    ),
    "latents and their index": (
        ((LATENT, Layer(1, 1, 132, kind="index")) * 3,),
        COMPACT,
    ),
    "latents and their index as groups": (
        ((LATENT,) * 2, (Layer(1, 1, 132, block=4, kind="index"),) * 2),
        PACKED,
    ),
    "draft that every context rank has whole": (
        ((Layer(),) * 2 + (Layer(1, block=8, page=16),),),
        COMPACT,
    ),
}
CASES = [
    pytest.param(groups, layout_name, id=f"{name}, {layout_name}")
    for name, (groups, layout_names) in SCENARIOS.items()
    for layout_name in layout_names
]


def _assert_round_trip(worker):
    """Save, compare every pool with the transposition, wipe, load, compare the whole buffer."""
    content = worker.write()
    before = worker.raw.clone()
    worker.copier.save(worker.copies, worker.host)
    for saved, expected in zip(worker.saved(), worker.pages(content), strict=True):
        np.testing.assert_array_equal(saved, expected)
    others = np.setdiff1d(np.arange(NUM_PAGES + 3), worker.slots)
    assert all((region[others] == 0xEE).all() for region in worker.host)
    worker.write()
    assert not torch.equal(worker.raw, before)
    worker.copier.load(tuple(map(worker.rng.permutation, worker.copies)), worker.host)
    settle(worker.raw)
    assert torch.equal(worker.raw, before)


@pytest.mark.vllm
@pytest.mark.parametrize(("groups", "layout_name"), CASES)
def test_pools_of_a_model_come_back_from_where_vllm_placed_them(groups, layout_name):
    worker = PoolWorker(groups, vllm_buffer, layout_name=layout_name)
    firsts = {number: placement for number, _, placement in reversed(worker.buffer.tensors)}
    assert [placement.offset for placement in firsts.values()] == [0] * len(groups)
    _assert_round_trip(worker)


UNSPLIT = [name for name, (groups, _) in SCENARIOS.items() if not groups[0][0].kernel_block]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 25])
@pytest.mark.parametrize("name", UNSPLIT)
def test_pools_pass_any_number_of_pages_at_once(name, chunk_bytes, device):
    groups, _ = SCENARIOS[name]
    _assert_round_trip(PoolWorker(groups, packed_buffer, device=device, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", [Path.TRITON, Path.COPY_ENGINE])
@pytest.mark.parametrize("name", UNSPLIT)
def test_pools_of_every_kind_take_every_path(name, path, device):
    groups, _ = SCENARIOS[name]
    _assert_round_trip(PoolWorker(groups, packed_buffer, device=device, path=path))


@st.composite
def _models(draw):
    """Groups with layers of any pools; a group cuts the pages of all its pools alike."""
    units = draw(st.sampled_from([1, 2, 3]))
    shapes = [
        (draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 6, 16, 36])))
        for _ in range(draw(st.integers(1, 3)))
    ]
    pages = [draw(st.sampled_from([4, 8])) * units for _ in shapes]
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        per_page, per_block = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4)]))
        pools = draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=4))
        groups.append(
            tuple(
                Layer(pool, *shapes[pool], pages[pool] // per_page * per_block, pages[pool])
                for pool in pools
            )
        )
    used = sorted({layer.pool for group in groups for layer in group})
    return tuple(
        tuple(replace(layer, pool=used.index(layer.pool)) for layer in group) for group in groups
    )


@given(groups=_models(), chunk_bytes=st.sampled_from([1, 300, 1 << 20]), seed=st.integers(0, 99))
def test_any_groups_may_feed_any_pools(groups, chunk_bytes, seed):
    _assert_round_trip(PoolWorker(groups, packed_buffer, chunk_bytes=chunk_bytes, seed=seed))


class StagingOnHost:
    """What staging does, without a device: one step after the other."""

    def __init__(self):
        self.num_reads = 0

    def upload(self, array):
        return torch.from_numpy(array)

    def run(self, relayout, host, slots, *, reads, writes):
        staged = torch.full((len(slots), host.shape[1]), 0xAA, dtype=torch.uint8)
        assert (np.diff(slots) > 0).all()
        if reads:
            staged.copy_(host[slots])
            self.num_reads += len(slots)
        relayout(staged)
        if writes:
            host[slots] = staged


class Passage:
    def __init__(self, scratch_bytes):
        self.scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        self.staging = StagingOnHost()


@pytest.mark.parametrize(
    ("path", "chunk_bytes"),
    [(Path.TORCH, 1), (Path.TORCH, 9000), (Path.TORCH, 1 << 25), (Path.TRITON, 1 << 25)],
)
@pytest.mark.parametrize("name", UNSPLIT)
def test_all_groups_of_a_pool_meet_in_a_staged_page_and_whole_pages_are_not_read(
    name, chunk_bytes, path
):
    groups, _ = SCENARIOS[name]
    worker = PoolWorker(groups, packed_buffer, chunk_bytes=chunk_bytes, path=path)
    content = worker.write()
    before = worker.raw.clone()
    shuffled = tuple(map(worker.rng.permutation, worker.copies))
    for direction in (Direction.SAVE, Direction.LOAD):
        for pool, region in zip(worker.copier.pools, worker.host, strict=True):
            passage = Passage(pool.workspace_size.staging_bytes)
            pool.copy(direction, shuffled, region, passage)
            whole = NUM_PAGES if direction is Direction.LOAD else 0
            assert passage.staging.num_reads == whole
        if direction is Direction.SAVE:
            for saved, expected in zip(worker.saved(), worker.pages(content), strict=True):
                np.testing.assert_array_equal(saved, expected)
            worker.write()
    assert torch.equal(worker.raw, before)


def test_more_units_than_the_device_is_told_at_once_come_in_sections(monkeypatch):
    monkeypatch.setattr(reference, "UPLOAD_ROWS", 5)
    groups, _ = SCENARIOS["groups of several layers"]
    worker = PoolWorker(groups, packed_buffer)
    content = worker.write()
    (_, pool) = worker.copier.pools
    passage = Passage(pool.workspace_size.staging_bytes)
    lengths = []
    upload = passage.staging.upload
    passage.staging.upload = lambda rows: lengths.append(len(rows)) or upload(rows)
    pool.copy(Direction.SAVE, worker.copies, worker.host[1], passage)
    assert lengths == [4] * NUM_PAGES
    np.testing.assert_array_equal(worker.saved()[1], worker.pages(content)[1])


STAGES = ["at once", "staged", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("how", STAGES)
@pytest.mark.parametrize(
    "name",
    ["five window groups and a full one", "states with padding", "draft of other heads"],
)
def test_a_copy_of_some_groups_leaves_the_layers_of_the_others_alone(name, how):
    """As after a hit: the window of the last page, the state of one boundary, all of the rest."""
    groups, _ = SCENARIOS[name]
    worker = PoolWorker(groups, packed_buffer, device="cuda" if how == "cuda" else "cpu")
    content = worker.write()
    chosen = worker.slots[-1]
    some = (*(rows[rows[:, 0] == chosen] for rows in worker.copies[:-1]), worker.copies[-1])
    _copy(worker, Direction.SAVE, some, how)
    last = len(groups) - 1
    for pool, (saved, expected) in enumerate(
        zip(worker.saved(), worker.pages(content), strict=True)
    ):
        np.testing.assert_array_equal(saved[-1], expected[-1])
        for (number, i), place in worker.places.items():
            if groups[number][i].pool != pool:
                continue
            early = saved[:-1, :, place]
            is_copied = number == last
            assert np.array_equal(early, expected[:-1, :, place]) is is_copied
            assert (early == 0xEE).all() or is_copied
    before = worker.raw.clone()
    worker.write()
    _copy(worker, Direction.LOAD, some, how)
    settle(worker.raw)
    stale = worker.raw != before
    assert stale.any() == (len(groups) > 1)
    _copy(worker, Direction.SAVE, worker.copies, how)
    for saved, expected in zip(worker.saved(), worker.pages(content), strict=True):
        np.testing.assert_array_equal(saved[-1], expected[-1])


def _copy(worker, direction, copies, how):
    if how == "staged":
        for pool, region in zip(worker.copier.pools, worker.host, strict=True):
            pool.copy(direction, copies, region, Passage(pool.workspace_size.staging_bytes))
    else:
        copy = worker.copier.save if direction is Direction.SAVE else worker.copier.load
        copy(copies, worker.host)


TWO_GROUPS = ((Layer(1, kind="window"),), (Layer(),))


def test_lists_of_groups_without_a_layer_here_are_ignored():
    worker = PoolWorker(TWO_GROUPS, packed_buffer)
    content = worker.write()
    foreign = np.full((3, 4), 1 << 20, dtype=np.int32)
    worker.copier.save((*worker.copies, foreign), worker.host)
    for saved, expected in zip(worker.saved(), worker.pages(content), strict=True):
        np.testing.assert_array_equal(saved, expected)


def test_a_list_too_few_breaks_an_invariant():
    worker = PoolWorker(TWO_GROUPS, packed_buffer)
    with pytest.raises(InvariantBroken, match="of 1 KV cache groups came, group 1 has layers"):
        worker.copier.save(worker.copies[:1], worker.host)


def test_an_index_out_of_range_in_a_later_group_is_refused_before_a_byte_of_the_pool_moves():
    worker = PoolWorker(((Layer(),), (Layer(block=8),)), packed_buffer)
    worker.write()
    wrong = worker.copies[1].copy()
    wrong[-1, 1] = 1  # pages of this group have one granule
    with pytest.raises(InvariantBroken, match=r"is not below \(7, 1, "):
        worker.copier.save((worker.copies[0], wrong), worker.host)
    assert (worker.host[0] == 0xEE).all()


def test_regions_in_another_order_than_the_pools_break_an_invariant():
    groups = ((Layer(1, content=4096),), (Layer(),))
    worker = PoolWorker(groups, packed_buffer)
    with pytest.raises(InvariantBroken, match="of 4096 bytes, not of the pool's 65536"):
        worker.copier.pools[1].copy(Direction.LOAD, worker.copies, worker.host[0], Passage(1 << 20))


def test_pools_that_read_the_list_of_one_group_differently_are_refused():
    groups = ((Layer(), Layer(1, page=16)),)
    with pytest.raises(ConfigError, match=r"group 0 cut .* \(2, 1\) and \(4, 1\) granules"):
        PoolWorker(groups, packed_buffer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((), "each of the page's 2 layers once, got the places \\[\\]"),
        ((0, 0), "2 layers once, got the places \\[0, 0\\]"),
        ((1, 2), "2 layers once, got the places \\[1, 2\\]"),
    ],
)
def test_groups_hold_every_layer_of_a_pool_once(change, message):
    worker = PoolWorker(TWO_GROUPS, packed_buffer)
    (layers,) = worker.device_groups(0)[0].layers
    groups = [DeviceGroup(i, 4, (replace(layers, layers=(p,)),)) for i, p in enumerate(change)]
    layout = replace(worker.layouts[0], layers=LayerSpan(3, 5), members=())
    with pytest.raises(ConfigError, match=message):
        PageCopier(worker.raw, groups, layout)


def test_a_group_without_a_layer_is_refused():
    worker = PoolWorker(TWO_GROUPS, packed_buffer)
    groups = [*worker.device_groups(0), DeviceGroup(3, 4, ())]
    with pytest.raises(ConfigError, match="group 3 has no layer in this pool"):
        PageCopier(worker.raw, groups, worker.layouts[0])

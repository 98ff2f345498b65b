"""Geometry of host pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import (
    LayerSpan,
    PageLayout,
    default_heads_per_group,
    granule_tokens,
    registration_slots,
)


def _layout(**changes):
    fields = {
        "page_size": 256,
        "layers": LayerSpan(0, 60),
        "total_layers": 60,
        "head_start": 0,
        "head_stop": 8,
        "total_kv_heads": 8,
        "heads_per_group": 2,
        "row_bytes": 512,
        "layer_partition": 30,
    }
    return PageLayout(**(fields | changes))


def _cells(layout):
    return [(s.layers.start, s.layers.stop, s.head_group) for s in layout.shards]


def test_fleet_of_different_topologies_shares_eight_objects_per_page():
    whole = _cells(_layout())
    assert whole == [(start, start + 30, group) for start in (0, 30) for group in range(4)]
    by_rank_of_tp4_pp2 = [
        _cells(_layout(layers=LayerSpan(start, start + 30), head_start=h, head_stop=h + 2))
        for start in (0, 30)
        for h in range(0, 8, 2)
    ]
    assert [len(cells) for cells in by_rank_of_tp4_pp2] == [1] * 8
    assert sorted(cell for cells in by_rank_of_tp4_pp2 for cell in cells) == sorted(whole)
    first_of_tp2 = _cells(_layout(head_stop=4))
    second_of_tp2 = _cells(_layout(head_start=4))
    assert first_of_tp2 == [(0, 30, 0), (0, 30, 1), (30, 60, 0), (30, 60, 1)]
    assert second_of_tp2 == [(0, 30, 2), (0, 30, 3), (30, 60, 2), (30, 60, 3)]


def test_last_stage_may_end_with_a_short_span():
    layout = _layout(layers=LayerSpan(30, 61), total_layers=61)
    assert [s.layers for s in layout.shards[::4]] == [LayerSpan(30, 60), LayerSpan(60, 61)]
    assert layout.shards[-1].length * 30 == layout.shards[0].length


def test_without_a_layer_partition_the_stage_is_one_span():
    layout = _layout(layers=LayerSpan(7, 20), layer_partition=0)
    assert {s.layers for s in layout.shards} == {LayerSpan(7, 20)}


def test_objects_of_a_pool_lie_on_the_grid_and_hold_its_layers_only():
    window = [layer for layer in range(12) if layer % 6 != 5]
    whole = _layout(
        layers=LayerSpan(0, 12), total_layers=12, layer_partition=4, members=tuple(window)
    )
    assert whole.num_layers == 10
    assert whole.page_bytes == 10 * 4 * whole.layer_bytes
    assert [s.layers for s in whole.shards[::4]] == [LayerSpan(i, i + 4) for i in (0, 4, 8)]
    sizes = [s.length // whole.layer_bytes for s in whole.shards]
    assert sizes == [4] * 4 + [3] * 4 + [3] * 4
    offsets = [s.offset // whole.layer_bytes for s in whole.shards[:8]]
    assert offsets == [0, 10, 20, 30, 4, 14, 24, 34]


def test_stages_of_any_size_write_the_same_objects_of_a_pool():
    fields = {"total_layers": 12, "layer_partition": 2, "head_stop": 2}
    members = (1, 4, 5, 11)
    whole = _layout(layers=LayerSpan(0, 12), members=members, **fields)
    stages = [
        _layout(
            layers=LayerSpan(start, start + 4),
            members=tuple(m for m in members if start <= m < start + 4),
            **fields,
        )
        for start in (0, 4, 8)
    ]
    assert [c for stage in stages for c in _cells(stage)] == _cells(whole)
    lengths = [shard.length for stage in stages for shard in stage.shards]
    assert lengths == [shard.length for shard in whole.shards]
    assert _cells(whole) == [(0, 2, 0), (4, 6, 0), (10, 12, 0)]


def test_a_pool_of_all_layers_is_the_same_as_one_that_names_none():
    every = _layout(members=tuple(range(60)))
    assert every == _layout()
    assert every.shards == _layout().shards


def test_objects_carry_the_digest_of_their_pool():
    assert {shard.pool for shard in _layout(pool="00c0ffee").shards} == {"00c0ffee"}
    assert {shard.pool for shard in _layout().own_shards} == {""}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"members": (3, 3)}, r"ascend within \[0, 60\), got \(3, 3\)"),
        ({"members": (4, 3)}, r"got \(4, 3\)"),
        ({"members": (0, 60)}, r"got \(0, 60\)"),
        ({"members": (29, 31), "layers": LayerSpan(30, 60)}, r"within \[30, 60\)"),
        ({"pool": "c0ffee"}, "8 lower-case hex digits, got 'c0ffee'"),
        ({"pool": "00C0FFEE"}, "got '00C0FFEE'"),
    ],
)
def test_a_pool_of_other_layers_or_of_no_digest_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        _layout(**changes)


@st.composite
def _layouts(draw):
    group = draw(st.integers(1, 3))
    before, local, after = (draw(st.integers(low, 4)) * group for low in (0, 1, 0))
    step = draw(st.integers(0, 4))
    start = draw(st.integers(0, 3)) * max(step, 1)
    layers = LayerSpan(start, start + draw(st.integers(1, 9)))
    members = draw(st.sets(st.integers(layers.start, layers.stop - 1)))
    return PageLayout(
        page_size=draw(st.sampled_from([1, 16, 64])),
        layers=layers,
        total_layers=layers.stop,
        head_start=before,
        head_stop=before + local,
        total_kv_heads=before + local + after,
        heads_per_group=group,
        row_bytes=draw(st.integers(1, 700)),
        layer_partition=step,
        members=tuple(sorted(members)),
        pool=draw(st.sampled_from(["", "0123abcd"])),
    )


@given(_layouts())
def test_shards_tile_the_page_and_their_cells_are_distinct(layout):
    end = 0
    for shard in sorted(layout.shards, key=lambda shard: shard.offset):
        assert shard.offset == end
        end += shard.length
    assert end == layout.page_bytes
    assert len(set(_cells(layout))) == len(layout.shards)
    for shard in layout.shards:
        num_members = sum(shard.layers.start <= m < shard.layers.stop for m in layout.members)
        assert shard.length == num_members * layout.layer_bytes


@pytest.mark.parametrize(("num_replicas", "partition"), [(2, 30), (3, 12), (8, 0), (4, 60)])
def test_replicas_write_every_object_once_between_them(num_replicas, partition):
    latent = {"head_stop": 1, "total_kv_heads": 1, "heads_per_group": 1}
    replicas = [
        _layout(**latent, layer_partition=partition, num_replicas=num_replicas, replica=r)
        for r in range(num_replicas)
    ]
    alone = _layout(**latent, layer_partition=partition)
    assert all(replica.shards == alone.shards == alone.own_shards for replica in replicas)
    written = [shard for replica in replicas for shard in replica.own_shards]
    assert sorted(written, key=lambda shard: shard.offset) == list(alone.shards)
    assert sum(replica.own_bytes for replica in replicas) == alone.page_bytes
    most, least = (pick(len(r.own_shards) for r in replicas) for pick in (max, min))
    assert most - least <= 1


def test_replicas_share_the_objects_of_a_pool_evenly_where_spans_lack_its_layers():
    latent = {"head_stop": 1, "total_kv_heads": 1, "heads_per_group": 1, "layer_partition": 2}
    replicas = [
        _layout(**latent, members=tuple(range(3, 60, 4)), num_replicas=2, replica=r)
        for r in range(2)
    ]
    assert [len(replica.own_shards) for replica in replicas] == [8, 7]
    written = {shard for replica in replicas for shard in replica.own_shards}
    assert written == set(replicas[0].shards)


def test_a_replica_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="a replica is one of 2, got 2"):
        _layout(num_replicas=2, replica=2)


@given(_layouts())
def test_slots_are_aligned_and_hold_a_page(layout):
    assert layout.slot_stride % 4096 == 0
    assert 0 <= layout.slot_stride - layout.page_bytes < 4096


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"page_size": 0}, "0 tokens"),
        ({"row_bytes": 0}, "got 0"),
        ({"heads_per_group": 0}, "got 0"),
        ({"heads_per_group": 3}, "8 KV heads and this worker's 8, got 3"),
        ({"heads_per_group": 4, "head_stop": 2}, "worker's 2, got 4"),
        ({"head_start": 1, "head_stop": 3}, "multiple of the 2 heads of a group, got 1"),
        ({"head_stop": 9}, "8 KV heads"),
        ({"head_start": 8}, r"\[8, 8\)"),
        ({"layer_partition": -1}, "got -1"),
        ({"layers": LayerSpan(10, 60)}, r"stage \[10, 60\) does not fit .* 30"),
        ({"layers": LayerSpan(0, 20)}, r"stage \[0, 20\) does not fit .* 30"),
        ({"layers": LayerSpan(30, 61)}, "60 layers"),
    ],
)
def test_share_that_does_not_fit_is_refused_with_its_numbers(changes, numbers):
    with pytest.raises(ConfigError, match=numbers):
        _layout(**changes)


@pytest.mark.parametrize("bounds", [(0, 0), (3, 2), (-1, 4)])
def test_empty_or_negative_layer_span_is_refused(bounds):
    with pytest.raises(ConfigError, match="0 <= start < stop"):
        LayerSpan(*bounds)


def test_every_number_but_the_workers_own_share_is_in_the_digest():
    fields = _layout().digest_fields()
    same = _layout(head_stop=4, layers=LayerSpan(0, 30)).digest_fields()
    assert list(same.items()) == list(fields.items())
    changes = (
        {"page_size": 64},
        {"total_layers": 61},
        {"total_kv_heads": 16},
        {"heads_per_group": 1},
        {"row_bytes": 256},
        {"layer_partition": 15},
        {"pool": "00c0ffee"},
    )
    assert all(_layout(**change).digest_fields() != fields for change in changes)


@given(total=st.integers(1, 64), parts=st.integers(1, 16))
def test_default_group_divides_the_model_and_the_worker(total, parts):
    local = max(1, total // parts)
    group = default_heads_per_group(total, local)
    assert total % group == 0
    assert local % group == 0


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_default_group_is_the_same_up_to_tp8(tp):
    assert default_heads_per_group(8, 8 // tp) == 1
    assert default_heads_per_group(32, 32 // tp) == 4


@pytest.mark.parametrize(("page", "block"), [(256, 24), (24, 256), (0, 16)])
def test_page_and_block_that_do_not_divide_are_refused(page, block):
    with pytest.raises(ConfigError, match=f"{page} .* {block} must divide"):
        granule_tokens(page, block)


def test_opaque_blocks_are_never_cut():
    assert granule_tokens(256, 32, whole_blocks=True) == 32
    with pytest.raises(ConfigError, match="multiple of the block size 128, got 64"):
        granule_tokens(64, 128, whole_blocks=True)


def test_pinned_pieces_are_whole_slots_of_at_most_one_gibibyte():
    assert registration_slots(3 << 20) * (3 << 20) <= 1 << 30
    assert registration_slots(5 << 30) == 1

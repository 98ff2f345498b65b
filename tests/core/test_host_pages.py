"""Which bytes of which region are which objects, and what answers about them mean."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.host_pages import HostPages
from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage_process_config import Section, StorageProcessConfig

NAMESPACE = "hc1-0123456789abcdef"
NUM_SLOTS = 4


def shards_of(pool: str, *lengths: int) -> tuple[Shard, ...]:
    """One behind the other, one head group each."""
    return tuple(
        Shard(LayerSpan(0, 2), group, sum(lengths[:group]), length, pool)
        for group, length in enumerate(lengths)
    )


def section(base: int, pool: str, *lengths: int, num_own: int | None = None, **options) -> Section:
    shards = shards_of(pool, *lengths)
    return Section(base, 4096, shards, shards[:num_own], **options)


REGION = NUM_SLOTS * 4096
FULL = section(0, "", 100, 60)
WINDOW = section(REGION, "0000000a", 200, 30, num_own=1, bit=0)
DRAFT = section(2 * REGION, "0000000b", 7, bit=2, may_be_zero=True)


def make_pages(*sections: Section, all_parts: int = 7) -> HostPages:
    pool = bytearray(b"?" * (len(sections) * REGION))
    return HostPages(memoryview(pool), NUM_SLOTS, sections, all_parts)


def hash_of(page: int) -> bytes:
    return page.to_bytes(32, "big")


def places(pages: HostPages, items) -> list[tuple[str, int, int]]:
    """(pool, first byte in the arena, length) of each object, found by writing to it."""
    found = []
    for item in items:
        before = bytes(pages.pool)
        item.payload[:] = b"!" * len(item.payload)
        changed = [i for i, (a, b) in enumerate(zip(before, pages.pool, strict=True)) if a != b]
        assert changed == list(range(changed[0], changed[0] + len(item.payload)))
        found.append((item.shard.pool, changed[0], len(changed)))
        pages.pool[:] = before
    return found


def test_objects_of_a_page_lie_in_the_regions_of_their_pools():
    pages = make_pages(FULL, WINDOW, DRAFT)
    required = [("", 3 * 4096, 100), ("", 3 * 4096 + 100, 60)]
    window = [("0000000a", REGION + 3 * 4096, 200), ("0000000a", REGION + 3 * 4096 + 200, 30)]
    draft = [("0000000b", 2 * REGION + 3 * 4096, 7)]
    for parts, wanted in ((0, []), (1, window), (2, []), (4, draft), (7, window + draft)):
        items = pages.objects(NAMESPACE, hash_of(1), 3, parts)
        assert places(pages, items) == required + wanted
        assert [item.name for item in items] == [
            shard_name(hash_of(1), NAMESPACE, item.shard) for item in items
        ]


def test_a_worker_writes_its_own_shards_of_each_section():
    pages = make_pages(FULL, WINDOW, DRAFT)
    own = pages.own_objects(NAMESPACE, hash_of(1), 0, 5)
    assert [item.payload.nbytes for item in own] == [100, 60, 200, 7]
    assert [pages.written_bytes(parts) for parts in (0, 1, 2, 4, 5)] == [160, 360, 160, 167, 367]
    assert pages.num_required == 2


def test_names_are_those_of_all_objects_page_by_page():
    pages = make_pages(FULL, WINDOW, DRAFT)
    hashes = [hash_of(page) for page in range(3)]
    shards = [shard for one in (FULL, WINDOW, DRAFT) for shard in one.shards]
    assert pages.names(NAMESPACE, hashes) == [
        shard_name(page_hash, NAMESPACE, shard) for page_hash in hashes for shard in shards
    ]


@pytest.mark.parametrize("parts", range(8))
def test_zeros_fill_one_slot_of_what_may_be_zero_and_is_not_there(parts):
    pages = make_pages(FULL, WINDOW, DRAFT)
    before = bytes(pages.pool)
    is_needed = not parts & 4
    assert pages.zero(1, parts) is is_needed
    start = 2 * REGION + 4096
    zeros = bytes(4096) if is_needed else before[:4096]
    assert bytes(pages.pool) == before[:start] + zeros + before[start + 4096 :]


SHAPES = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([None, 0, 1, 2])), min_size=1, max_size=4
)


@given(shapes=SHAPES, chances=st.lists(st.integers(0, 9), max_size=60), num_pages=st.integers(0, 6))
def test_a_part_is_told_when_all_its_objects_are_there_and_pages_end_at_a_required_one(
    shapes, chances, num_pages
):
    sections = [
        section(i * REGION, f"{i:08x}" if i else "", *[8] * width, bit=bit)
        for i, (width, bit) in enumerate(shapes)
    ]
    pages = make_pages(*sections)
    names = pages.names(NAMESPACE, [hash_of(page) for page in range(num_pages)])
    present = {
        name
        for i, name in enumerate(names)
        if not chances or chances[i % len(chances)]  # a tenth is lost
    }

    def has(page: int, one: Section) -> bool:
        wanted = {shard_name(hash_of(page), NAMESPACE, shard) for shard in one.shards}
        return wanted <= present

    expected = []
    for page in range(num_pages):
        if not all(has(page, one) for one in sections if one.bit is None):
            break
        lost = {one.bit for one in sections if one.bit is not None and not has(page, one)}
        expected.append(7 - sum(1 << bit for bit in lost))
    assert list(pages.leading_parts([name in present for name in names])) == expected


# What a worker may tell its process --------------------------------------------------------------


def make_config(*sections: Section, all_parts: int = 7) -> StorageProcessConfig:
    return StorageProcessConfig(
        worker_id=0,
        num_slots=NUM_SLOTS,
        sections=sections,
        all_parts=all_parts,
        storage=StorageConfig.detached(),
    )


def test_a_configuration_with_sections_survives_the_way_to_the_process():
    config = make_config(DRAFT, FULL, WINDOW)
    encoded = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(encoded, type=StorageProcessConfig) == config
    assert config.arena_bytes == 3 * REGION


@pytest.mark.parametrize(
    ("sections", "all_parts", "message"),
    [
        ((), 0, "at least one section"),
        ((FULL, WINDOW), 0, "all parts are 0x0, but the sections have 0x1"),
        ((FULL, WINDOW, DRAFT), 3, "all parts are 0x3, but the sections have 0x5"),
        ((FULL,), 256, "all parts are 0x100"),
        ((FULL, section(REGION - 1, "0000000a", 8)), 0, "begins at byte 16383, before byte 16384"),
        ((section(-1, "", 8),), 0, "begins at byte -1, before byte 0"),
    ],
)
def test_sections_that_contradict_one_another_are_refused(sections, all_parts, message):
    with pytest.raises(ConfigError, match=message):
        make_config(*sections, all_parts=all_parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": ()}, "needs shards"),
        ({"slot_stride": 159}, "end at byte 160 of a slot of 159"),
        ({"bit": 8}, "one of 8, got 8"),
        ({"bit": -1}, "one of 8, got -1"),
        ({"may_be_zero": True}, "only a section with a bit"),
    ],
)
def test_a_section_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(FULL, **change)

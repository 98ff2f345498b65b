"""What pages and copies weigh, over all workers."""

import numpy as np
import pytest

from vllm_hicache.copied_bytes import CopiedBytes
from vllm_hicache.fetch import FetchPolicy
from vllm_hicache.plan import group_copies
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.pools import KVGroup
from vllm_hicache.prefix_index import HostPage

PAGE = 64
FULL, WINDOW = KVGroup(16), KVGroup(128, bit=0)
STATE = KVGroup(64, bit=1, is_state=True)


def weights(*groups: KVGroup, per_token: tuple[int, ...] = (), page: int = 0) -> CopiedBytes:
    whole = page or sum(
        size if group.is_state else size * PAGE
        for group, size in zip(groups, per_token, strict=True)
    )
    return CopiedBytes(
        PlannerOptions(
            page_size=PAGE,
            block_size=128,
            num_host_slots=8,
            page_bytes=(whole // 2, whole - whole // 2),
            eviction="lru",
            fetch=FetchPolicy("timeout", 1.0, 0.0, 0, 0.1, 1.0),
            persist_timeout_s=1.0,
            sync_load_max_s=0.0,
            defer_max_blocks=8,
            shares_device_pages=True,
            groups=groups,
            bytes_per_token=per_token,
        )
    )


def pages(*parts: int) -> list[HostPage]:
    return [HostPage(bytes([number]), None, number, mask) for number, mask in enumerate(parts)]


def copies(*groups: KVGroup, parts: tuple[int, ...]) -> list[np.ndarray]:
    """Of whole pages, all blocks being there."""
    num_tokens = PAGE * len(parts)
    tables = [list(range(1, 1 + -(-num_tokens // group.block_size))) for group in groups]
    return group_copies(
        0,
        num_tokens,
        page_size=PAGE,
        groups=groups,
        slots=np.arange(len(parts)),
        tables=tables,
        parts=parts,
    )


def test_without_pools_a_page_weighs_what_the_workers_say():
    one = weights(page=1_000_003)
    assert one.of_pages(pages(0, 0, 0)) == 3_000_009
    assert one.of_pages([]) == 0


def test_without_pools_the_blocks_of_a_page_weigh_the_page():
    one = weights(page=PAGE * 4096)
    group = KVGroup(128)
    assert one.of_copies(copies(group, parts=(0, 0))) == 2 * PAGE * 4096
    (rows,) = copies(group, parts=(0, 0))
    assert one.of_copies([rows[:1]]) == PAGE * 4096


def test_a_page_weighs_what_it_has_of_each_pool():
    one = weights(FULL, WINDOW, STATE, per_token=(10, 3, 5000))
    full, window = 10 * PAGE, 3 * PAGE
    assert one.of_pages(pages(0b11)) == full + window + 5000
    assert one.of_pages(pages(0b00)) == full
    assert one.of_pages(pages(0b01, 0b10, 0b00)) == 3 * full + window + 5000


def test_groups_of_one_pool_weigh_together():
    other = KVGroup(128, bit=0)
    one = weights(FULL, WINDOW, other, per_token=(10, 3, 4))
    assert one.of_pages(pages(1, 0)) == 2 * 10 * PAGE + 7 * PAGE


@pytest.mark.parametrize("parts", [(3, 3), (0, 3), (1, 2), (0, 0)])
def test_copies_of_whole_pages_weigh_what_the_pages_do(parts):
    one = weights(FULL, WINDOW, STATE, per_token=(10, 3, 5000))
    rows = copies(FULL, WINDOW, STATE, parts=parts)
    assert one.of_copies(rows) == one.of_pages(pages(*parts))


def test_a_granule_is_the_smaller_of_page_and_block_and_a_state_is_whole():
    one = weights(FULL, WINDOW, STATE, per_token=(10, 3, 5000))
    row, none = np.zeros((1, 4), np.int32), np.zeros((0, 4), np.int32)
    assert one.of_copies([row, none, none]) == 16 * 10
    assert one.of_copies([none, row, none]) == PAGE * 3
    assert one.of_copies([none, none, row]) == 5000


def test_lists_of_copies_are_one_for_each_group():
    one = weights(FULL, WINDOW, per_token=(10, 3))
    with pytest.raises(ValueError, match="zip"):
        one.of_copies([np.zeros((1, 4), np.int32)])

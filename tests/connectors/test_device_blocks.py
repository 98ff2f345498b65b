"""References on the blocks of vLLM's own pool."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_hicache.connectors.device_blocks import PoolReferences, drain_before_reset

pytestmark = pytest.mark.vllm

BLOCK = 16


@pytest.fixture
def pool() -> BlockPool:
    init_none_hash(sha256)
    return BlockPool(8, enable_caching=True, hash_block_size=BLOCK)


@pytest.fixture
def references(pool: BlockPool) -> PoolReferences:
    references = PoolReferences()
    references.pool = pool
    return references


def _request(num_tokens: int) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def _cached_blocks(pool: BlockPool, request: Request) -> list[int]:
    """Blocks of a request whose two full blocks are in the prefix cache."""
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(
        request,
        blocks,
        num_cached_blocks=0,
        num_full_blocks=2,
        block_size=BLOCK,
        kv_cache_group_id=0,
    )
    return [block.block_id for block in blocks]


def _hits(pool: BlockPool, request: Request) -> list[bool]:
    return [pool.get_cached_block(h, [0]) is not None for h in request.block_hashes]


def test_a_held_block_is_not_free_until_it_is_released(pool, references):
    blocks = [block.block_id for block in pool.get_new_blocks(2)]
    num_free = pool.get_num_free_blocks()
    references.hold(blocks)
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    assert pool.get_num_free_blocks() == num_free
    assert references.num_held == 2
    assert references.num_free == num_free
    references.release(blocks)
    assert pool.get_num_free_blocks() == references.num_free == num_free + 2
    assert references.num_held == 0


def test_the_end_of_a_chain_is_reused_before_its_beginning(pool, references):
    blocks = _cached_blocks(pool, _request(2 * BLOCK))
    references.hold(blocks)
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    references.release(blocks)
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert order[-2:] == blocks[::-1]


def test_forgetting_empties_the_prefix_cache_but_takes_no_block_away(pool, references):
    request = _request(2 * BLOCK)
    blocks = _cached_blocks(pool, request)
    assert _hits(pool, request) == [True, True]
    references.forget_cached()
    assert _hits(pool, request) == [False, False]
    assert [pool.blocks[block_id].ref_cnt for block_id in blocks] == [1, 1]
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    assert pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("name", ["hold", "release"])
def test_without_a_pool_nothing_can_be_held(name):
    with pytest.raises(RuntimeError, match="has not bound its block pool"):
        getattr(PoolReferences(), name)([1])


def test_without_a_pool_nothing_can_be_forgotten():
    with pytest.raises(RuntimeError, match="has not bound its block pool"):
        PoolReferences().forget_cached()


def test_a_reset_of_the_prefix_cache_drains_copies_first():
    calls = []

    class Manager:
        def reset_prefix_cache(self) -> bool:
            calls.append("reset")
            return True

    manager = Manager()
    drain_before_reset(manager, lambda: calls.append("drain"))
    assert manager.reset_prefix_cache() is True
    assert calls == ["drain", "reset"]


def test_the_next_blocks_are_those_that_vllm_hands_out_next(pool, references):
    blocks = _cached_blocks(pool, _request(2 * BLOCK))
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    announced = list(references.next_reused(100))
    assert len(announced) == pool.get_num_free_blocks() == 7
    assert announced[-2:] == blocks[::-1]
    assert list(references.next_reused(3)) == announced[:3]
    assert [block.block_id for block in pool.get_new_blocks(7)] == announced
    assert list(references.next_reused(3)) == []


def test_a_watched_block_keeps_its_references_and_its_place_in_the_queue(pool, references):
    blocks = _cached_blocks(pool, _request(2 * BLOCK))
    references.watch(blocks, lambda _: None)
    assert [pool.blocks[block_id].ref_cnt for block_id in blocks] == [1, 1]
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    assert list(references.next_reused(100))[-2:] == blocks[::-1]


def test_a_watched_block_is_told_once_when_it_is_handed_out_and_not_when_it_is_hit(
    pool, references
):
    request, told = _request(2 * BLOCK), []
    blocks = _cached_blocks(pool, request)
    references.watch(blocks, told.append)
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    pool.touch([pool.blocks[blocks[0]]])
    pool.free_blocks([pool.blocks[blocks[0]]])
    assert told == []
    pool.free_blocks(pool.get_new_blocks(7))
    assert sorted(told) == sorted(blocks)
    pool.get_new_blocks(7)
    assert sorted(told) == sorted(blocks)


def test_a_reset_of_vllms_cache_tells_all_watched_blocks(pool, references):
    told = []
    blocks = _cached_blocks(pool, _request(2 * BLOCK))
    references.watch(blocks, told.append)
    pool.free_blocks(pool.blocks[block_id] for block_id in reversed(blocks))
    assert pool.reset_prefix_cache()
    assert sorted(told) == sorted(blocks)


def test_without_a_pool_nothing_is_watched_or_announced():
    assert PoolReferences().num_blocks == 0
    with pytest.raises(RuntimeError, match="has not bound its block pool"):
        PoolReferences().watch([1], lambda _: None)
    with pytest.raises(RuntimeError, match="has not bound its block pool"):
        next(PoolReferences().next_reused(1))

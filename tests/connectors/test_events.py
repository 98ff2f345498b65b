"""KV events for pages, with vLLM's own requests, hashes and event types."""

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from vllm_hicache.connectors.events import PageEvents
from vllm_hicache.series import HOST, STORAGE

pytestmark = pytest.mark.vllm

BLOCK = 16


@pytest.fixture(autouse=True)
def _none_hash():
    init_none_hash(sha256)


def _request(num_tokens, *, request_id="a", block_size=BLOCK, cache_salt=None):
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, eos_token_id=0)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=params,
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def _store_pages(events, request, num_pages, tier=HOST):
    for page in range(num_pages):
        events.stored(b"page %d" % page, tier, events.blocks_of_page(request, page))


def _external(request):
    return [maybe_convert_block_hash(h) for h in request.block_hashes]


def test_page_names_the_blocks_that_lie_in_it():
    request = _request(128)
    events = PageEvents(block_size=BLOCK, page_size=64)
    blocks = events.blocks_of_page(request, 1)
    hashes = _external(request)
    assert list(blocks.hashes) == hashes[4:8]
    assert blocks.parent == hashes[3]
    assert list(blocks.token_ids) == list(range(64, 128))
    assert events.blocks_of_page(request, 0).parent is None


def test_run_of_pages_is_one_event_like_vllms_own():
    request = _request(192, cache_salt="salt")
    events = PageEvents(block_size=BLOCK, page_size=64)
    _store_pages(events, request, 3)
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == _external(request)
    assert event.parent_block_hash is None
    assert event.token_ids == list(range(192))
    assert event.block_size == BLOCK
    assert event.medium == "CPU"
    assert event.group_idx == 0
    assert event.kv_cache_spec_kind == "full_attention"
    assert event.extra_keys == [("salt",), *[None] * 11]
    assert events.take() == []


def test_events_of_two_requests_or_tiers_are_not_merged():
    request = _request(128)
    events = PageEvents(block_size=BLOCK, page_size=64)
    first, second = (events.blocks_of_page(request, page) for page in range(2))
    events.stored(b"0", HOST, first)
    events.stored(b"0", STORAGE, first)
    events.stored(b"1", HOST, second)
    other = _request(64, request_id="b", cache_salt="x")
    events.stored(b"other", HOST, events.blocks_of_page(other, 0))
    taken = events.take()
    assert [event.medium for event in taken] == ["CPU", "STORAGE", "CPU", "CPU"]
    assert [len(event.block_hashes) for event in taken] == [4, 4, 4, 4]
    assert taken[2].parent_block_hash == first.hashes[-1]


def test_page_is_announced_once_until_it_leaves():
    request = _request(64)
    events = PageEvents(block_size=BLOCK, page_size=64)
    _store_pages(events, request, 1)
    _store_pages(events, request, 1)
    assert events.is_held(b"page 0", HOST)
    assert not events.is_held(b"page 0", STORAGE)
    assert len(events.take()) == 1
    events.removed(b"page 0", HOST)
    events.removed(b"page 0", HOST)
    (gone,) = events.take()
    assert isinstance(gone, BlockRemoved)
    assert gone.block_hashes == _external(request)
    assert gone.medium == "CPU"
    _store_pages(events, request, 1)
    assert len(events.take()) == 1


def test_unknown_page_leaves_silently():
    events = PageEvents(block_size=BLOCK, page_size=64)
    events.removed(b"never stored", HOST)
    assert events.take() == []


def test_evicted_pages_are_one_event_and_clear_removes_all_of_one_tier():
    request = _request(192)
    events = PageEvents(block_size=BLOCK, page_size=64)
    _store_pages(events, request, 3, HOST)
    _store_pages(events, request, 1, STORAGE)
    events.take()
    events.clear(HOST)
    (gone,) = events.take()
    assert gone.block_hashes == _external(request)
    assert events.is_held(b"page 0", STORAGE)


def test_stored_after_removed_keeps_its_order():
    request = _request(128)
    events = PageEvents(block_size=BLOCK, page_size=64)
    _store_pages(events, request, 1)
    events.removed(b"page 0", HOST)
    _store_pages(events, request, 1)
    assert [type(event) for event in events.take()] == [BlockStored, BlockRemoved, BlockStored]


def test_block_larger_than_a_page_is_announced_with_the_page_that_completes_it():
    request = _request(128, block_size=64)
    events = PageEvents(block_size=64, page_size=16)
    _store_pages(events, request, 3)
    assert events.take() == []
    _store_pages(events, request, 8)
    (event,) = events.take()
    assert event.block_hashes == _external(request)
    assert event.token_ids == list(range(128))
    events.removed(b"page 7", HOST)
    (gone,) = events.take()
    assert gone.block_hashes == _external(request)[1:]
    events.removed(b"page 6", HOST)
    assert events.take() == []


def test_hashes_of_a_finer_grain_are_seen_at_block_size():
    request = _request(128, block_size=8)
    events = PageEvents(block_size=BLOCK, page_size=64, hash_block_size=8)
    blocks = events.blocks_of_page(request, 1)
    assert len(blocks.hashes) == 4
    assert len(set(blocks.hashes)) == 4
    assert list(blocks.token_ids) == list(range(64, 128))


def test_events_survive_the_publishers_encoding():
    request = _request(128, cache_salt="salt")
    events = PageEvents(block_size=BLOCK, page_size=64)
    _store_pages(events, request, 2)
    events.removed(b"page 1", HOST)
    batch = KVEventBatch(ts=1.0, events=list(events.take()))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert [type(event) for event in decoded.events] == [BlockStored, BlockRemoved]
    assert decoded.events[0].token_ids == list(range(128))

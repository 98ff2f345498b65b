"""Block tables of requests, over vLLM's own block manager."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import BLOCK, GEMMA3, LLAMA, QWEN3NEXT, Specs, engine
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.request import Request

from vllm_hicache.connectors.request_tables import LiveTable, OfferedStates, RequestTables
from vllm_hicache.request_state import RequestState
from vllm_hicache.simulate.requests import Tokens

pytestmark = pytest.mark.vllm


class Scheduling:
    """One request in vLLM's manager, step by step, as its scheduler would do it."""

    def __init__(self, model: Path, specs: Specs) -> None:
        made = engine(model, specs)
        pools = made.model_pools()
        init_none_hash(sha256)
        self.unit = pools.unit
        self.manager = KVCacheManager(made.scheduler, 4096, pools.unit, pools.unit)
        self.tables = RequestTables(pools.groups)
        self.tables.manager = self.manager
        self.state = RequestState(Tokens("a", list(range(1, 2000)), pools.page_size))
        self.requests = {"a": self.state}

    def arrive(self, num_tokens: int) -> Request:
        return Request(
            request_id="a",
            prompt_token_ids=list(range(1, 1 + num_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.unit, sha256),
        )

    def admit(self, request: Request, num_tokens: int) -> SchedulerOutput:
        assert self.manager.allocate_slots(request, num_tokens) is not None
        output = self._output()
        blocks = self.manager.get_block_ids("a")
        new = NewRequestData.from_request(request, blocks)
        return replace(output, scheduled_new_reqs=[new])

    def go_on(
        self, request: Request, computed: int, num_tokens: int, *, is_resumed: bool = False
    ) -> SchedulerOutput:
        request.num_computed_tokens = computed
        new = self.manager.allocate_slots(request, num_tokens)
        assert new is not None
        blocks = self.manager.get_block_ids("a") if is_resumed else new.get_block_ids()
        cached = CachedRequestData(
            req_ids=["a"],
            resumed_req_ids={"a"} if is_resumed else set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks],
            num_computed_tokens=[computed],
            num_output_tokens=[0],
        )
        return replace(self._output(), scheduled_cached_reqs=cached)

    def _output(self) -> SchedulerOutput:
        block_state = KVConnectorBlockState(
            req_ids={"a"},
            resolve_block_ids=self.manager.get_block_ids,
            boundary_state_offloads=self.manager.take_boundary_state_offloads(),
        )
        return replace(SchedulerOutput.make_empty(), kv_connector_block_state=block_state)

    def seen(self) -> list[list[int]]:
        return [table[0 : len(table)] for table in self.state.tables]


@pytest.fixture
def scheduling(tiny_llama: Callable[..., Path]) -> Callable[[Specs], Scheduling]:
    return lambda specs: Scheduling(tiny_llama(), specs)


# One group --------------------------------------------------------------------------------------


def test_the_table_of_one_group_is_followed_without_vllms_manager(scheduling):
    one = scheduling(LLAMA)
    one.tables.manager = None
    request = one.arrive(200)
    assert one.tables.is_followed
    assert one.tables.follow(one.admit(request, 64), one.requests) == 2
    assert one.tables.follow(one.go_on(request, 64, 136), one.requests) == 5
    assert isinstance(one.state.block_ids, list)
    assert one.seen() == [list(one.manager.get_block_ids("a")[0])]
    assert len(one.state.block_ids) == 7


def test_a_request_that_comes_back_has_the_table_that_it_has_then(scheduling):
    one = scheduling(LLAMA)
    request = one.arrive(200)
    one.tables.follow(one.admit(request, 64), one.requests)
    one.manager.free(request)
    one.tables.follow(one.go_on(request, 0, 128, is_resumed=True), one.requests)
    assert one.seen() == [list(one.manager.get_block_ids("a")[0])]
    assert len(one.state.block_ids) == 4


def test_requests_that_are_not_known_are_passed_over(scheduling):
    for specs in (LLAMA, GEMMA3, QWEN3NEXT):
        one = scheduling(specs)
        request = one.arrive(2 * one.unit)
        assert one.tables.follow(one.admit(request, one.unit), {}) > 0
        assert one.tables.follow(one.go_on(request, one.unit, one.unit), {}) > 0


# Windows ----------------------------------------------------------------------------------------


def test_a_window_loses_the_blocks_that_vllm_takes_away_without_telling(scheduling):
    one = scheduling(GEMMA3)
    request = one.arrive(300)
    assert not one.tables.is_followed
    one.tables.follow(one.admit(request, 200), one.requests)
    assert all(isinstance(table, LiveTable) for table in one.state.tables)
    first = one.seen()
    assert [len(table) for table in first] == [7] * 4
    assert all(0 not in table for table in first)
    one.tables.follow(one.go_on(request, 200, 32), one.requests)
    window, full = one.seen()[0], one.seen()[3]
    assert window[:4] == [0] * 4
    assert window[4:7] == first[0][4:]
    assert 0 not in full
    assert full[:7] == first[3]
    assert one.seen() == [list(table) for table in one.manager.get_block_ids("a")]


def test_a_live_table_shows_what_vllm_has_when_it_is_looked_at(scheduling):
    one = scheduling(GEMMA3)
    request = one.arrive(300)
    one.tables.follow(one.admit(request, 64), one.requests)
    table = one.state.tables[3]
    assert (len(table), table[0], table[1:2]) == (2, table[0:2][0], [table[1]])
    one.go_on(request, 64, 64)  # not followed
    assert len(table) == 4
    one.manager.free(request)
    assert len(table) == 0


# States -----------------------------------------------------------------------------------------


def offered(tables) -> list[list[int]]:
    return [table[0 : len(table)] for table in tables if isinstance(table, OfferedStates)]


def test_a_state_is_there_in_the_step_that_completes_it_and_never_again(scheduling):
    one = scheduling(QWEN3NEXT)
    unit = one.unit
    request = one.arrive(3 * unit + 5)
    output = one.admit(request, 3 * unit)
    offers = output.kv_connector_block_state.boundary_state_offloads["a"]
    assert {tokens for _, _, tokens in offers} == {3 * unit}
    one.tables.follow(output, one.requests)
    by_group = {group: block_id for group, block_id, _ in offers}
    assert offered(one.state.tables) == [[0, 0, by_group[group]] for group in range(3)]
    assert isinstance(one.state.tables[3], LiveTable)
    assert one.state.tables[0][2] == by_group[0]
    assert one.state.tables[0][0:5] == [0, 0, by_group[0], 0, 0]
    one.tables.follow(one.go_on(request, 3 * unit, 5), one.requests)
    assert offered(one.state.tables) == [[], [], []]
    assert one.state.tables[0][2] == 0


def test_states_that_are_written_in_place_are_no_offers(scheduling):
    one = scheduling(QWEN3NEXT)
    request = one.arrive(3 * one.unit + 5)
    one.tables.follow(one.admit(request, one.unit // 2), one.requests)
    assert any(one.manager.get_block_ids("a")[0])
    assert offered(one.state.tables) == [[], [], []]


def test_an_offer_inside_a_block_is_left_alone(scheduling):
    one = scheduling(QWEN3NEXT)
    request = one.arrive(3 * one.unit + 5)
    output = one.admit(request, one.unit)
    offers = output.kv_connector_block_state.boundary_state_offloads
    offers["a"] = [(0, 11, one.unit + 3), (1, 12, one.unit), (3, 13, one.unit), (9, 14, one.unit)]
    offers["nobody"] = [(0, 15, one.unit)]
    one.tables.follow(output, one.requests)
    assert offered(one.state.tables) == [[], [12], []]


def test_at_its_end_a_request_offers_no_state_and_keeps_its_other_blocks(scheduling):
    one = scheduling(QWEN3NEXT)
    request = one.arrive(2 * one.unit)
    one.admit(request, 2 * one.unit)
    last = one.manager.get_block_ids("a")
    tables = one.tables.at_end(last)
    assert offered(tables) == [[], [], []]
    assert tables[3] is last[3]
    windows = scheduling(GEMMA3)
    given = ([0, 1], [0, 2], [0, 3], [4, 5])
    assert windows.tables.at_end(given) == given


def test_a_group_without_its_table_is_refused(scheduling):
    with pytest.raises(ValueError, match="zip"):
        scheduling(GEMMA3).tables.at_end(([1],))


def test_blocks_hold_as_many_tokens_as_the_tests_think(scheduling):
    assert scheduling(LLAMA).unit == BLOCK

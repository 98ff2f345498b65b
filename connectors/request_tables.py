"""Which device blocks the requests have, step by step, in every KV cache group."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast, overload

from vllm_hicache.plan import NULL_BLOCK
from vllm_hicache.pools import KVGroup
from vllm_hicache.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput


class LiveTable(Sequence[int]):
    """One request's block ids of one KV cache group, as vLLM has them when they are looked at: it
    takes blocks out of a window's table without telling. 0 stands for no block."""

    def __init__(self, manager: "KVCacheManager", request_id: str, group: int) -> None:
        self._manager = manager
        self._request_id = request_id
        self._group = group

    def _blocks(self) -> "Sequence[KVCacheBlock]":
        return self._manager.get_blocks(self._request_id).blocks[self._group]

    def __len__(self) -> int:
        return len(self._blocks())

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [block.block_id for block in self._blocks()[place]]
        return self._blocks()[place].block_id


class OfferedStates(Sequence[int]):
    """One request's state blocks of one KV cache group, as far as vLLM offers them in this step:
    any other one is written to in place while it runs, and may not be held."""

    def __init__(self) -> None:
        self.offers: dict[int, int] = {}

    def __len__(self) -> int:
        return max(self.offers, default=-1) + 1

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self.offers.get(i, NULL_BLOCK) for i in range(place.start, place.stop)]
        return self.offers.get(place, NULL_BLOCK)


class RequestTables:
    """Keeps the block tables of all requests.

    With one group of which vLLM takes no block away until the request ends, what each step adds
    is followed. Otherwise vLLM's own tables are looked at.
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        self._has_states = any(group.is_state for group in groups)
        self._offered: list[OfferedStates] = []
        self.is_followed = len(groups) == 1 and groups[0].bit is None
        self.manager: KVCacheManager | None = None

    def follow(self, output: "SchedulerOutput", requests: Mapping[str, RequestState]) -> int:
        """Note what this step has given to requests: whole tables at admission, then what is
        added. Returns how many blocks of the first group that were."""
        num_taken = 0
        for new in output.scheduled_new_reqs:
            num_taken += len(new.block_ids[0])
            self._set(requests.get(new.req_id), new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is None:
                continue
            num_taken += len(block_ids[0])
            state = requests.get(request_id)
            if request_id in cached.resumed_req_ids:
                self._set(state, block_ids[0])
            elif state is not None and self.is_followed:
                cast("list[int]", state.block_ids).extend(block_ids[0])
        if self._has_states:
            self._take_offers(output, requests)
        return num_taken

    def at_end(self, tables: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        """Of a request's last tables, those whose blocks may still be saved."""
        return tuple(
            OfferedStates() if group.is_state else table
            for group, table in zip(self._groups, tables, strict=True)
        )

    def _take_offers(self, output: "SchedulerOutput", requests: Mapping[str, RequestState]) -> None:
        """States that this step's forward completes, at boundaries. They are offered once."""
        for past in self._offered:
            past.offers.clear()
        self._offered.clear()
        block_state = output.kv_connector_block_state
        offers = block_state.boundary_state_offloads if block_state is not None else {}
        for request_id, offered in offers.items():
            state = requests.get(request_id)
            tables = state.tables if state is not None else ()
            for group, block_id, num_tokens in offered:
                table = tables[group] if group < len(tables) else None
                if not isinstance(table, OfferedStates):
                    continue
                place, rest = divmod(num_tokens, self._groups[group].block_size)
                if not rest:
                    table.offers[place - 1] = block_id
                    self._offered.append(table)

    def _set(self, state: RequestState | None, block_ids: Sequence[int]) -> None:
        if state is None:
            return
        if self.is_followed or self.manager is None:
            state.block_ids = list(block_ids)
            return
        tables: list[Sequence[int]] = [
            OfferedStates() if group.is_state else LiveTable(self.manager, state.request_id, number)
            for number, group in enumerate(self._groups)
        ]
        state.block_ids, state.other_tables = tables[0], tuple(tables[1:])

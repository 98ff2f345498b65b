"""The numbers that the planner decides by."""

from dataclasses import dataclass

from vllm_hicache.eviction import NEXT_USE
from vllm_hicache.fetch import FetchPolicy
from vllm_hicache.page_uses import POOLS_REMEMBERED, PageUses
from vllm_hicache.pools import HitRules, KVGroup, Pool


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Numbers that the planner decides by; all agreed between the workers at start."""

    page_size: int
    block_size: int
    """Of vLLM's scheduler: hits are multiples of it."""
    num_host_slots: int
    """In the end; fewer where a worker does not get the memory for them."""
    page_bytes: tuple[int, ...]
    """Bytes of one page, by worker."""
    eviction: str
    fetch: FetchPolicy
    persist_timeout_s: float
    sync_load_max_s: float
    defer_max_blocks: int
    shares_device_pages: bool
    """Whether vLLM's prefix caching lets one request use what another one loaded."""
    write_policy: str = "write_through"
    min_uses: int = 2
    """Requests that must use a page before `write_through_selective` saves it."""
    num_ahead_blocks: int = 0
    """Free device blocks, of those that are reused next, that `write_back` keeps saved."""
    admission: str = "probation"
    max_pinned_share: float = 0.25
    """Part of the host tier that the hint ``pin_s`` may keep."""
    skip_slow_loads: bool = True
    loads_by_layer: bool = False
    """Every load belongs to the step that reads it, whose layers wait for theirs in turn."""
    pools: tuple[Pool, ...] = ()
    """Kinds of KV that pages may lack; nothing is said of those that every page has."""
    groups: tuple[KVGroup, ...] = ()
    """vLLM's KV cache groups; () is one of blocks of ``block_size``."""
    bytes_per_token: tuple[int, ...] = ()
    """Of each group, over all workers; of a state, its bytes. () is one group of whole pages."""
    num_unsure_tokens: int = 0
    """Last tokens of a hit that are computed anew, as vLLM does: a drafter's state of a token
    depends on the next one."""
    draft_miss: str = "auto"
    num_ready_slots: int | None = None
    """Host slots that have their memory on every worker at the start; None: all."""

    @property
    def first_slots(self) -> int:
        """Host slots that can be used from the start."""
        ready = self.num_ready_slots
        return self.num_host_slots if ready is None else ready

    def page_uses(self) -> PageUses | None:
        """Who has to know how often pages are used; None where nothing depends on it."""
        is_asked = self.admission != "always" and self.eviction != NEXT_USE
        if not is_asked and self.write_policy != "write_through_selective":
            return None
        return PageUses(self.num_host_slots * POOLS_REMEMBERED)

    def usable_tokens(self, num_tokens: int) -> int:
        """Hits end one granule below the full prompt, like vLLM's own: one token is computed."""
        return (num_tokens - 1) // self.block_size * self.block_size

    def wanted_pages(self, num_tokens: int) -> int:
        """Whole pages that can serve a request of so many tokens. A last page that is the
        prompt's end still serves all but its last block."""
        return min(
            -(-self.usable_tokens(num_tokens) // self.page_size), num_tokens // self.page_size
        )

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """All KV cache groups, at least one."""
        return self.groups or (KVGroup(self.block_size),)

    def hit_rules(self) -> HitRules:
        """What a boundary needs of the pools."""
        return HitRules(self.pools, page_size=self.page_size, unit=self.block_size)

    @property
    def min_uses_to_save(self) -> int:
        return self.min_uses if self.write_policy == "write_through_selective" else 1

"""One fetch from storage, and the rules by which fetches begin and requests wait for them."""

from dataclasses import dataclass, field
from enum import Enum

from vllm_hicache.prefix_index import HostPage
from vllm_hicache.request_state import TokenSource
from vllm_hicache.storage_link import WorldAnswer

NOT_BEGUN = ("recompute_faster", "tenant_limit", "missing_pool")
"""Why pages that storage has were not fetched, as the ledger calls it."""


class FetchStage(Enum):
    """Where a fetch stands."""

    QUERYING = "querying"
    READING = "reading"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Fetch:
    """One fetch of pages ``first_page`` and on of one chain; several requests may wait for it."""

    first_page: int
    hashes: list[bytes]
    parent_hash: bytes | None
    anchor: HostPage | None
    """The page before the first, pinned until the fetch ends."""
    namespace: str
    tokens: TokenSource
    """Of the request that asked first; names the pages in events."""
    query: WorldAnswer
    query_op: int
    asked_at: float
    stage: FetchStage = FetchStage.QUERYING
    reason: str = ""
    op: int = 0
    slots: list[int] = field(default_factory=list)
    read: WorldAnswer | None = None
    pages: list[HostPage] = field(default_factory=list)
    """Pages of this fetch that are in host, pinned while a request waits for them."""
    found: list[bytes] = field(default_factory=list)
    """Leading pages that storage has on every worker, once it has answered."""
    max_tokens: int = 0
    """The longest prefix that the first request could use."""
    parts: list[int] = field(default_factory=list)
    """Of each page that is read: parts that are read with it."""
    is_cut: bool = False
    """Pages were found that no boundary can use: some pool of theirs is not stored."""
    num_published: int = 0
    tenant: str = ""
    num_occupied: int = 0
    """Host pages that count against the limits until nobody reads or awaits them."""
    num_waiting: int = 0
    read_at: float = 0.0
    is_probe: bool = False
    is_stale: bool = False

    @property
    def is_running(self) -> bool:
        return self.stage is not FetchStage.ENDED

    def why_unfetched(self, is_over_budget: bool) -> str:
        """Why pages that storage was found to have are not in host now: a reason of the ledger."""
        if self.is_running:
            return "deferred_budget" if is_over_budget else "deadline"
        if self.reason in (*NOT_BEGUN, "reset", "host_full"):
            return self.reason
        if not self.op and self.reason == "missing":
            return "below_minimum"
        if self.reason == "complete" and self.is_cut:
            return "missing_pool"
        if self.reason == "complete":
            return "host_full" if len(self.hashes) < len(self.found) else "evicted"
        return "short_fetch"


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """When to stop waiting."""

    kind: str
    base_s: float
    per_1k_tokens_s: float
    min_tokens: int
    exists_timeout_s: float
    read_timeout_s: float
    max_share: float = 0.5
    """Part of the host tier that all fetches may fill at once; more would evict what is soon
    used."""
    max_tenant_share: float = 0.25
    """The same for the fetches of one tenant, where tenants are told apart."""
    retry_s: float = 1.0
    """Storage is asked again for a request that still waits after so long; 0 is never."""
    max_retries: int = 8
    """How often that, and what is asked because pages left host, may happen to one request."""

    @property
    def query_s(self) -> float:
        """How long the question whether storage holds the pages may take."""
        return self.read_timeout_s if self.kind == "wait_complete" else self.exists_timeout_s

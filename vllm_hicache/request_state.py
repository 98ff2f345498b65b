"""What the planner remembers of one request."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vllm_hicache.refusals import Refusals
from vllm_hicache.worth import Verdict

if TYPE_CHECKING:
    from vllm_hicache.fetch import Fetch
    from vllm_hicache.loads import RunningLoad


class TokenSource(Protocol):
    """A request's tokens and the hashes of its pages; grows as tokens are generated."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was generated."""

    def page_hashes(self, num_pages: int) -> Sequence[bytes]:
        """Hashes of at least the first ``num_pages`` whole pages. O(new pages)."""

    def note(self, page_index: int) -> object:
        """What events will say of this page; None where nobody listens."""


class DeviceBlocks(Protocol):
    """References on vLLM's device blocks."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep these blocks from being reused."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Give references back, in reverse chain order so that a prefix outlives its tail."""

    @property
    def num_free(self) -> int:
        """Blocks that vLLM can hand out now."""

    def forget_cached(self) -> None:
        """Take every block out of the prefix cache; who holds a block keeps it."""


class DeviceQueue(Protocol):
    """The order in which vLLM reuses device blocks, for those who save ahead of it."""

    def watch(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        """Call ``on_reuse(block_id)`` once, before vLLM gives a block to somebody else. The
        blocks are in use; the newest watcher of a block replaces an older one."""

    def next_reused(self, limit: int) -> Iterator[int]:
        """The free blocks that vLLM takes next, the first one first. O(blocks taken)."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between arrival and end. A preempted request keeps its state."""

    tokens: TokenSource
    may_load: bool = True
    why_not: str = ""
    """Reason in the ledger where ``may_load`` is False."""
    may_save: bool = True
    priority: int = 0
    """Of its pages in host; with the policy ``priority`` lower ones leave first."""
    block_ids: Sequence[int] = field(default_factory=list)
    """Device blocks of the first KV cache group in token order, as far as they were allocated."""
    other_tables: tuple[Sequence[int], ...] = ()
    """Device blocks of the other groups; 0 where a group keeps nothing."""
    num_saved_pages: int = 0
    """Leading pages that were looked at: saved, on their way to host, or not wanted there."""
    num_used_pages: int = 0
    """Leading pages that count as used by this request; a preemption does not count them anew."""
    pin_s: float = 0.0
    """Its pages stay in host for so long after it has last used one."""
    tenant: str = ""
    """Whose fetches this one's count with; "" where nobody is told apart."""
    num_local_tokens: int = 0
    """vLLM's own hit at the last lookup."""
    num_offered_tokens: int = 0
    """What the last lookup answered."""
    is_offer_async: bool = False
    num_found_tokens: int = 0
    """Tokens of the prompt in host at the last lookup."""
    refused: Refusals = field(default_factory=Refusals)
    withheld_reason: str = "cap"
    """Why the last lookup offered less than it found."""
    is_over_budget: bool = False
    """The last lookup would have waited for a fetch, had not too many been waiting already."""
    waiting_since: float | None = None
    """First lookup that was answered "ask again" because of a fetch."""
    fetch: "Fetch | None" = None
    why_no_fetch: str = ""
    """Why the last look at storage asked nothing: "complete" where host has all it could want."""
    retry: "Fetch | None" = None
    """A later question to storage that has found nothing yet: nobody waits for it."""
    earlier_fetches: "tuple[Fetch, ...]" = ()
    """Fetches whose place a later one took, the last one last: what they brought stays pinned."""
    num_retries: int = 0
    """How often storage was asked again."""
    num_host_pages: int = 0
    """Leading pages in host when it was last looked at."""
    is_in_line: bool = False
    """Its next retry has a time."""
    load: "RunningLoad | None" = None
    verdict: tuple[int, Verdict] | None = None
    """Whether a load of so many tokens is worth its time; told once, lookups are repeated."""
    is_admitted: bool = False
    lacks_draft_state: bool = False
    """Its prefix has zeros in the place of draft state: what is drafted on top is no better."""
    is_outdated: bool = False
    """A reset came while it held blocks, or its load failed: their KV is not saved."""
    is_finished: bool = False

    @property
    def request_id(self) -> str:
        return self.tokens.request_id

    @property
    def tables(self) -> tuple[Sequence[int], ...]:
        """Device blocks of every KV cache group."""
        return (self.block_ids, *self.other_tables)

    @property
    def last_finding(self) -> "Fetch | None":
        """The newest fetch for which storage had something."""
        if self.fetch is not None and self.fetch.found:
            return self.fetch
        return next((fetch for fetch in reversed(self.earlier_fetches) if fetch.found), None)

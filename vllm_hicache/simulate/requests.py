"""Requests of a story: their tokens, and what vLLM knows of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm_hicache.hashing import PageHashChain, chain_root
from vllm_hicache.request_state import RequestState

ROOT = chain_root()


class Status(Enum):
    """Where vLLM has a request."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class CountedHashes(list[bytes]):
    """Page hashes that count how many of them are looked at: the work of rule 7."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_reads += len(found) if isinstance(index, slice) else 1
        return found


class Tokens:
    """A request's token source with growing tokens."""

    def __init__(self, request_id: str, token_ids: Sequence[int], page_size: int) -> None:
        self.request_id = request_id
        self.page_size = page_size
        self.ids = list(token_ids)
        self.num_prompt = len(self.ids)
        self.hashes = CountedHashes()
        self._chain = PageHashChain(page_size, ROOT)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def page_hashes(self, num_pages: int) -> Sequence[bytes]:
        known = len(self.hashes)
        if known < num_pages:
            self._chain.extend(self.ids, num_pages * self.page_size)
            self.hashes += self._chain.hashes[known:]
        return self.hashes

    def note(self, page_index: int) -> object:
        return (self.request_id, page_index)


@dataclass(slots=True, eq=False)
class Request:
    """vLLM's side of a request."""

    tokens: Tokens
    state: RequestState
    max_tokens: int
    status: Status = Status.WAITING
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    """What the granules of ``block_ids`` hold, as far as they are computed or loaded."""
    weights: int = 0
    """Version of the weights when its first block was allocated."""
    epoch: int = 0
    """Outputs of steps that were scheduled in an earlier epoch are dropped."""
    num_in_flight: int = 0
    num_local: int = 0
    num_external: int = 0
    num_forwarded: int = 0
    """Tokens of this life by where they came from; they add up to ``num_computed``."""
    num_cached: int = 0
    """Leading blocks that have been offered to the prefix cache; none is offered twice."""
    deferred_at: float | None = None
    """First lookup that was told to ask again because of a fetch."""
    offered_end: int = 0
    """Last token of the longest offer of this life."""
    asked_at: float = 0.0
    longest_gap: float = 0.0
    """Between two such lookups."""

    @property
    def request_id(self) -> str:
        return self.tokens.request_id

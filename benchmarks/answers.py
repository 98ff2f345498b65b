"""What a client sees of one request, and from which tier vLLM says its prompt came."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

CACHED = "vllm:prompt_tokens_cached_by_source"


class RunFailed(RuntimeError):
    """An engine did what makes its figures worthless; its arm has no result."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. Times are those of ``time.perf_counter``."""

    submitted: float
    arrivals: tuple[float, ...]
    """When each group of tokens came; usually one token each."""
    counts: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_cached: int

    @property
    def ttft_s(self) -> float:
        """From the call to the first token."""
        return self.arrivals[0] - self.submitted

    def gaps_s(self) -> list[float]:
        """Time of each token after the first since the one before; equal within a group."""
        found: list[float] = []
        for i in range(1, len(self.arrivals)):
            gap = (self.arrivals[i] - self.arrivals[i - 1]) / self.counts[i]
            found += [gap] * self.counts[i]
        return found


class AnsweringEngine(Protocol):
    """What clients need of an engine."""

    async def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        """Send one prompt and take exactly ``num_tokens`` tokens."""


class MeasuredEngine(AnsweringEngine, Protocol):
    """What workloads need besides: empty tiers, and vLLM's counters."""

    async def drop_device(self) -> None:
        """Empty vLLM's own prefix cache."""

    async def drop_host(self) -> None:
        """Empty host memory, too; files stay."""

    async def counters(self) -> dict[str, float]:
        """Cumulative, by name or ``name/source``."""


def cached_by_source(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Source -> prompt tokens that were not computed between two readings of the counters."""
    grown = {
        key.partition("/")[2]: int(value - before.get(key, 0.0))
        for key, value in after.items()
        if key.startswith(CACHED + "/")
    }
    return {source: tokens for source, tokens in grown.items() if tokens}

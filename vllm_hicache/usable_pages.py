"""Which boundary of a prefix can be used, where pages may lack pools."""

from collections.abc import Sequence

from vllm_hicache.cost_model import CostModel
from vllm_hicache.fetch import Fetch
from vllm_hicache.pools import HitRules
from vllm_hicache.prefix_index import PartsOfChain, PrefixIndex

DRAFT_WORTH_S = 1.0
"""What speculation saves on an answer of a few hundred tokens at 100 tokens per second when it
doubles the speed. Where computing the pages without draft state takes longer, they are used with
zeros in its place."""


class UsablePages:
    """Applies the rules of all pools to what host and storage have."""

    def __init__(
        self,
        rules: HitRules,
        index: PrefixIndex,
        costs: CostModel,
        *,
        page_size: int,
        draft_miss: str = "auto",
        has_required: bool = True,
    ) -> None:
        """``has_required``: some pool is in every page."""
        self._has_required = has_required
        self._rules = rules
        self._index = index
        self._costs = costs
        self._page_size = page_size
        self._draft_miss = draft_miss

    def in_host(self, hashes: Sequence[bytes], num_pages: int, max_tokens: int) -> int:
        """Tokens of the longest usable prefix of the first ``num_pages`` pages, which are in
        host; at most ``max_tokens``, not rounded where every page has everything."""
        rules = self._rules
        if rules.is_trivial:
            return min(num_pages * self._page_size, max_tokens)
        parts = PartsOfChain(self._index, hashes, num_pages)
        without = rules.longest(parts, max_tokens, drafts=False)
        if not rules.has_drafts:
            return without
        whole = self._index.match_whole(hashes, num_pages, rules.draft_bits)
        parts = PartsOfChain(self._index, hashes, whole)
        return self._choose(rules.longest(parts, max_tokens), without)

    def num_found(self, parts: Sequence[int]) -> int:
        """Pages that storage has anything of: where pages may lack everything, it says of all
        that they may be there."""
        num_pages = len(parts)
        while num_pages and not self._has_required and not parts[num_pages - 1]:
            num_pages -= 1
        return num_pages

    def of_fetch(self, fetch: Fetch, parts: Sequence[int]) -> int:
        """Pages of the fetch that are worth reading, when storage has its leading ones with
        these ``parts``."""
        rules, first = self._rules, fetch.first_page
        if rules.is_trivial:
            return len(parts)
        before = PartsOfChain(self._index, fetch.tokens.page_hashes(first), first)
        tokens = rules.longest(_Joined(before, parts), fetch.max_tokens, drafts=False)
        if rules.has_drafts:
            whole = rules.whole(parts, rules.draft_bits)
            with_draft = rules.longest(_Joined(before, parts[:whole]), fetch.max_tokens)
            tokens = self._choose(with_draft, tokens)
        return max(0, -(-tokens // self._page_size) - first)

    def _choose(self, with_draft: int, without: int) -> int:
        """Tokens to use, where those ``with_draft`` state are fewer than those ``without``."""
        if with_draft == without or self._draft_miss == "target_only":
            return without
        if self._draft_miss == "cut":
            return with_draft
        recompute = self._costs.recompute_s(without - with_draft)
        return with_draft if recompute is None or recompute <= DRAFT_WORTH_S else without


class _Joined(Sequence[int]):
    """One sequence after the other, without a copy."""

    def __init__(self, head: Sequence[int], tail: Sequence[int]) -> None:
        self._head = head
        self._tail = tail

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def __getitem__(self, number: int) -> int:  # type: ignore[override]
        num_head = len(self._head)
        return self._head[number] if number < num_head else self._tail[number - num_head]

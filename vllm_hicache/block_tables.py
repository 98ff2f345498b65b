"""Which device blocks hold the pages of a request, KV cache group by KV cache group."""

from collections.abc import Sequence

from vllm_hicache.plan import NULL_BLOCK
from vllm_hicache.pools import KVGroup

Tables = tuple[tuple[int, ...], ...]
"""Device blocks of some tokens, one tuple for each group, in token order; 0 is no block."""


class PageBlocks:
    """Cuts block tables into those of pages, and reads from them which parts a page has."""

    def __init__(self, groups: Sequence[KVGroup], page_size: int) -> None:
        self.groups = tuple(groups)
        self._page_size = page_size
        self._bits = [
            group.marks | (1 << group.bit if group.bit is not None else 0) for group in groups
        ]
        self.has_parts = any(self._bits)
        self.draft_bits = 0
        """Parts that follow from blocks of others: whether their bytes are worth anything, blocks
        do not tell."""
        for group in groups:
            self.draft_bits |= group.marks
        whole = (i for i, group in enumerate(groups) if group.bit is None)
        self._main = next(whole, 0)

    def span(self, group: KVGroup, first: int, stop: int) -> slice:
        """Places of pages ``[first, stop)`` in this group's table."""
        page, block = self._page_size, group.block_size
        end = stop * page // block if group.is_state else -(-stop * page // block)
        return slice(first * page // block, end)

    def num_tokens(self, tables: Sequence[Sequence[int]]) -> int:
        """Tokens that a request has blocks for."""
        return len(tables[self._main]) * self.groups[self._main].block_size

    def of_pages(self, tables: Sequence[Sequence[int]], first: int, stop: int) -> Tables:
        """The blocks of pages ``[first, stop)`` out of a request's tables."""
        return tuple(
            tuple(table[self.span(group, first, stop)])
            for group, table in zip(self.groups, tables, strict=True)
        )

    def leading(self, tables: Tables, first: int, num_pages: int) -> Tables:
        """Of the blocks of pages from ``first`` on, those of the first ``num_pages``."""
        cut = []
        for group, table in zip(self.groups, tables, strict=True):
            span = self.span(group, first, first + num_pages)
            cut.append(table[: span.stop - span.start])
        return tuple(cut)

    def parts(self, tables: Tables, first: int, stop: int) -> list[int]:
        """Parts that pages ``[first, stop)`` have on the device; ``tables`` are their blocks."""
        parts = [0] * (stop - first)
        if not self.has_parts:
            return parts
        lacks = [0] * (stop - first)
        for group, bits, table in zip(self.groups, self._bits, tables, strict=True):
            if not bits:
                continue
            base = self.span(group, first, stop).start
            for i in range(stop - first):
                span = self.span(group, first + i, first + i + 1)
                blocks = table[span.start - base : span.stop - base]
                blocks = blocks[-1:] if group.is_state else blocks
                parts[i] |= bits
                if not blocks or (group.bit is not None and NULL_BLOCK in blocks):
                    lacks[i] |= bits
        return [have & ~lack for have, lack in zip(parts, lacks, strict=True)]

    def blocks(self, tables: Tables) -> tuple[int, ...]:
        """Every block of the tables that is one, first group first."""
        if not self.has_parts and len(tables) == 1:
            return tables[0]
        return tuple(
            block
            for group, table in zip(self.groups, tables, strict=True)
            for block in table
            if group.bit is None or block != NULL_BLOCK
        )

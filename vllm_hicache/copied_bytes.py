"""Bytes of pages and of loads over all workers, for metrics."""

from collections.abc import Sequence

from vllm_hicache.plan import CopyList
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.prefix_index import HostPage


class CopiedBytes:
    """What pages with their parts, and copies, weigh."""

    def __init__(self, options: PlannerOptions) -> None:
        self._page_size = options.page_size
        self._whole = sum(options.page_bytes)
        self._groups = options.kv_groups
        per_token = options.bytes_per_token or (self._whole // options.page_size,)
        self._granules = [
            size if group.is_state else size * min(group.block_size, options.page_size)
            for group, size in zip(self._groups, per_token, strict=True)
        ]
        self._pages = [
            size if group.is_state else size * options.page_size
            for group, size in zip(self._groups, per_token, strict=True)
        ]
        self._has_parts = any(group.bit is not None for group in self._groups)

    def of_pages(self, pages: Sequence[HostPage]) -> int:
        """Bytes of these pages in host."""
        if not self._has_parts:
            return len(pages) * self._whole
        return sum(
            size
            for page in pages
            for group, size in zip(self._groups, self._pages, strict=True)
            if group.bit is None or page.parts >> group.bit & 1
        )

    def of_copies(self, copies: Sequence[CopyList]) -> int:
        """Bytes that these copies move, one list for each KV cache group."""
        return sum(len(rows) * size for rows, size in zip(copies, self._granules, strict=True))

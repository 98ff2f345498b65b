"""Pages on the device that are to be saved."""

from dataclasses import dataclass

from vllm_hicache.block_tables import Tables
from vllm_hicache.loads import RunningLoad


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of one chain on the device that host lacks; ``first`` is a page number."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    first: int
    tables: Tables
    """The device blocks of these pages."""
    parts: tuple[int, ...]
    """Of each page, what the device has of it beyond what every page has."""
    notes: tuple[object, ...]
    priority: int
    user: str
    """Request that computed them; empty where it is gone."""
    use_gap: int
    """Requests until they are expected to be used again; 0 where nothing tells."""
    doubts: tuple[RunningLoad, ...]
    """Loads that the bytes were computed on top of and that were not acknowledged then."""

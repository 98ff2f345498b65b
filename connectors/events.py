"""KV cache events for routers: which of vLLM's blocks the host and storage tiers hold.

A router knows blocks by vLLM's own hashes; a page is announced by the blocks that end in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.request import Request

from vllm_hicache.series import HOST, STORAGE

MEDIUM_OF_TIER = {HOST: MEDIUM_CPU, STORAGE: MEDIUM_STORAGE}


@dataclass(frozen=True, slots=True)
class PageBlocks:
    """What a router must learn about the vLLM blocks whose last token lies in one page."""

    hashes: tuple[bytes | int, ...]
    parent: bytes | int | None
    token_ids: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...]  # one entry for each hash


class PageEvents:
    """Turns pages that come and go into vLLM's ``BlockStored`` and ``BlockRemoved`` events.

    ``block_size`` (vLLM's tokens per block) and ``page_size`` divide one another. A block larger
    than a page is announced with the page that completes it: its earlier pages are that page's
    ancestors and leave a tier after it. A page is announced once per tier until it leaves.
    """

    def __init__(
        self,
        *,
        block_size: int,
        page_size: int,
        hash_block_size: int | None = None,
        spec_kind: str = "full_attention",
    ) -> None:
        self._spec_kind = spec_kind
        self._block_size = block_size
        self._page_size = page_size
        self._hash_block_size = hash_block_size or block_size
        self._held: dict[str, dict[bytes, tuple[bytes | int, ...]]] = {HOST: {}, STORAGE: {}}
        self._events: list[KVCacheEvent] = []

    def blocks_of_page(self, request: Request, page_index: int) -> PageBlocks:
        """The blocks that end in page ``page_index`` of this request; O(tokens of the page)."""
        size = self._block_size
        first = page_index * self._page_size // size
        stop = (page_index + 1) * self._page_size // size
        hashes = resolve_block_hashes(request.block_hashes, self._hash_block_size, size)
        extra_keys = []
        item = 0  # multimodal item from which vLLM goes on looking
        for block in range(first, stop):
            start = block * size
            keys, item = generate_block_hash_extra_keys(request, start, start + size, item)
            extra_keys.append(keys)
        lora = request.lora_request
        return PageBlocks(
            hashes=tuple(maybe_convert_block_hash(hashes[i]) for i in range(first, stop)),
            parent=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=tuple(request.all_token_ids[first * size : stop * size]),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=tuple(to_event_extra_keys(extra_keys) or ()),
        )

    def stored(self, page_hash: bytes, tier: str, blocks: PageBlocks) -> None:
        """The page can now be read from ``tier`` ("host" or "storage")."""
        if page_hash in self._held[tier]:
            return
        self._held[tier][page_hash] = blocks.hashes
        if blocks.hashes:
            self._append_stored(blocks, MEDIUM_OF_TIER[tier])

    def is_held(self, page_hash: bytes, tier: str) -> bool:
        """True if the page was announced and not taken back; then ``stored`` does nothing."""
        return page_hash in self._held[tier]

    def removed(self, page_hash: bytes, tier: str) -> None:
        """The page left ``tier``; unknown pages are ignored."""
        hashes = self._held[tier].pop(page_hash, ())
        if not hashes:
            return
        medium = MEDIUM_OF_TIER[tier]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(block_hashes=list(hashes), medium=medium, group_idx=0))

    def clear(self, tier: str) -> None:
        """Everything left ``tier``, as after a reset."""
        for page_hash in list(self._held[tier]):
            self.removed(page_hash, tier)

    def take(self) -> Sequence[KVCacheEvent]:
        """The events since the last take, in order."""
        events, self._events = self._events, []
        return events

    def _append_stored(self, blocks: PageBlocks, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and _continues(last, blocks, medium):
            # A run of one request's pages is one event, as vLLM's own run of blocks is.
            last.block_hashes.extend(blocks.hashes)
            last.token_ids.extend(blocks.token_ids)
            if last.extra_keys is not None:
                last.extra_keys.extend(blocks.extra_keys)
            return
        self._events.append(
            BlockStored(
                block_hashes=list(blocks.hashes),
                parent_block_hash=blocks.parent,
                token_ids=list(blocks.token_ids),
                block_size=self._block_size,
                lora_id=blocks.lora_id,
                medium=medium,
                lora_name=blocks.lora_name,
                extra_keys=list(blocks.extra_keys),
                group_idx=0,
                kv_cache_spec_kind=self._spec_kind,
            )
        )


def _continues(event: BlockStored, blocks: PageBlocks, medium: str) -> bool:
    return (
        event.medium == medium
        and blocks.parent is not None
        and event.block_hashes[-1] == blocks.parent
        and event.lora_name == blocks.lora_name
    )

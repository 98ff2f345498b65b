"""The rules of DESIGN section 4, checked over a whole planner. Pure; O(host pages)."""

from collections import Counter
from collections.abc import Iterator

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_slots import HostSlots
from vllm_hicache.planner import Planner
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.tiers import SlotOwner


def audit(planner: Planner, *, is_idle: bool, num_held_blocks: int) -> list[str]:
    """What is wrong, one sentence each; empty when nothing is.

    ``num_held_blocks`` is the number of references on device blocks that vLLM's side counts.
    ``is_idle`` says that no request lives and every copy was acknowledged; persists, and fetches
    that nobody awaits, may still run then.
    """
    pins = _pins(planner)
    findings = [
        *_slot_findings(planner, pins),
        *_page_findings(planner),
        *_protection_findings(planner),
        *_pin_findings(planner, pins),
        *_block_findings(planner, num_held_blocks),
        *_load_findings(planner),
        *_map_findings(planner),
        *_ledger_findings(planner),
    ]
    if is_idle:
        findings += _idle_findings(planner, num_held_blocks)
    return findings


def check(planner: Planner, *, is_idle: bool, num_held_blocks: int) -> None:
    """Raise ``InvariantBroken`` with everything that ``audit`` finds."""
    findings = audit(planner, is_idle=is_idle, num_held_blocks=num_held_blocks)
    if findings:
        raise InvariantBroken("; ".join(findings))


def _pins(planner: Planner) -> Counter[HostPage]:
    """Pins that running operations and waiting requests account for, by page."""
    pins: Counter[HostPage] = Counter(planner.pins.pinned_pages())
    pins.update(planner.saves.pinned_pages())
    for load in planner.loads.running():
        pins.update(load.pages)
    if planner.persists is not None:
        pins.update(planner.persists.pinned_pages())
    if planner.prefetcher is not None:
        pins.update(planner.prefetcher.pinned_pages())
    return pins


def _slot_findings(planner: Planner, pins: Counter[HostPage]) -> Iterator[str]:
    """Rule 2: exactly one of operation, index and free list owns a slot."""
    slots = planner.host.slots
    # A page that was forgotten while pinned keeps its slot until its last pin is gone.
    forgotten = [page for page in pins if not page.is_present]
    in_index = [page.slot for page in (*planner.host.index.pages(), *forgotten)]
    in_operations = planner.saves.slots()
    if planner.prefetcher is not None:
        in_operations += planner.prefetcher.slots()
    owners = ((SlotOwner.INDEX, in_index), (SlotOwner.OPERATION, in_operations))
    for owner, owned in owners:
        if slots.count(owner) != len(owned):
            yield f"{slots.count(owner)} slots belong to {owner.name}, accounted for {len(owned)}"
        for slot in owned:
            if slots.owner(slot) is not owner:
                yield f"slot {slot} of {owner.name} is recorded as {slots.owner(slot).name}"
    yield from _free_findings(slots)
    total = slots.num_free + len(in_index) + len(in_operations)
    if total != slots.num_ready:
        yield (
            f"{slots.num_free} free + {len(in_index)} of the index + {len(in_operations)} of "
            f"operations make {total} slots of {slots.num_ready}"
        )
    for slot, count in Counter(in_index + in_operations).items():
        if count > 1:
            yield f"slot {slot} has {count} owners"
        if slot >= slots.num_ready:
            yield f"slot {slot} is in use, but only {slots.num_ready} are ready"


def _free_findings(slots: HostSlots) -> Iterator[str]:
    recorded, num_unready = slots.count(SlotOwner.FREE), slots.num_slots - slots.num_ready
    if recorded != slots.num_free + num_unready:
        yield (
            f"{recorded} slots are recorded as free, {slots.num_free} are and {num_unready} are "
            f"not ready"
        )


def _page_findings(planner: Planner) -> Iterator[str]:
    """Rule 3: a page in host implies its parent in host; leaves can be evicted."""
    index = planner.host.index
    children = Counter(page.parent for page in index.pages() if page.parent is not None)
    for page in index.pages():
        if index.get(page.page_hash) is not page or not page.is_present:
            yield f"the page in slot {page.slot} is listed but not present"
        if page.parent is not None and index.get(page.parent.page_hash) is not page.parent:
            yield f"the page in slot {page.slot} is in host, its parent is not"
        if page.num_children != children[page]:
            yield (
                f"the page in slot {page.slot} counts {page.num_children} children "
                f"and has {children[page]}"
            )
        if page.is_evictable and not planner.host.is_queued(page):
            yield f"the page in slot {page.slot} could be evicted but is not queued"


def _protection_findings(planner: Planner) -> Iterator[str]:
    """Protected pages are those that say so, and within their share."""
    host = planner.host
    listed = set(host.protected_pages())
    marked = {page for page in host.index.pages() if page.is_protected}
    if listed != marked:
        yield f"{len(listed)} pages are listed as protected, {len(marked)} are marked so"
    if len(listed) > host.max_protected:
        yield f"{len(listed)} pages are protected, at most {host.max_protected} may be"


def _pin_findings(planner: Planner, pins: Counter[HostPage]) -> Iterator[str]:
    for page in {*planner.host.index.pages(), *pins}:
        if page.pins != pins[page]:
            yield (
                f"the page in slot {page.slot} has {page.pins} pins, "
                f"operations account for {pins[page]}"
            )
    if planner.host.num_pinned != len(pins):
        yield f"{planner.host.num_pinned} pages count as pinned, {len(pins)} are"


def _block_findings(planner: Planner, num_held_blocks: int) -> Iterator[str]:
    """Rules 1 and 5, as far as the planner sees blocks."""
    held = planner.saves.held_blocks()
    if len(held) != num_held_blocks:
        yield f"saves hold {len(held)} device blocks, vLLM counts {num_held_blocks} references"
    loads = [load for load in planner.loads.running() if load.is_async]
    written = Counter(block_id for load in loads for block_id in load.block_ids)
    for block_id, count in written.items():
        if count > 1:
            yield f"{count} loads write to device block {block_id}"
    for block_id in written.keys() & set(held):
        yield f"device block {block_id} is saved while a load writes to it"


def _load_findings(planner: Planner) -> Iterator[str]:
    """Rule 4: what a load brings lies between the local hit and the last token."""
    group = planner.options.kv_groups[0]
    granule = min(planner.options.page_size, group.block_size)
    for load in planner.loads.running():
        span = f"[{load.first_token}, {load.last_token})"
        if not 0 <= load.first_token < load.last_token < load.state.tokens.num_tokens:
            yield f"a load of tokens {span} for {load.state.tokens.num_tokens} tokens"
        if group.bit is not None:
            continue
        if len(load.copies) * granule != load.num_tokens:
            yield f"a load of tokens {span} has {len(load.copies)} copies of {granule} tokens"
        if {page.slot for page in load.pages} != set(load.copies[:, 0].tolist()):
            yield f"a load of tokens {span} copies from other slots than it has pinned"


def _map_findings(planner: Planner) -> Iterator[str]:
    """Nothing is remembered of operations that have ended."""
    loads, prefetcher = planner.loads, planner.prefetcher
    num_ended = len(set(loads.landing()) - set(loads.running()))
    if num_ended:
        yield f"{num_ended} loads that have ended still count as landing"
    num_lost = len(planner.saves.lost_pages())
    if num_lost:
        yield f"{num_lost} pages count as being saved, but no save has them"
    if prefetcher is None:
        return
    linked = set(prefetcher.linked_fetches())
    if any(not fetch.is_running or not fetch.num_waiting for fetch in linked):
        yield "a fetch that has ended or is cancelled can still be joined"
    if prefetcher.num_occupied != sum(fetch.num_occupied for fetch in prefetcher.fetches()):
        yield f"{prefetcher.num_occupied} host pages count as filled by fetches, they fill others"
    if prefetcher.num_slots != len(prefetcher.slots()):
        yield f"fetches count {prefetcher.num_slots} slots and own {len(prefetcher.slots())}"


def _ledger_findings(planner: Planner) -> Iterator[str]:
    try:
        planner.ledger.balance()
    except InvariantBroken as error:
        yield str(error)


def _idle_findings(planner: Planner, num_held_blocks: int) -> Iterator[str]:
    """Rule 1: at idle, nothing but storage still works."""
    prefetcher = planner.prefetcher
    leftovers = {
        "running saves": planner.saves.num_running,
        "running loads": planner.loads.num_running,
        "held device blocks": num_held_blocks,
        "open ledger entries": planner.ledger.num_open,
        "pages marked as being saved": planner.saves.num_pages_in_flight,
        "pages marked as landing": len(planner.loads.landing()),
    }
    if prefetcher is not None:
        leftovers["awaited fetches"] = prefetcher.num_awaited
        if not prefetcher.num_reading:
            leftovers["host pages of fetches"] = prefetcher.num_occupied
        leftovers["running queries"] = prefetcher.num_querying
        leftovers["pages marked as being fetched"] = len(prefetcher.linked_fetches())
    for what, number in leftovers.items():
        if number:
            yield f"{number} {what} at idle"
    if planner.holds_device_blocks:
        yield "an idle engine is kept stepping"

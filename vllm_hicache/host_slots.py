"""Allocator of host slots: one numbering for all workers, one owner per slot."""

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.tiers import SlotOwner


class HostSlots:
    """Hands out slot numbers and records who owns each.

    A slot moves FREE -> OPERATION -> INDEX -> FREE, or OPERATION -> FREE. Any other
    move raises ``InvariantBroken``: two owners of one slot mean wrong KV. Slots from ``num_ready``
    on have no memory yet: they are free and are not handed out.

    >>> slots = HostSlots(2)
    >>> slots.take(3), slots.num_free
    ([0, 1], 0)
    >>> slots.give_to_index(0); slots.release(0); slots.num_free
    1
    """

    def __init__(self, num_slots: int, num_ready: int | None = None) -> None:
        """``num_ready`` None: all of them."""
        self.num_slots = num_slots
        self.num_ready = num_slots if num_ready is None else num_ready
        self._free = list(range(self.num_ready - 1, -1, -1))
        self._owner = bytearray(num_slots)
        self._counts = [num_slots, 0, 0]

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_ready - len(self._free)

    def make_ready(self, num_slots: int) -> None:
        """Slots below ``num_slots`` have their memory on every worker. O(free slots)."""
        if not self.num_ready <= num_slots <= self.num_slots:
            raise InvariantBroken(
                f"{num_slots} host slots are ready, after {self.num_ready} of {self.num_slots}"
            )
        self._free[:0] = range(num_slots - 1, self.num_ready - 1, -1)
        self.num_ready = num_slots

    def count(self, owner: SlotOwner) -> int:
        """Number of slots with this owner."""
        return self._counts[owner]

    def owner(self, slot: int) -> SlotOwner:
        return SlotOwner(self._owner[slot])

    def take(self, count: int) -> list[int]:
        """Up to ``count`` free slots, now owned by an operation."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for slot in taken:
            self._move(slot, SlotOwner.FREE, SlotOwner.OPERATION)
        return taken

    def give_to_index(self, slot: int) -> None:
        """Hand a slot whose bytes are complete on every worker to the index."""
        self._move(slot, SlotOwner.OPERATION, SlotOwner.INDEX)

    def release(self, slot: int) -> None:
        """Return a slot that no copy touches any more."""
        self._move(slot, SlotOwner(self._owner[slot]), SlotOwner.FREE)
        self._free.append(slot)

    def _move(self, slot: int, source: SlotOwner, target: SlotOwner) -> None:
        if self._owner[slot] != source or source == target:
            raise InvariantBroken(
                f"host slot {slot} belongs to {SlotOwner(self._owner[slot]).name}, "
                f"expected {source.name} before it becomes {target.name}"
            )
        self._owner[slot] = target
        self._counts[source] -= 1
        self._counts[target] += 1

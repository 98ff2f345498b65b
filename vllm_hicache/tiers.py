"""The tiers, and who owns a host slot."""

from enum import IntEnum


class Tier(IntEnum):
    """Where a page's bytes are; a smaller number is nearer to the model."""

    DEVICE = 1
    HOST = 2
    STORAGE = 3


class SlotOwner(IntEnum):
    """Exactly one of these owns a host slot at any time."""

    FREE = 0
    OPERATION = 1
    INDEX = 2

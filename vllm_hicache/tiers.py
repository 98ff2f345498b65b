"""The tiers, who owns a host slot, and the two ways of a device copy."""

from enum import IntEnum, StrEnum


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


class Direction(StrEnum):
    """Way of a device copy."""

    SAVE = "save"
    LOAD = "load"

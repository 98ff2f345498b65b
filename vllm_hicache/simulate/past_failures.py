"""Seeds that once showed a fault; every run replays them first."""

from typing import NamedTuple


class PastFailure(NamedTuple):
    """A story to replay, and what it showed."""

    seed: int
    steps: int
    showed: str


PAST_FAILURES = (
    PastFailure(3008, 100, "a fetch that another request had begun was booked beyond the prompt"),
    PastFailure(3612, 100, "an answer between two lookups made waiting look too long"),
    PastFailure(3871, 100, "wrong KV: a virtual block was offered twice to the prefix cache"),
    PastFailure(249344100852, 100, "wrong KV: a load behind blocks of another that failed later"),
)
"""A change to the simulator changes every story, so old seeds are new ones then: keep the list
short, and what it showed in a test of its own."""

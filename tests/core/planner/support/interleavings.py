"""Answers of several stages in random order: in order per stage, in any order between stages."""

from collections.abc import Iterator
from random import Random

import pytest
from planner_rig import Rig

interleavings = pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=pytest.mark.full)], ids=["few", "1000"]
)


def interleave(rng: Random, queues: list[list]) -> Iterator[tuple[int, object]]:
    """(stage, answer) of all answers, in order per stage."""
    left = [list(queue) for queue in queues]
    while any(left):
        stage = rng.choice([i for i, queue in enumerate(left) if queue])
        yield stage, left[stage].pop(0)


def tell(rig: Rig, stage: int, event: object) -> None:
    """One stage says one thing, and the planner takes it."""
    rig.channels.inbox.append((stage, event))
    rig.settle_storage()

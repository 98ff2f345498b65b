"""What virtual memory holds: tags instead of bytes, so that every wrong copy is seen.

A tag names the tokens and the weights that the KV of a granule was computed from. ``Garbage``
stands for bytes that mean nothing: a failed copy, a read that was torn, a forward on top of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_hicache.errors import HiCacheError

NAMESPACE_PREFIX = "hc1-"


@dataclass(frozen=True, slots=True)
class Garbage:
    """Bytes that nobody may use."""

    source: str


Tag: TypeAlias = int | Garbage | None


class Violation(HiCacheError, AssertionError):
    """A promise of the design was broken in a story."""


def next_tag(previous: int, tokens: tuple[int, ...], weights: int) -> int:
    """Tag of the granule after ``previous``, 0 for the first. The same in every process: hashes
    of whole numbers are not randomised."""
    return hash((previous, tokens, weights))


def pure_tags(token_ids: Sequence[int], granule: int, weights: int) -> list[int]:
    """Tags of all whole granules of these tokens under one version of the weights.

    >>> len(pure_tags([1, 2, 3, 4, 5], 2, 1))
    2
    """
    tags: list[int] = []
    previous = 0
    for start in range(0, len(token_ids) - granule + 1, granule):
        previous = next_tag(previous, tuple(token_ids[start : start + granule]), weights)
        tags.append(previous)
    return tags


def namespace_of(weights: int) -> str:
    """Namespace of what these weights compute."""
    return f"{NAMESPACE_PREFIX}{weights:016x}"


def weights_of(namespace: str) -> int:
    """
    >>> weights_of(namespace_of(3))
    3
    """
    return int(namespace.removeprefix(NAMESPACE_PREFIX), 16)

"""Request traces with prefix blocks, one JSON object a line, and the prompts they stand for.

A line has ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and ``hash_ids``,
one for each 512 tokens of the prompt; equal ids at the same place stand for equal tokens.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_hicache.errors import ConfigError

BLOCK_TOKENS = 512
_TOKENS = 2


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """After the first line's time 0."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests; ``ConfigError`` with the line's number where one is bad."""
    try:
        with path.open() as stream:
            requests = list(parse_trace(stream, str(path), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not requests:
        raise ConfigError(f"{path}: there are no requests")
    return requests


def parse_trace(
    lines: Iterable[str], name: str = "trace", limit: int | None = None
) -> Iterator[TraceRequest]:
    """Requests in the order of their lines. Empty lines and further keys are passed over."""
    last_s, found = 0.0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and found == limit:
            return
        try:
            request = _request(json.loads(line))
            if request.arrival_s < last_s:
                raise ConfigError("timestamp is earlier than that of the line before")
        except ValueError as error:  # ConfigError, too
            raise ConfigError(f"{name}, line {number}: {error}") from None
        last_s = request.arrival_s
        found += 1
        yield request


def _request(table: Any) -> TraceRequest:
    if not isinstance(table, dict):
        raise ConfigError("an object is needed")
    timestamp: Any = table.get("timestamp")
    if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf:
        raise ConfigError(f"timestamp must be milliseconds of 0 or more, got {timestamp!r}")
    input_tokens = _count(table, "input_length")
    ids = table.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise ConfigError(f"hash_ids must be a list of whole numbers of 0 or more, got {ids!r}")
    needed = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) != needed:
        raise ConfigError(
            f"hash_ids must be {needed} for an input_length of {input_tokens}, got {len(ids)}"
        )
    return TraceRequest(timestamp / 1e3, input_tokens, _count(table, "output_length"), tuple(ids))


def _count(table: dict[str, Any], key: str) -> int:
    value = table.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key} must be a whole number of 1 or more, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class TracePrompts:
    """Turns block ids into tokens: ``block_tokens`` random ones for each id, by the seed."""

    block_tokens: int
    vocab_size: int
    seed: int

    def prompt(self, request: TraceRequest) -> list[int]:
        """Requests whose ids begin alike begin with the same tokens."""
        blocks = [self._block(block_id) for block_id in request.block_ids]
        return [token for block in blocks for token in block][: request.input_tokens]

    def _block(self, block_id: int) -> list[int]:
        random = np.random.default_rng((self.seed, _TOKENS, block_id))
        return [int(token) for token in random.integers(0, self.vocab_size, self.block_tokens)]


def scale(
    requests: Sequence[TraceRequest], *, time_scale: float, length_scale: float
) -> tuple[list[TraceRequest], int]:
    """The trace played ``time_scale`` times as fast with lengths times ``length_scale``.

    Returns the requests and the tokens of a block. Lengths stay at least 1, and a prompt stays
    within its blocks.
    """
    block_tokens = max(1, round(BLOCK_TOKENS * length_scale))
    scaled = [
        TraceRequest(
            arrival_s=request.arrival_s / time_scale,
            input_tokens=min(
                max(1, round(request.input_tokens * length_scale)),
                len(request.block_ids) * block_tokens,
            ),
            output_tokens=max(1, round(request.output_tokens * length_scale)),
            block_ids=request.block_ids,
        )
        for request in requests
    ]
    return scaled, block_tokens


def reusable_tokens(requests: Sequence[TraceRequest], block_tokens: int) -> int:
    """Prompt tokens in blocks whose whole prefix an earlier request had: no cache hits more."""
    total = sum(request.input_tokens for request in requests)
    return total - sum(_new_tokens(requests, block_tokens))


def distinct_tokens(requests: Sequence[TraceRequest], block_tokens: int) -> int:
    """Tokens whose KV differs, answers included: what a cache would have to hold."""
    answers = sum(request.output_tokens for request in requests)
    return answers + sum(_new_tokens(requests, block_tokens))


def _new_tokens(requests: Sequence[TraceRequest], block_tokens: int) -> Iterator[int]:
    """Of each block with a prefix that no earlier request had."""
    seen: set[tuple[int, int]] = set()
    for request in requests:
        prefix = (0, -1)
        for i, block_id in enumerate(request.block_ids):
            prefix = (hash(prefix), block_id)
            if prefix not in seen:
                seen.add(prefix)
                yield max(0, min(block_tokens, request.input_tokens - i * block_tokens))

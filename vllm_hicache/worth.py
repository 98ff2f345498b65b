"""Load or recompute: whether a transfer is predicted to be faster than computing its tokens."""

import math
from enum import Enum

from vllm_hicache.cost_model import CostModel

PROBE_EVERY = 16
"""Of so many refused transfers one is made all the same: what is never done is never measured,
and a tier that was slow for a while would stay refused. It costs 1/16 of the difference."""
NEVER = -1
"""Crossover of a tier that is slower than computing for any number of tokens."""


class Verdict(Enum):
    """Whether a transfer is made. ``PROBE``: although it is predicted to be slower."""

    YES = "yes"
    NO = "no"
    PROBE = "probe"


class Worth:
    """Verdicts by the measured speed of the tiers and of prefill; yes while it is unknown."""

    def __init__(self, costs: CostModel, bytes_per_token: float, *, is_on: bool) -> None:
        self.costs = costs
        self._bytes_per_token = bytes_per_token
        """Of the worker that keeps most."""
        self.is_on = is_on
        self._num_refused = {"load": 0, "fetch": 0}
        self._crossovers = (0, 0)
        self._num_samples = 0
        """Of the cost model when the crossovers were computed."""

    def load(self, num_tokens: int, *, is_async: bool) -> Verdict:
        """Host -> device: a copy before the step, or one beside the steps of others."""
        num_bytes = int(num_tokens * self._bytes_per_token)
        costs = self.costs
        seconds = costs.async_load_s(num_bytes) if is_async else costs.load_s(num_bytes)
        return self._judge("load", num_tokens, seconds)

    def fetch(self, num_tokens: int) -> Verdict:
        """Storage -> host -> device. A refusal of many tokens holds for fewer, too."""
        seconds = self.costs.fetch_s(num_tokens)
        if seconds is None:
            return Verdict.YES
        num_bytes = int(num_tokens * self._bytes_per_token)
        return self._judge("fetch", num_tokens, seconds + self.costs.async_load_s(num_bytes))

    def crossovers(self) -> tuple[int, int]:
        """Tokens from which loading from host, and from storage, beats computing; 0 while unknown
        or from the first token on, ``NEVER`` where it never does. Asked every step: computed anew
        only after a new sample."""
        if self._num_samples != self.costs.num_samples:
            self._num_samples = self.costs.num_samples
            self._crossovers = self._compute_crossovers()
        return self._crossovers

    def _compute_crossovers(self) -> tuple[int, int]:
        recompute = self.costs.recompute_s(1)
        if recompute is None:
            return 0, 0
        latency, per_byte = self.costs.load_line()
        per_token = per_byte * self._bytes_per_token
        fetch = self.costs.fetch_line()
        storage = 0
        if fetch is not None:
            storage = _crossover(latency + fetch[0], per_token + fetch[1], recompute)
        return _crossover(latency, per_token, recompute), storage

    def _judge(self, way: str, num_tokens: int, seconds: float) -> Verdict:
        recompute = self.costs.recompute_s(num_tokens)
        if not self.is_on or recompute is None or seconds <= recompute:
            return Verdict.YES
        self._num_refused[way] += 1
        if self._num_refused[way] < PROBE_EVERY:
            return Verdict.NO
        self._num_refused[way] = 0
        return Verdict.PROBE


def _crossover(latency: float, per_token: float, recompute_per_token: float) -> int:
    """Tokens from which latency + tokens x ``per_token`` is less than computing them.

    >>> _crossover(0.02, 0.00001, 0.0001), _crossover(0.0, 0.2, 0.1)
    (223, -1)
    """
    gain = recompute_per_token - per_token
    return math.ceil(latency / gain) if gain > 0 else NEVER

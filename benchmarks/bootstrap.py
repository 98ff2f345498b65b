"""Bootstrap intervals of statistics over clustered samples, paired between two arms."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
_NUM_WINDOWS = 20
_RATE_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the interval that holds it with probability ``LEVEL``."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """For the record."""
        return {"value": self.value, "low": self.low, "high": self.high}


STATISTICS = ("mean", "p50", "p90", "p99")


def statistics(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """Mean and percentiles, in the order of ``STATISTICS``.

    >>> statistics([1.0, 2.0, 6.0])[:2].tolist()
    [3.0, 2.0]
    """
    return np.array([np.mean(values), *np.percentile(values, [50, 90, 99])])


class Clusters:
    """Samples by cluster, such as all turns of a conversation: clusters are drawn, not samples.

    Samples of one cluster depend on one another; drawing them singly would make the intervals
    too narrow.
    """

    def __init__(self, samples: Mapping[Hashable, Sequence[float] | np.ndarray]) -> None:
        kept = {key: values for key, values in samples.items() if len(values)}
        if not kept:
            raise ValueError("there are no samples")
        self.keys = tuple(kept)
        self._arrays = {key: np.asarray(values, float) for key, values in kept.items()}
        self.all = np.concatenate([self._arrays[key] for key in self.keys])

    def drawn(self, keys: Sequence[Hashable]) -> np.ndarray:
        """Samples of these clusters; a cluster that is named twice counts twice."""
        return np.concatenate([self._arrays[key] for key in keys])

    def restricted(self, keys: Sequence[Hashable]) -> "Clusters":
        """Only these clusters."""
        return Clusters({key: self._arrays[key] for key in keys})


def intervals(clusters: Clusters, *, seed: int = 0, draws: int = 1000) -> dict[str, Estimate]:
    """Each statistic of all samples and its percentile interval; equal seeds give equal ones."""
    found = [statistics(clusters.drawn(keys)) for keys in _draws(clusters.keys, seed, draws)]
    return _estimates(statistics(clusters.all), found)


def paired_ratios(
    clusters: Clusters, base: Clusters, *, seed: int = 0, draws: int = 1000
) -> dict[str, Estimate]:
    """Each statistic over that of ``base``; every draw takes the same clusters from both.

    Only clusters that both have are used: what differs between them, such as the length of a
    conversation, is then in both sides of the ratio.
    """
    others = set(base.keys)
    both = tuple(key for key in clusters.keys if key in others)
    mine, other = clusters.restricted(both), base.restricted(both)
    found = [
        statistics(mine.drawn(keys)) / statistics(other.drawn(keys))
        for keys in _draws(both, seed, draws)
    ]
    return _estimates(statistics(mine.all) / statistics(other.all), found)


class Arrivals:
    """What came when in a run: ``weights[i]`` at ``ends_s[i]``, of ``wall_s`` seconds in all.

    Draws take windows of the run. They are a twentieth of it each: long against a step, so that
    neighbours hardly depend on one another.
    """

    def __init__(self, ends_s: Sequence[float], weights: Sequence[float], wall_s: float) -> None:
        edges = np.linspace(0.0, wall_s, _NUM_WINDOWS + 1)
        inside = np.minimum(ends_s, np.nextafter(wall_s, 0.0))
        sums, _ = np.histogram(inside, edges, weights=weights)
        self._rates = sums * _NUM_WINDOWS / wall_s
        self.rate = float(np.sum(weights)) / wall_s

    def drawn_rates(self, seed: int) -> np.ndarray:
        """Means of drawn windows."""
        random = np.random.default_rng(seed)
        return random.choice(self._rates, (_RATE_DRAWS, _NUM_WINDOWS)).mean(axis=1)


def rate_interval(arrivals: Arrivals, *, seed: int = 0) -> Estimate:
    """What came a second in all, with an interval."""
    return _estimate(arrivals.rate, arrivals.drawn_rates(seed))


def rate_ratio(arrivals: Arrivals, base: Arrivals, *, seed: int = 0) -> Estimate:
    """One rate over another of a run of its own; their windows are drawn apart."""
    draws = arrivals.drawn_rates(seed) / base.drawn_rates(seed + 1)
    return _estimate(arrivals.rate / base.rate, draws)


def _draws(keys: Sequence[Hashable], seed: int, draws: int) -> Iterator[list[Hashable]]:
    random = np.random.default_rng(seed)
    for row in random.integers(0, len(keys), (draws, len(keys))):
        yield [keys[i] for i in row]


def _estimates(values: np.ndarray, found: Sequence[np.ndarray]) -> dict[str, Estimate]:
    columns = np.transpose(found)
    return {name: _estimate(float(values[i]), columns[i]) for i, name in enumerate(STATISTICS)}


def _estimate(value: float, found: np.ndarray) -> Estimate:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(found, [tail, 100 - tail])
    return Estimate(value, float(low), float(high))

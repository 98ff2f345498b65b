"""Bootstrap intervals: clusters are drawn whole, ratios are paired, equal seeds agree."""

import numpy as np
import pytest

from vllm_hicache.benchmarks.bootstrap import (
    Arrivals,
    Clusters,
    intervals,
    paired_ratios,
    rate_interval,
    rate_ratio,
)


def _noisy(seed, num_clusters=40, per_cluster=10, spread=1.0):
    random = np.random.default_rng(seed)
    centres = random.normal(10, spread, num_clusters)
    return Clusters({i: random.normal(c, 0.01, per_cluster) for i, c in enumerate(centres)})


def test_values_are_those_of_all_samples():
    clusters = Clusters({"a": [1.0, 2.0], "b": [6.0]})
    found = intervals(clusters)
    assert {name: round(found[name].value, 9) for name in found} == {
        "mean": 3.0,
        "p50": 2.0,
        "p90": 5.2,
        "p99": 5.92,
    }


def test_equal_seeds_give_equal_intervals():
    clusters = _noisy(0)
    assert intervals(clusters, seed=1) == intervals(clusters, seed=1)
    assert intervals(clusters, seed=1) != intervals(clusters, seed=2)


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(100):
        found = intervals(_noisy(seed), seed=seed, draws=200)["mean"]
        hits += found.low <= 10 <= found.high
    assert 85 <= hits <= 99


def test_more_samples_of_the_same_cluster_do_not_narrow_an_interval():
    # The clusters differ, their samples hardly: ten times the samples tell nothing more.
    few, many = _noisy(5, per_cluster=2), _noisy(5, per_cluster=200)
    widths = [found.high - found.low for found in (intervals(c)["mean"] for c in (few, many))]
    assert widths[1] > 0.8 * widths[0]


def test_a_paired_ratio_is_free_of_what_both_arms_share():
    base = _noisy(7, spread=5.0)
    slower = Clusters({key: 1.1 * base.drawn([key]) for key in base.keys})
    found = paired_ratios(slower, base)["mean"]
    assert found.value == pytest.approx(1.1)
    assert found.high - found.low < 1e-9
    alone = intervals(slower)["mean"]
    assert alone.high - alone.low > 1.0


def test_a_ratio_leaves_out_clusters_that_one_arm_lacks():
    mine = Clusters({1: [2.0], 2: [4.0], 3: [1000.0]})
    base = Clusters({1: [1.0], 2: [2.0], 4: [1e-3]})
    assert paired_ratios(mine, base)["mean"].value == 2.0


def test_samples_are_needed():
    with pytest.raises(ValueError, match="no samples"):
        Clusters({"a": []})


def _even(rate=60.0):
    return Arrivals(np.linspace(0.05, 10.0, 200), np.full(200, rate / 20), 10.0)


def test_a_rate_is_what_came_over_the_whole_time():
    found = rate_interval(_even())
    assert found.value == 60.0
    assert found.low <= 60.0 <= found.high
    uneven = rate_interval(Arrivals([0.1] * 200, np.full(200, 3.0), 10.0))
    assert uneven.value == 60.0
    assert uneven.high - uneven.low > 10 * (found.high - found.low)


def test_a_ratio_of_rates_is_as_unsure_as_either():
    found = rate_ratio(_even(90.0), _even(60.0))
    assert found.value == pytest.approx(1.5)
    assert found.low <= 1.5 <= found.high < 1.6
    uneven = Arrivals([0.1] * 100 + [6.0] * 100, np.full(200, 3.0), 10.0)
    assert rate_ratio(uneven, _even()).high > 1.5 > 1.0 == rate_ratio(uneven, _even()).value


def test_what_came_at_the_very_end_counts():
    found = rate_interval(Arrivals([10.0000001], [5.0], 10.0))
    assert found.high > found.value == 0.5

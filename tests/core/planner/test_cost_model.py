"""Estimates that waiting is judged by."""

import pytest

from vllm_hicache.cost_model import (
    ASSUMED_COPY_BYTES_PER_S,
    MIN_PREFILL_SAMPLES,
    MIN_PREFILL_TOKENS,
    CostModel,
)


def test_recompute_time_is_unknown_until_enough_large_steps_were_seen():
    model = CostModel()
    for _ in range(MIN_PREFILL_SAMPLES - 1):
        model.prefilled(1024, 0.1)
    for _ in range(20):
        model.prefilled(MIN_PREFILL_TOKENS - 1, 0.001)
    assert model.recompute_s(1024) is None
    model.prefilled(1024, 0.1)
    assert model.recompute_s(2048) == pytest.approx(0.2)


def test_an_estimate_follows_a_change_of_speed():
    model = CostModel()
    for _ in range(MIN_PREFILL_SAMPLES):
        model.prefilled(1000, 0.1)
    for _ in range(40):
        model.prefilled(1000, 1.0)
    assert model.recompute_s(1000) == pytest.approx(1.0, rel=0.01)


def test_copy_time_is_assumed_until_it_was_measured():
    model = CostModel()
    assert model.load_s(int(ASSUMED_COPY_BYTES_PER_S)) == 1.0
    model.copied(1000, 0.5)
    assert model.load_s(1000) == pytest.approx(0.5)


def test_samples_without_an_amount_or_a_duration_change_nothing():
    model = CostModel()
    model.copied(0, 0.5)
    model.copied(1000, 0.0)
    model.copied(1000, -1.0)
    assert model.load_s(int(ASSUMED_COPY_BYTES_PER_S)) == 1.0

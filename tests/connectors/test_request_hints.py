"""Hints of requests: what is read, what is refused, what is told."""

import logging

import pytest

from vllm_hicache.connectors.request_hints import MAX_TOLD, HintReader, Hints
from vllm_hicache.errors import ConfigError
from vllm_hicache.metrics import Metrics


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "x"}, {"hicache": None}, []])
def test_a_request_without_hints_has_none(params):
    assert HintReader(Metrics()).read(params) == Hints()


def test_hints_are_read_among_what_others_put_there():
    params = {"do_remote_decode": True, "hicache": {"load": False, "priority": 7}}
    assert Hints.parse(params) == Hints(load=False, store=True, priority=7)


@pytest.mark.parametrize("seconds", [0, 0.5, 600, 86_400])
def test_a_time_to_stay_is_a_number_of_seconds(seconds):
    assert Hints.parse({"hicache": {"pin_s": seconds}}).pin_s == seconds


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stor": False}, 'unknown hint "stor"; there are load, store, priority'),
        ({"store": "no"}, 'hint store must be true or false, got "no"'),
        ({"load": 0}, "hint load must be true or false, got 0"),
        ({"priority": True}, "hint priority must be a whole number from 0 to 100, got true"),
        ({"priority": 101}, "hint priority must be a whole number from 0 to 100, got 101"),
        ({"priority": -1}, "got -1"),
        ({"pin_s": "1h"}, 'hint pin_s must be a number of seconds from 0 to 86400, got "1h"'),
        ({"pin_s": True}, "hint pin_s must be a number of seconds"),
        ({"pin_s": -0.1}, "got -0.1"),
        ({"pin_s": 86_401}, "got 86401"),
        ({"pin_s": float("nan")}, "hint pin_s must be a number of seconds"),
        ({1: True}, "unknown hint 1"),
        ("store", 'hicache must be a table of hints, got "store"'),
    ],
)
def test_a_bad_hint_is_named_with_what_is_allowed(table, message):
    with pytest.raises(ConfigError) as refused:
        Hints.parse({"hicache": table})
    assert message in str(refused.value)


def test_bad_hints_are_counted_told_once_and_none_of_the_request_is_followed(caplog):
    metrics = Metrics()
    reader = HintReader(metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reader.read({"hicache": {"store": False, "lod": False}}) == Hints()
    assert metrics.totals()["bad_hints"] == 3
    assert len(caplog.records) == 1
    assert 'unknown hint "lod"' in caplog.text


def test_a_flood_of_different_bad_hints_does_not_fill_the_log(caplog):
    reader = HintReader(Metrics())
    for i in range(10 * MAX_TOLD):
        reader.read({"hicache": {f"hint{i}": 1}})
    assert len(caplog.records) == MAX_TOLD

"""What the breaker says in the log: what changed and why; never a line for every failure."""

import logging

import pytest

from vllm_hicache.storage_breaker import TELL_EVERY_S, Breaker


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def breaker(now, caplog):
    caplog.set_level(logging.INFO)
    return Breaker("reads", failures=5, backoff_s=1, max_backoff_s=4, clock=lambda: now[0])


def _fail(breaker: Breaker, times: int = 1) -> None:
    for number in range(times):
        breaker.end(breaker.begin(), False, f"Exists {number}: no answer")


def test_an_outage_is_told_when_it_begins_when_it_counts_and_when_it_ends(breaker, now, caplog):
    _fail(breaker, 5)
    for second in range(1, 50):
        now[0] = second
        if breaker.may_start:
            _fail(breaker)
    breaker.end(breaker.begin(), True)
    assert [record.message for record in caplog.records] == [
        "Storage fails (reads): Exists 0: no answer",
        "Storage failed 5 times in a row: reads disabled, next try in 1.0 s; last: "
        "Exists 4: no answer",
        "Storage answers again: reads enabled",
    ]


def test_a_long_outage_is_told_once_a_minute(breaker, now, caplog):
    _fail(breaker, 5)
    for second in range(1, 601):
        now[0] = second
        if breaker.may_start:
            _fail(breaker)
    told = [record.message for record in caplog.records if "still fails" in record.message]
    assert 8 <= len(told) <= 600 / TELL_EVERY_S
    assert told[0] == "Storage still fails (reads): Exists 0: no answer"


def test_failures_among_successes_are_told_once_a_minute(breaker, now, caplog):
    for second in range(120):
        now[0] = second
        _fail(breaker)
        breaker.end(breaker.begin(), True)
    assert len(caplog.records) == 2


def test_a_storage_that_comes_and_goes_is_told_once_a_minute(breaker, now, caplog):
    for second in range(0, 180, 3):
        now[0] = second
        _fail(breaker, 5)
        now[0] = second + 1
        breaker.end(breaker.begin(), True)
    said = [record.message for record in caplog.records]
    assert sum("disabled" in message for message in said) == 3
    assert sum("enabled" in message for message in said) == 3
    assert len(said) <= 9

"""One stream, workers at any distance: where they differ, and where they meet again."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.rank_events import Event
from vllm_hicache.rank_streams import StreamJoin


def copy(op_id: int, rows: str = "", result: str = "", step: int = 1) -> Event:
    return Event(
        step, "copies", "copy", False, (("op", op_id),), (("rows", rows),), (("r", result),), ()
    )


def hook(step: int, result: str = "", call: str = "hook") -> Event:
    return Event(step, "hooks", call, True, (), (), (("r", result),), ())


def compare(*streams: Sequence[Event], told: int = 0, reference: bool = False):
    join = StreamJoin("s", len(streams) - reference, has_reference=reference)
    for participant, events in enumerate(streams):
        join.add(participant, events)
    return join.compare(dict.fromkeys(range(len(streams) - reference), told))


def found(*streams: Sequence[Event], told: int = 0, reference: bool = False):
    return [(d.kind, d.step, d.odd) for d in compare(*streams, told=told, reference=reference)]


def test_equal_streams_do_not_differ():
    events = [copy(1, "a"), copy(2, "b")]
    assert found(events, events, events) == []


def test_fast_workers_wait_for_the_slowest_one():
    assert found([copy(1), copy(2)], [copy(1)], []) == []
    assert found([hook(1), hook(2)], [hook(1)], []) == []


def test_steps_are_not_compared_where_calls_are_numbered():
    assert found([copy(1, step=3)], [copy(1, step=9)]) == []


@pytest.mark.parametrize(
    ("event", "kind"),
    [(copy(2, "x"), "arguments"), (copy(2, "b", "x"), "result"), (copy(3, "b"), "order")],
)
def test_each_class_is_told_from_the_others(event, kind):
    usual = [copy(1, "a"), copy(2, "b"), copy(4)]
    assert found(usual, usual, [copy(1, "a"), event, copy(4)])[0] == (kind, 1, (2,))


def test_a_numbered_call_that_is_missing_is_order_and_the_rest_is_compared():
    usual = [copy(1), copy(2), copy(3), copy(4, "a")]
    other = [copy(1), copy(3), copy(4, "b")]
    assert found(usual, usual, other) == [("order", 1, (2,)), ("arguments", 1, (2,))]


def test_a_numbered_call_that_is_made_twice_is_order_and_the_rest_is_compared():
    usual = [copy(1), copy(2), copy(3)]
    assert found(usual, [copy(1), copy(1), copy(2), copy(3)], usual) == [("order", 1, (1,))]


def test_another_call_in_the_same_place_is_order():
    usual = [hook(1), hook(2)]
    assert found(usual, usual, [hook(1), hook(2, call="other")]) == [("order", 2, (2,))]


def test_a_call_that_is_missing_from_a_step_is_order_once_the_step_is_told():
    usual = [hook(1), hook(2)]
    assert found(usual, usual, [hook(1)], told=2) == []
    (divergence,) = compare(usual, usual, [hook(1)], told=3)
    assert (divergence.kind, divergence.step, divergence.odd) == ("order", 2, (2,))
    assert divergence.events == (hook(2), hook(2), None)


def test_what_came_before_the_first_step_is_compared():
    assert found([hook(0, "a")], [hook(0, "a")], [hook(0, "b")]) == [("result", 0, (2,))]


def test_a_call_that_only_one_worker_makes_is_order_once_the_step_is_told():
    usual = [hook(1)]
    assert found(usual, usual, [hook(1), hook(1)], told=2) == [("order", 1, (2,))]


def test_after_a_missing_or_additional_call_the_next_step_is_compared():
    usual = [hook(1), hook(2), hook(3, "a")]
    other = [hook(1), hook(2), hook(2), hook(2), hook(3, "b")]
    assert found(usual, usual, other) == [("order", 2, (2,)), ("result", 3, (2,))]
    other = [hook(1), hook(3, "b")]
    assert found(usual, usual, other) == [("order", 2, (2,)), ("result", 3, (2,))]


def test_the_scheduler_is_right_even_against_all_workers():
    events = [hook(1, "a")], [hook(1, "a")], [hook(1, "b")]
    assert found(*events, reference=True) == [("result", 1, (0, 1))]


def test_without_a_majority_all_are_named_and_nobody_is_blamed():
    (divergence,) = compare([hook(1, "a")], [hook(1, "b")])
    assert (divergence.odd, divergence.is_tied) == ((0, 1), True)
    pairs = [hook(1, "a")], [hook(1, "a")], [hook(1, "b")], [hook(1, "b")]
    assert compare(*pairs)[0].is_tied


def test_a_worker_that_left_is_not_waited_for():
    join = StreamJoin("s", 3)
    for participant in range(2):
        join.add(participant, [copy(1, str(participant))])
    assert join.compare({}) == []
    join.leave(2)
    assert [d.events[2] for d in join.compare({})] == [None]


def test_after_a_loss_numbered_calls_find_together_and_are_compared_again():
    join = StreamJoin("s", 2)
    join.add(0, [copy(1), copy(2), copy(3), copy(4, "a"), copy(6)])
    join.restart(1)
    join.add(1, [copy(3), copy(4, "b"), copy(5)])
    kinds = [(d.kind, dict(d.events[0].key)["op"]) for d in join.compare({})]
    assert kinds == [("arguments", 4), ("order", 6)]


@given(pace=st.lists(st.integers(0, 2), max_size=60), num_ops=st.integers(0, 12))
def test_equal_workers_never_differ_at_any_pace(pace, num_ops):
    join = StreamJoin("s", 3)
    left = [[copy(i + 1) for i in range(num_ops)] for _ in range(3)]
    for participant in [*pace, *[0, 1, 2] * num_ops]:
        if left[participant]:
            join.add(participant, [left[participant].pop(0)])
        assert join.compare({}) == []
    assert not any(join._queues)


@given(wrong=st.integers(0, 9), worker=st.integers(0, 2), pace=st.lists(st.integers(0, 2)))
def test_one_wrong_event_is_found_at_any_pace_and_nothing_else(wrong, worker, pace):
    join = StreamJoin("s", 3)
    left = [
        [copy(i, "x" if (i, n) == (wrong, worker) else "") for i in range(10)] for n in range(3)
    ]
    divergences = []
    for participant in [*pace, *[0, 1, 2] * 10]:
        if left[participant]:
            join.add(participant, [left[participant].pop(0)])
        divergences += join.compare({})
    (divergence,) = divergences
    assert (divergence.kind, divergence.odd) == ("arguments", (worker,))
    assert divergence.events[worker].key == (("op", wrong),)

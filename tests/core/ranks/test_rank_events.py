"""Events on their way: in order, once, never before their call has ended."""

import pytest

from vllm_hicache import rank_events
from vllm_hicache.rank_events import Event, EventBatch, EventRecorder, pack_batch, unpack_batch


def begin(recorder, name="c"):
    event = Event(recorder.step, name, name, False, (), (), None, ())
    recorder.begin(event)
    return event


def call(recorder, name="c"):
    begin(recorder, name).result = ()


def test_events_are_told_once_and_batches_are_numbered():
    recorder = EventRecorder()
    recorder.step = 4
    call(recorder, "a")
    call(recorder, "b")
    first, second = recorder.take_batch(), recorder.take_batch()
    assert (first.number, first.step, [e.call for e in first.events]) == (1, 4, ["a", "b"])
    assert second == EventBatch(2, 4, ())


def test_a_call_that_still_runs_holds_back_what_began_after_it():
    recorder = EventRecorder()
    recorder.step = 1
    call(recorder, "before")
    running = begin(recorder, "running")
    recorder.step = 2
    call(recorder, "after")
    assert [e.call for e in recorder.take()] == ["before"]
    running.result = (("result", 3),)
    assert [e.call for e in recorder.take()] == ["running", "after"]


def test_a_batch_does_not_claim_a_step_of_which_it_holds_something_back():
    recorder = EventRecorder()
    recorder.step = 1
    begin(recorder, "running")
    recorder.step = 5
    call(recorder)
    assert recorder.take_batch() == EventBatch(1, 1, ())


def test_events_that_nobody_takes_are_bounded_and_leave_a_hole(monkeypatch):
    monkeypatch.setattr(rank_events, "MAX_UNTOLD", 3)
    recorder = EventRecorder()
    for _ in range(4):
        call(recorder)
    batches = [recorder.take_batch(), recorder.take_batch()]
    assert [batch.number for batch in batches] == [2, 3]
    assert [len(batch.events) for batch in batches] == [3, 0]


@pytest.mark.parametrize("num_events", [0, 1, 5])
def test_all_events_of_a_step_are_taken(num_events):
    recorder = EventRecorder()
    for _ in range(num_events):
        call(recorder)
    assert len(recorder.take()) == num_events


def test_a_batch_travels_as_bytes():
    recorder = EventRecorder()
    event = begin(recorder)
    event.key = (("number", 3),)
    event.arguments = (("a", None), ("b", True), ("c", 1.5), ("d", "text"), ("e", -(1 << 63)))
    event.result = ()
    batch = recorder.take_batch()
    assert unpack_batch(pack_batch(batch)) == batch
    assert unpack_batch(pack_batch(batch)).events[0].arguments == event.arguments

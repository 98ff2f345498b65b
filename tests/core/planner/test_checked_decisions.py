"""The scheduler's decisions as the rank-consensus checker records them, on a real planner."""

from planner_rig import Rig

from vllm_hicache.checked_calls import check_of, watch
from vllm_hicache.checked_decisions import decision_makers
from vllm_hicache.planner import Planner
from vllm_hicache.rank_events import EventRecorder

TOKENS = list(range(100, 140))
NAME = "state.request_id"


def live_through(rig: Rig) -> None:
    """One request that is looked up, loaded, computed and finished."""
    rig.fill_host(TOKENS[:12])
    state = rig.request("a", TOKENS[:20])
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    rig.compute(state, 20)
    rig.plan()
    rig.finish_saves()
    rig.planner.finish(state, rig.now)


def test_a_planner_that_is_not_watched_has_its_own_functions():
    rig = Rig(has_storage=True)
    for owner in decision_makers(rig.planner):
        marked = [n for n, f in vars(type(owner)).items() if check_of(f) is not None]
        assert marked
        assert not set(marked) & vars(owner).keys()
        for name in marked:
            assert getattr(owner, name).__func__ is vars(type(owner))[name]
            assert not hasattr(vars(type(owner))[name], "__wrapped__")


def test_a_requests_life_is_recorded_in_order():
    rig, recorder = Rig(), EventRecorder()
    for owner in decision_makers(rig.planner):
        watch(owner, recorder)
    live_through(rig)
    events = [event for event in recorder.take() if dict(event.arguments).get(NAME) == "a"]
    calls = [event.call for event in events]
    assert calls == ["add_request", "match", "begin_load", "admit", "collect_saves", "finish"]
    by_call = {event.call: event for event in events}
    assert dict(by_call["match"].result) == {"result.num_tokens": 12, "result.is_async": True}
    assert dict(by_call["begin_load"].result)["result.last_token"] == 12


def test_plans_and_what_became_of_their_copies_are_recorded():
    rig, recorder = Rig(), EventRecorder()
    for owner in decision_makers(rig.planner):
        watch(owner, recorder)
    live_through(rig)
    events = recorder.take()
    plans = [dict(e.result)["result.number"] for e in events if e.call == "plan_step"]
    assert len(plans) == 3
    assert plans == list(range(1, len(plans) + 1))
    settled = [e for e in events if e.call == "settle"]
    assert ("result.state.request_id", "a") in [pair for e in settled for pair in e.result]
    assert ("num_published", 2) in [pair for e in settled for pair in e.result]


def test_answers_of_storage_are_recorded_with_the_worker_that_gave_them():
    rig, recorder = Rig(has_storage=True, num_workers=2), EventRecorder()
    for owner in decision_makers(rig.planner):
        watch(owner, recorder)
    rig.request("a", TOKENS[:20])
    rig.answer_query(3, 2)
    answers = [dict(e.arguments) for e in recorder.take() if e.call == "handle"]
    assert [a["worker_id"] for a in answers] == [0, 1]
    assert "num_leading=3" in answers[0]["event"]
    assert "num_leading=2" in answers[1]["event"]


def test_the_marks_name_what_the_planner_decides():
    marked = {name for name, function in vars(Planner).items() if check_of(function) is not None}
    assert marked == {
        "add_request",
        "match",
        "admit",
        "begin_load",
        "collect_saves",
        "preempt",
        "finish",
        "plan_step",
        "reset",
    }

"""Marks on functions, selectors, and the wrappers that exist only where the checker is on."""

import functools
import inspect
import re
from pathlib import Path

import pytest

from vllm_hicache.checked_calls import check_of, checked, recorded, watch
from vllm_hicache.rank_events import EventRecorder


class Box:
    """Something with fields."""

    def __init__(self, width, inner=None):
        self.width = width
        self.inner = inner


class Plan:
    def __init__(self, number):
        self.number = number


class Worker:
    def __init__(self):
        self.calls = []

    @checked(key="number", arguments=("box.width", "box.inner.width"), result="result.width")
    def pack(self, number, box, *, speed=3):
        self.calls.append(number)
        return Box(box.width * 2)

    @checked()
    def rest(self):
        """Only the order of calls is compared."""

    @checked(arguments=True, result=True)
    def add(self, a, b=2, *, c=3):
        return a + b + c

    @checked(arguments=lambda arguments: arguments["a"] + arguments["b"])
    def sum_of(self, a, b):
        """A function selects."""

    @classmethod
    @checked(arguments=True)
    def of_class(cls, a):
        return cls.__name__ + a

    @staticmethod
    @checked(arguments=True, result=True)
    def alone(a):
        return a

    @checked(shown="ok")
    def end(self, ok):
        """How it ends is recorded."""

    @checked(arguments="items")
    def keep(self, items):
        items.append("later")

    @checked(result=True)
    def fail(self):
        raise ValueError("no")

    def unmarked(self):
        return self.rest()


def watched():
    worker, recorder = Worker(), EventRecorder()
    watch(worker, recorder)
    return worker, recorder


def test_a_mark_leaves_the_function_as_it_is():
    def double(x):
        return 2 * x

    marked = checked(arguments="x", result=True)(double)
    assert marked is double
    assert inspect.unwrap(marked) is double
    assert check_of(double) is not None


def test_only_the_watched_object_has_wrappers():
    before = dict(vars(Worker))
    worker, other = Worker(), Worker()
    names = watch(worker, EventRecorder())
    assert names == sorted(name for name in before if check_of(before[name]) is not None)
    assert set(names) <= vars(worker).keys()
    assert vars(other).keys() == {"calls"}
    assert dict(vars(Worker)) == before
    assert other.pack.__func__ is Worker.__dict__["pack"]


def test_calls_are_recorded_and_answered_as_always():
    worker, recorder = watched()
    assert worker.pack(7, Box(2, Box(5)), speed=9).width == 4
    (event,) = recorder.take()
    assert worker.calls == [7]
    assert event.call == event.stream == "pack"
    assert event.key == (("number", 7),)
    assert event.arguments == (("box.width", 2), ("box.inner.width", 5))
    assert event.result == (("result.width", 4),)


def test_without_selectors_only_the_call_is_recorded():
    worker, recorder = watched()
    worker.rest()
    (event,) = recorder.take()
    assert (event.key, event.arguments, event.result, event.shown) == ((), (), (), ())


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {}), ((), {"a": 1}), ((1, 2), {"c": 3}), ((1,), {"c": 3, "b": 2})]
)
def test_all_arguments_are_named_with_their_defaults_and_without_self(args, kwargs):
    worker, recorder = watched()
    assert worker.add(*args, **kwargs) == 6
    (event,) = recorder.take()
    assert event.arguments == (("a", 1), ("b", 2), ("c", 3))
    assert event.result == (("result", 6),)


def test_a_function_selects_from_the_arguments_by_name():
    worker, recorder = watched()
    worker.sum_of(3, b=4)
    assert [value for _, value in recorder.take()[0].arguments] == [7]


def test_class_and_static_methods_are_recorded():
    worker, recorder = watched()
    assert worker.of_class("!") == "Worker!"
    assert worker.alone(5) == 5
    assert [(e.call, e.arguments) for e in recorder.take()] == [
        ("of_class", (("a", "!"),)),
        ("alone", (("a", 5),)),
    ]


def test_a_plain_function_is_recorded():
    recorder = EventRecorder()

    @checked(arguments="x", result=True)
    def double(x):
        return 2 * x

    assert recorded(double, recorder)(4) == 8
    assert recorder.take()[0].result == (("result", 8),)


def test_what_is_shown_is_not_among_the_arguments():
    worker, recorder = watched()
    worker.end(ok=False)
    (event,) = recorder.take()
    assert (event.arguments, event.shown) == ((), (("ok", False),))


def test_arguments_are_kept_as_they_were_when_the_call_began():
    worker, recorder = watched()
    items = ["now"]
    worker.keep(items)
    assert items == ["now", "later"]
    assert recorder.take()[0].arguments == (("items", "['now']"),)


def test_an_error_is_a_result_and_goes_on():
    worker, recorder = watched()
    with pytest.raises(ValueError, match="no"):
        worker.fail()
    worker.rest()
    failed, after = recorder.take()
    assert failed.result == (("result", "raised ValueError: no"),)
    assert after.call == "rest"


def test_an_error_of_a_selector_is_not_hidden():
    worker, recorder = watched()
    with pytest.raises(AttributeError, match="width"):
        worker.pack(1, Box(2))
    assert recorder.take() == ()
    assert worker.calls == []


def test_events_stand_in_the_order_in_which_calls_began():
    recorder = EventRecorder()

    class Nested:
        @checked()
        def outer(self):
            self.inner()

        @checked()
        def inner(self):
            assert recorder.take() == ()  # the outer one has not ended

    nested = Nested()
    watch(nested, recorder)
    nested.outer()
    assert [event.call for event in recorder.take()] == ["outer", "inner"]


def test_a_stream_may_be_named_by_an_argument():
    recorder = EventRecorder()

    class Copies:
        @checked(stream="copy {way}", key="number")
        def copy(self, way, number): ...

    copies = Copies()
    watch(copies, recorder)
    copies.copy("load", 1)
    copies.copy("save", number=1)
    assert [event.stream for event in recorder.take()] == ["copy load", "copy save"]


def test_a_call_may_begin_a_step():
    recorder = EventRecorder()

    class Steps:
        @checked(step="number")
        def begin(self, number):
            self.work()

        @checked()
        def work(self): ...

    steps = Steps()
    watch(steps, recorder)
    steps.begin(4)
    steps.work()
    steps.begin(5)
    assert [event.step for event in recorder.take()] == [4, 4, 4, 5, 5]


def test_a_function_in_the_place_of_a_marked_one_keeps_the_mark():
    class Other(Worker):
        @functools.wraps(Worker.rest)
        def rest(self):
            return "another"

    other, recorder = Other(), EventRecorder()
    watch(other, recorder)
    assert other.rest() == "another"
    assert [event.call for event in recorder.take()] == ["rest"]


def test_watching_twice_records_once():
    worker, recorder = watched()
    assert watch(worker, recorder) == []
    worker.rest()
    assert len(recorder.take()) == 1


@pytest.mark.parametrize(
    "selectors",
    [
        {"arguments": "missing"},
        {"arguments": "missing.field"},
        {"key": "missing"},
        {"shown": "missing"},
        {"step": "missing"},
        {"stream": "s {missing}"},
        {"arguments": 3},
        {"arguments": ("x", 3)},
        {"key": True},
        {"result": "x"},
        {"result": ("result", "other.field")},
    ],
    ids=str,
)
def test_a_selector_that_selects_nothing_is_refused(selectors):
    with pytest.raises(TypeError):

        @checked(**selectors)
        def function(x): ...


@pytest.mark.parametrize("nothing", [None, False, ()])
def test_nothing_is_compared_where_nothing_is_selected(nothing):
    recorder = EventRecorder()

    @checked(arguments=nothing, result=nothing, key=nothing)
    def function(x):
        return x

    recorded(function, recorder)(object())
    (event,) = recorder.take()
    assert (event.key, event.arguments, event.result) == ((), (), ())


def test_an_unmarked_function_is_not_recorded():
    with pytest.raises(TypeError, match="not marked"):
        recorded(Worker().unmarked, EventRecorder())


def test_the_class_of_the_guide_can_be_watched():
    guide = (Path(__file__).parents[3] / "docs" / "debugging.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    space = {}
    exec(code, space)
    gather, recorder = space["Gather"](), EventRecorder()
    assert watch(gather, recorder) == ["gather"]
    with pytest.raises(AttributeError, match="num_bytes"):
        gather.gather(Plan(3), [1, 2])  # it returns nothing, and its selector wants a field


def test_calls_from_inside_are_recorded():
    worker, recorder = watched()
    worker.unmarked()
    assert [event.call for event in recorder.take()] == ["rest"]

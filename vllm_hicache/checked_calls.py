"""Which calls the rank-consensus checker sees, and what it compares of each.

`checked` marks a function and gives back that same function. Only where the checker is on does
`watch` put recording wrappers onto one object; classes and other objects stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from operator import attrgetter
from types import MethodType
from typing import Any, TypeAlias, TypeVar

from vllm_hicache.plain_values import plain
from vllm_hicache.rank_events import Event, EventRecorder, Pairs

Selector: TypeAlias = str | Callable[[Any], object]
"""A parameter (``"op"``), a field of one (``"op.op_id"``), ``"result"`` or a field of it, or a
function. For arguments the function gets them all by name, for results the result."""
Selectors: TypeAlias = "bool | Selector | Sequence[Selector] | None"
"""True: every argument but ``self``, or the whole result. False, None, (): nothing."""

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__rank_consensus__"
_RESULT = "result"


@dataclass(frozen=True, slots=True)
class Check:
    """What is compared of one call. Calls of one stream are compared in their order.

    stream     name of the stream; "" is the name of the call; "start {way}" has a stream for each
               value of the argument ``way``
    step       argument that says which step begins with this call
    in_step    whether every worker makes this call as often in each step
    key        arguments that number the calls of a stream: where they differ, a call is missing
               or additional, and the class of the divergence is "order"
    arguments  compared; where they differ the class is "arguments"
    result     compared; where it differs the class is "result"
    shown      arguments that are recorded and not compared
    """

    stream: str
    step: str
    in_step: bool
    key: tuple[Selector, ...]
    arguments: tuple[Selector, ...] | bool
    result: tuple[Selector, ...] | bool
    shown: tuple[Selector, ...]


def checked(
    *,
    stream: str = "",
    step: str = "",
    in_step: bool = False,
    key: Selectors = (),
    arguments: Selectors = (),
    result: Selectors = (),
    shown: Selectors = (),
) -> Callable[[Function], Function]:
    """Mark a function, method, class method or static method for the checker; see ``Check``.

    Raises TypeError where a selector is none or names no parameter of the function.

    >>> def double(x): return 2 * x
    >>> checked(arguments="x", result=True)(double) is double
    True
    """
    check = Check(
        stream=stream,
        step=step,
        in_step=in_step,
        key=_listed(key),
        arguments=arguments if isinstance(arguments, bool) else _listed(arguments),
        result=result if isinstance(result, bool) else _listed(result),
        shown=_listed(shown),
    )

    def mark(function: Function) -> Function:
        plain_function = getattr(function, "__func__", function)
        _Reader(plain_function, check)  # refuses selectors that name nothing
        setattr(plain_function, _MARK, check)
        return function

    return mark


def _listed(selectors: Selectors) -> tuple[Selector, ...]:
    if selectors is None or selectors is False:
        return ()
    items = (selectors,) if isinstance(selectors, str) or callable(selectors) else selectors
    if isinstance(items, bool) or not isinstance(items, Sequence):
        raise TypeError(f"expected selectors, got {selectors!r}")
    for item in items:
        if not isinstance(item, str) and not callable(item):
            raise TypeError(f"a selector is a name, a dotted field or a function, got {item!r}")
    return tuple(items)


def check_of(function: object) -> Check | None:
    """The mark of a function or bound method; None where it has none."""
    return getattr(getattr(function, "__func__", function), _MARK, None)


def watch(owner: Any, recorder: EventRecorder) -> list[str]:
    """Record the marked calls of this one object from now on; their names.

    Attributes of the instance hide those of its class, so that calls from inside are seen, too.
    """
    names = sorted(name for name, value in _attributes(owner) if check_of(value) is not None)
    for name in names:
        setattr(owner, name, recorded(getattr(owner, name), recorder))
    return names


def _attributes(owner: object) -> Iterator[tuple[str, object]]:
    seen: dict[str, object] = {}
    for space in (owner, *type(owner).__mro__):
        for name, value in vars(space).items() if hasattr(space, "__dict__") else ():
            seen.setdefault(name, value)
    yield from seen.items()


def recorded(function: Callable[..., Any], recorder: EventRecorder) -> Callable[..., Any]:
    """The marked function or bound method with a recorder behind it.

    An event takes its place when the call begins, and is told when the call has ended. An error
    of the function is its result, and goes on; so does one of a selector, which is a mistake in
    the program and no divergence.
    """
    check = check_of(function)
    if check is None:
        raise TypeError(f"{function!r} is not marked with checked()")
    plain_function = getattr(function, "__func__", function)
    read = _Reader(plain_function, check, is_bound=isinstance(function, MethodType))
    name = plain_function.__name__

    @wraps(plain_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = read.values(args, kwargs)
        if read.step is not None:
            recorder.step = read.step(values)
        event = Event(
            recorder.step,
            read.stream(values),
            name,
            check.in_step,
            read.key(values),
            read.arguments(values),
            None,
            read.shown(values),
        )
        recorder.begin(event)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            event.result = ((_RESULT, f"raised {type(error).__name__}: {error}"),)
            raise
        event.result = read.result(result)
        return result

    delattr(call, _MARK)  # a wrapper is not wrapped again
    return call


_Get: TypeAlias = Callable[[tuple[Any, ...]], Any]


class _Reader:
    """The selectors of one function, made ready: no signature is looked at during a call."""

    def __init__(
        self, function: Callable[..., Any], check: Check, *, is_bound: bool = True
    ) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        if is_bound and parameters and parameters[0].name in ("self", "cls"):
            del parameters[0]
        named = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._names = tuple(p.name for p in parameters if p.kind not in named)
        self._defaults = {
            p.name: None if p.default is inspect.Parameter.empty else p.default for p in parameters
        }
        self._function = function.__name__
        selected = self._names if check.arguments is True else check.arguments or ()
        self.key = self._pairs(check.key)
        self.arguments = self._pairs(selected)
        self.shown = self._pairs(check.shown)
        self.result = self._result_pairs(("result",) if check.result is True else check.result)
        self.step = self._getter(check.step) if check.step else None
        self.stream = self._stream(check)

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the parameters, defaults filled in."""
        names = self._names
        if len(args) >= len(names):
            return args
        defaults = self._defaults
        given = (kwargs.get(name, defaults[name]) for name in names[len(args) :])
        return (*args, *given)

    def _stream(self, check: Check) -> Callable[[tuple[Any, ...]], str]:
        name = check.stream or self._function
        if not name.endswith("}"):
            return lambda values: name
        name, _, parameter = name[:-1].partition("{")
        get = self._getter(parameter)
        return lambda values: f"{name}{plain(get(values))}"

    def _pairs(self, selectors: Sequence[Selector]) -> Callable[[tuple[Any, ...]], Pairs]:
        if not selectors:
            return lambda values: ()
        gets = [(_label(selector), self._getter(selector)) for selector in selectors]
        if len(gets) == 1:
            ((label, get),) = gets
            return lambda values: ((label, plain(get(values))),)
        return lambda values: tuple([(label, plain(get(values))) for label, get in gets])

    def _result_pairs(self, selectors: Sequence[Selector] | bool) -> Callable[[Any], Pairs]:
        if isinstance(selectors, bool) or not selectors:
            return lambda result: ()
        gets = []
        for selector in selectors:
            if callable(selector):
                gets.append((_label(selector), selector))
                continue
            first, _, rest = selector.partition(".")
            if first != _RESULT:
                raise TypeError(f"{self._function}: a result is called 'result', got {selector!r}")
            gets.append((selector, attrgetter(rest) if rest else _itself))
        return lambda result: tuple([(label, plain(get(result))) for label, get in gets])

    def _getter(self, selector: Selector) -> _Get:
        if callable(selector):
            return partial(self._call, selector)
        first, _, rest = selector.partition(".")
        if first not in self._names:
            raise TypeError(
                f"{self._function} has no parameter {first!r}; it has {', '.join(self._names)}"
            )
        index = self._names.index(first)
        if not rest:
            return lambda values: values[index]
        get = attrgetter(rest)
        return lambda values: get(values[index])

    def _call(self, selector: Callable[[Any], object], values: tuple[Any, ...]) -> object:
        return selector(dict(zip(self._names, values, strict=False)))


def _label(selector: Selector) -> str:
    return selector if isinstance(selector, str) else getattr(selector, "__name__", "selected")


def _itself(result: object) -> object:
    return result

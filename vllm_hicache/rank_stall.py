"""Which worker has stopped: signs that workers leave in shared memory, judged over time.

Pure: the caller brings signs and time. A worker on another host leaves no signs and is not judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_hicache.rank_places import WorkerPlace

STALL_HEADLINE = "Found rank stall"


class WorkerSigns(NamedTuple):
    """Counters of one worker; each only grows."""

    pulse: int
    """Grows as long as any thread of the process can run."""
    steps_begun: int
    steps_ended: int
    saves_done: int
    loads_done: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Who stopped, and how one knows."""

    workers: tuple[int, ...]
    step: int
    """The first step that not all workers have ended."""
    why: str


@dataclass(slots=True)
class _Seen:
    value: int = -1
    since: float = 0.0

    def age(self, value: int, now: float) -> float:
        """How long the value has not changed."""
        if value != self.value:
            self.value, self.since = value, now
        return now - self.since


class StallWatch:
    """Tells once of every worker that stopped, and again when it stops another time.

    Three ways to stop, in this order: the process shows no sign of life; a step that others began
    is not ended; copies that others finished are not. Each for ``deadline_s``.
    """

    def __init__(self, places: Sequence[WorkerPlace], deadline_s: float) -> None:
        self._places = places
        self._deadline_s = deadline_s
        self._pulses = {place.worker_id: _Seen() for place in places}
        self._saves = {place.worker_id: _Seen() for place in places}
        self._loads = {place.worker_id: _Seen() for place in places}
        self._ended = _Seen()
        self._last_look: float | None = None
        self._told: set[int] = set()

    def look(self, signs: Mapping[int, WorkerSigns], now: float) -> Stall | None:
        """The stall that is new; call it a few times in each deadline."""
        last, self._last_look = self._last_look, now
        if last is None or now - last > self._deadline_s / 2:
            # We ourselves did not run, or a machine was asleep: everybody starts anew.
            for seen in (*self._pulses.values(), *self._saves.values(), *self._loads.values()):
                seen.since = now
            self._ended.since = now
        if not signs:
            return None
        stall = self._judge(signs, now)
        if stall is None:
            self._told.clear()
            return None
        if self._told.issuperset(stall.workers):
            return None
        self._told.update(stall.workers)
        return stall

    def _judge(self, signs: Mapping[int, WorkerSigns], now: float) -> Stall | None:
        step = min(sign.steps_ended for sign in signs.values()) + 1
        is_open = step <= max(sign.steps_begun for sign in signs.values())
        is_step_late = self._ended.age(step, now) >= self._deadline_s
        if not is_open:
            self._ended.since = now
        lifeless = self._late(self._pulses, {i: sign.pulse for i, sign in signs.items()}, now)
        late_saves = self._behind(self._saves, {i: s.saves_done for i, s in signs.items()}, now)
        late_loads = self._behind(self._loads, {i: s.loads_done for i, s in signs.items()}, now)
        seconds = f"{self._deadline_s:g} s"
        if lifeless:
            return Stall(lifeless, step, f"no sign of life of the process for {seconds}")
        if is_step_late and is_open:
            return self._late_step(signs, step, seconds)
        for late, what in ((late_saves, "save"), (late_loads, "load")):
            if late:
                counts = [getattr(sign, f"{what}s_done") for sign in signs.values()]
                number = min(counts) + 1
                why = f"{what} {number} has not ended for {seconds}; others ended {what} "
                return Stall(late, step, why + str(max(counts)))
        return None

    def _late(
        self, seen: Mapping[int, _Seen], values: Mapping[int, int], now: float
    ) -> tuple[int, ...]:
        ages = {i: seen[i].age(value, now) for i, value in values.items()}
        return tuple(i for i, age in ages.items() if age >= self._deadline_s)

    def _behind(
        self, seen: Mapping[int, _Seen], values: Mapping[int, int], now: float
    ) -> tuple[int, ...]:
        """Late, and with less done than others."""
        most = max(values.values())
        late = self._late(seen, values, now)
        for i, value in values.items():
            if value == most:
                seen[i].since = now  # who has nothing more to do is not late
        return tuple(i for i in late if values[i] < most)

    def _late_step(self, signs: Mapping[int, WorkerSigns], step: int, seconds: str) -> Stall:
        """Later pipeline stages wait for earlier ones, so the first stage that lacks the step
        is looked at; within a stage those that have not begun it keep the others waiting."""
        lacking = [p for p in self._places if p.worker_id in signs]
        lacking = [p for p in lacking if signs[p.worker_id].steps_ended < step]
        stage = min(place.pp_rank for place in lacking)
        suspects = [place.worker_id for place in lacking if place.pp_rank == stage]
        idle = tuple(i for i in suspects if signs[i].steps_begun < step)
        if idle:
            return Stall(idle, step, f"step {step} was not begun for {seconds}; others began it")
        why = f"step {step} was begun and not ended for {seconds}"
        if len(suspects) > 1:
            why += "; workers of one stage wait for one another, so one of these"
        return Stall(tuple(suspects), step, why)


def stall_text(stall: Stall, names: Sequence[str], signs: Mapping[int, WorkerSigns]) -> str:
    """Who stopped, then the signs of each worker in lines of their own."""
    who = ", ".join(names[i] for i in stall.workers)
    signs_of_all = [
        f"  {names[i]}: step {s.steps_begun} begun, {s.steps_ended} ended, "
        f"save {s.saves_done} and load {s.loads_done} done"
        for i, s in signs.items()
    ]
    return "\n".join([f"{STALL_HEADLINE} at step {stall.step}: {who}: {stall.why}", *signs_of_all])

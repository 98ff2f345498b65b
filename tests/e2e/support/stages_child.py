"""Child process: a pipeline of two stages of which one is slow, or lacks part of what is stored.

A specification has ``model``, ``folder`` (its own), ``options`` (vLLM's) and ``task``, the name of
one of `TASKS`. Copies of the second stage are late by what ``folder/delay`` says.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from engine_in_process import (
    PAGE,
    Answer,
    Engine,
    answer_of,
    difference,
    largest_difference,
    prompt_of,
    running,
)
from live_server import faulty_url

from vllm_hicache.hashing import PageHashChain, chain_root
from vllm_hicache.plan import Direction
from vllm_hicache.testing import Fault, FaultFile

NUM_PAGES, NUM_LACKING = 10, 3
"""Of the prompt that one stage has in part only; how many of its last pages that stage lacks."""
SECOND_STAGE = "_L2-4_"
"""In the names of its objects: the model has four layers."""
DELAY_S = 0.2
ROUNDS, PAIRS = 12, 4
PHASE_GAPS, PENDING_GAPS, MIN_GAPS = 14, 12, 3
"""Of a phase; beside copies that are late; of those, where the machine became slow meanwhile."""


def answer(specification: Mapping[str, Any]) -> dict[str, Any]:
    folder = Path(specification["folder"])
    delay_by(folder, 0.0)
    return TASKS[specification["task"]](specification, folder)


def delay_by(folder: Path, seconds: float) -> None:
    (folder / "delay.new").write_text(str(seconds))
    (folder / "delay.new").rename(folder / "delay")


def page_hashes(prompt: list[int]) -> list[bytes]:
    chain = PageHashChain(PAGE, chain_root(cache_salt=None, lora=None))
    chain.extend(prompt, len(prompt))
    return chain.hashes


# The second stage acknowledges late --------------------------------------------------------------


def save_behind_a_slow_stage(specification: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Two prompts, one after the other: what is visible while the stages differ."""
    prompts = [prompt_of(f"lag {i}", 2 * PAGE + 5) for i in range(2)]
    records: list[Any] = []
    with running(Path(specification["model"]), **specification["options"]) as engine:
        lane, index = engine.planner.join._lanes[Direction.SAVE], engine.planner.host.index

        def look() -> None:
            visible = [index.match(page_hashes(prompt)) for prompt in prompts]
            records.append([list(lane.done), lane.consumed, visible])

        delay_by(folder, 2 * DELAY_S)
        cold = [ask_and_look(engine, prompt, look) for prompt in prompts]
        while engine.planner.saves.num_running:
            engine.step()
            look()
        delay_by(folder, 0.0)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        warm = engine.ask_each(prompts)
        engine.settle()
        return {
            "records": records,
            "served": difference(engine.counters(), before)["served_tokens/host"],
            "is_same": [a.tokens for a in cold] == [a.tokens for a in warm],
            "difference": largest_difference(cold, warm),
            "problems": engine.problems(),
        }


def ask_and_look(engine: Engine, prompt: list[int], look: Callable[[], None]) -> Answer:
    """As ``ask``, with a look after each step."""
    engine.add("watched", prompt)
    while True:
        outputs = [output for output in engine.step() if output.finished]
        look()
        if outputs:
            return answer_of(outputs[0], outputs[0].outputs[0])


# Who decodes beside slow copies ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of a request without cache work."""

    seconds: float
    is_beside_copies: bool
    is_quiet: bool
    """No batch computed anything but one token, in this gap and in the one before it."""


@dataclass(slots=True)
class Phase:
    """One load and one save beside the decodes, and some gaps."""

    delay_s: float
    gaps: list[Gap] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """How many batches are in flight with each that is scheduled."""

    def quiet_s(self) -> list[float]:
        """What a token takes; where copies are late, while they are."""
        is_late = self.delay_s > 0
        return [g.seconds for g in self.gaps if g.is_quiet and g.is_beside_copies >= is_late]


def decode_beside_a_slow_stage(specification: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Phases with and without the delay are pairs, one behind the other in either order: how busy
    the machine happens to be is in both of a pair."""
    stored = [prompt_of(f"stored {i}", 3 * PAGE + 5) for i in range(ROUNDS * PAIRS * 2)]
    late: list[Phase] = []
    in_time: list[Phase] = []
    with running(Path(specification["model"]), **specification["options"]) as engine:
        engine.ask_each(stored, max_tokens=1)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        for number in range(ROUNDS):
            with decoding(engine, number) as decodes:
                for i, prompt in enumerate(stored[number::ROUNDS]):
                    is_late = i % 4 in (1, 2)
                    delay_s = late_enough(in_time) if is_late else 0.0
                    delay_by(folder, delay_s)
                    phase = decodes.go_on(delay_s, f"{number} {i}", prompt)
                    (late if is_late else in_time).append(phase)
            engine.settle()
        counted = difference(engine.counters(), before)
        problems = engine.problems()
    kinds = {"late": late, "in time": in_time}
    pairs = [(a.quiet_s(), b.quiet_s()) for a, b in zip(late, in_time, strict=True)]
    pairs = [pair for pair in pairs if len(pair[0]) >= MIN_GAPS]
    ratios = sorted(median(some) / median(others) for some, others in pairs)
    return {
        "ratios": ratios,
        "cost": median(ratios),
        "token_s": [median(map(median, some)) for some in zip(*pairs, strict=True)],
        "longest": max(gap.seconds / phase.delay_s for phase in late for gap in phase.gaps),
        "most": {k: max(n for phase in some for n in phase.batches) for k, some in kinds.items()},
        "batches": {
            k: mean(n for phase in some for n in phase.batches) for k, some in kinds.items()
        },
        "served": counted["served_tokens/host"],
        "load_s": engine_mean(counted, "load_seconds"),
        "problems": problems,
    }


def late_enough(in_time: list[Phase]) -> float:
    """A delay that lasts for most of a phase, on a slow machine, too."""
    return max(DELAY_S, PENDING_GAPS * median(in_time[-1].quiet_s()))


def engine_mean(counted: Mapping[str, float], name: str) -> float:
    """Mean of a histogram among the totals."""
    return counted.get(f"{name}_sum", 0.0) / max(1.0, counted.get(f"{name}_count", 0.0))


class Decodes:
    """Two requests without cache work, each in a batch of its own: two are in flight."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._queue = engine.llm.llm_engine.engine_core.engine_core.batch_queue
        self._names = [f"decode {number} {i}" for i in range(2)]
        self._batches: list[int] = []
        self._most_tokens = 0
        """Of one batch, since the last token."""
        self._was_quiet = False
        untouched = {"kv_transfer_params": {"hicache": {"load": False, "store": False}}}
        self.ids = []
        for name in self._names:
            options = {"max_tokens": 3000, "extra_args": untouched}
            self.ids.append(engine.add(name, prompt_of(name, 20), **options))
            engine.step()
        self._last = self._wait_for_token()

    def note(self, num_tokens: int) -> None:
        """A batch of so many tokens is scheduled."""
        if num_tokens:
            self._batches.append(len(self._queue) + 1)
            self._most_tokens = max(self._most_tokens, num_tokens)

    def go_on(self, delay_s: float, name: str, stored: list[int]) -> Phase:
        """One phase; at its end no copy is under way."""
        phase = Phase(delay_s)
        self._batches = phase.batches
        self._engine.add(f"load {name}", stored, max_tokens=1)
        self._engine.add(f"save {name}", prompt_of(f"save {name}", 3 * PAGE + 5), max_tokens=1)
        planner = self._engine.planner
        while len(phase.gaps) < PHASE_GAPS or planner.holds_device_blocks:
            now = self._wait_for_token()
            is_quiet, self._most_tokens = self._most_tokens == 1, 0
            is_beside = planner.holds_device_blocks
            phase.gaps.append(Gap(now - self._last, is_beside, is_quiet and self._was_quiet))
            self._last, self._was_quiet = now, is_quiet
        return phase

    def _wait_for_token(self) -> float:
        """When the first of the two has its next token."""
        while True:
            outputs = self._engine.step()
            if any(output.request_id == self._names[0] for output in outputs):
                return time.perf_counter()


@contextmanager
def decoding(engine: Engine, number: int) -> Iterator[Decodes]:
    """They decode until the end of the block, and what is scheduled meanwhile is noted."""
    scheduler = engine.scheduler
    schedule = scheduler.schedule
    decodes = Decodes(engine, number)

    def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        decodes.note(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = schedule_and_note
    try:
        yield decodes
    finally:
        scheduler.schedule = schedule
        engine.abort(decodes.ids)


# One stage lacks pages ---------------------------------------------------------------------------


def restore_with_a_short_stage(specification: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The last pages of the second stage are deleted, cannot be read, or come too late."""
    prompts = {way: prompt_of(f"short {way}", NUM_PAGES * PAGE + 5) for way in WAYS}
    url, faults = faulty_url(folder)
    storage = {"url": url, "exists_timeout_s": 30}
    model, options = Path(specification["model"]), specification["options"]
    cold = {}
    with running(model, storage, extra=FIXED, **options) as engine:
        for way, prompt in prompts.items():
            cold[way] = engine.ask([prompt])[0]
        engine.settle()
        problems = engine.problems()
    found: dict[str, Any] = {}
    with running(model, storage, extra=FIXED | TIMEOUT, **options) as engine:
        for way, prompt in prompts.items():
            lacking = [h.hex() for h in page_hashes(prompt)[NUM_PAGES - NUM_LACKING :]]
            WAYS[way](folder / "store", faults, lacking)
            before = engine.counters()
            warm = engine.ask([prompt])[0]
            engine.settle()
            found[way] = {
                "is_same": warm.tokens == cold[way].tokens,
                "difference": largest_difference([warm], [cold[way]]),
                "cached": warm.cached,
                "counters": difference(engine.counters(), before),
                "in_host": engine.planner.host.index.match(page_hashes(prompt)),
            }
            problems += engine.problems()
            faults.write()
    return {"found": found, "problems": problems}


FIXED = {"fixed_weights": True, "fleet": {"tp": [1], "pp": [2]}}
TIMEOUT = {"prefetch_policy": "timeout", "prefetch_timeout_base_s": 1.0}


def delete(store: Path, faults: FaultFile, lacking: list[str]) -> None:
    for page in lacking:
        for path in store.rglob(f"*{page}*{SECOND_STAGE}*"):
            path.unlink()


def fail(store: Path, faults: FaultFile, lacking: list[str]) -> None:
    names = object_names(store, lacking)
    faults.write(*(Fault(operation="read", name=name, fails=True) for name in names))


def come_late(store: Path, faults: FaultFile, lacking: list[str]) -> None:
    names = object_names(store, lacking)
    faults.write(*(Fault(operation="read", name=name, delay_s=3.0) for name in names))


def object_names(store: Path, pages: list[str]) -> list[str]:
    found = [p.name for page in pages for p in store.rglob(f"*{page}*{SECOND_STAGE}*")]
    assert len(found) == len(pages), found
    return found


WAYS: Mapping[str, Callable[[Path, FaultFile, list[str]], None]] = {
    "deleted": delete,
    "unreadable": fail,
    "late": come_late,
}
TASKS = {
    "save": save_behind_a_slow_stage,
    "decode": decode_beside_a_slow_stage,
    "restore": restore_with_a_short_stage,
}

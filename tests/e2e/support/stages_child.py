"""Child process: a pipeline of two stages of which one is slow, or lacks part of what is stored.

A specification has ``model``, ``folder`` (its own), ``options`` (vLLM's) and ``task``, the name of
one of `TASKS`. Copies of the second stage are late by what ``folder/delay`` says.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
ROUNDS, DECODED = 8, 48


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


def decode_beside_a_slow_stage(specification: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Rounds with and without the delay alternate: what else the machine does is in both."""
    stored = [prompt_of(f"stored {i}", 3 * PAGE + 5) for i in range(2 * ROUNDS)]
    rounds: dict[str, list[dict[str, Any]]] = {"in time": [], "late": []}
    with running(Path(specification["model"]), **specification["options"]) as engine:
        engine.ask_each(stored, max_tokens=1)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        for number, prompt in enumerate(stored):
            name = "late" if number % 2 else "in time"
            delay_by(folder, DELAY_S if number % 2 else 0.0)
            with counting_batches(engine) as batches:
                times = decode_beside(engine, number, prompt)
            rounds[name].append({"times": times, "batches": batches})
            engine.settle()
        counted = difference(engine.counters(), before)
        problems = engine.problems()
    return {
        "token_s": {k: median(t for r in some for t in r["times"]) for k, some in rounds.items()},
        "longest_s": {k: max(t for r in some for t in r["times"]) for k, some in rounds.items()},
        "round_s": {k: median(sum(r["times"]) for r in some) for k, some in rounds.items()},
        "most": {k: max(n for r in some for n in r["batches"]) for k, some in rounds.items()},
        "batches": {k: mean(n for r in some for n in r["batches"]) for k, some in rounds.items()},
        "served": counted["served_tokens/host"],
        "load_s": engine_mean(counted, "load_seconds"),
        "problems": problems,
    }


def engine_mean(counted: Mapping[str, float], name: str) -> float:
    """Mean of a histogram among the totals."""
    return counted.get(f"{name}_sum", 0.0) / max(1.0, counted.get(f"{name}_count", 0.0))


@contextmanager
def counting_batches(engine: Engine) -> Iterator[list[int]]:
    """How many batches are in flight with each that is scheduled."""
    scheduler, queue = engine.scheduler, engine.llm.llm_engine.engine_core.engine_core.batch_queue
    schedule = scheduler.schedule
    seen: list[int] = []

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            seen.append(len(queue) + 1)
        return output

    scheduler.schedule = schedule_and_count
    try:
        yield seen
    finally:
        scheduler.schedule = schedule


def decode_beside(engine: Engine, number: int, stored: list[int]) -> list[float]:
    """Seconds between tokens of a request without cache work while others load and save."""
    untouched = {"kv_transfer_params": {"hicache": {"load": False, "store": False}}}
    watched = f"decode {number} 0"
    for i in range(2):
        name = f"decode {number} {i}"
        engine.add(name, prompt_of(name, 20), max_tokens=DECODED, extra_args=untouched)
        engine.step()  # each in a batch of its own: two in flight
    times: list[float] = []
    last = None
    is_begun = is_finished = False
    while not is_finished:
        if len(times) == DECODED // 4 and not is_begun:
            is_begun = True
            engine.add(f"load {number}", stored, max_tokens=1)
            engine.add(f"save {number}", prompt_of(f"save {number}", 3 * PAGE + 5), max_tokens=1)
        for output in engine.step():
            if output.request_id == watched:
                now = time.perf_counter()
                times += [] if last is None else [now - last]
                last, is_finished = now, output.finished
    return times


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

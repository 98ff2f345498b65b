"""Child process: aborts, preemption and right answers on an engine whose workers drift apart.

A specification has ``model``, ``extra`` (options of the connector) and ``options`` (vLLM's).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_in_process import (
    PAGE,
    Answer,
    Engine,
    difference,
    largest_difference,
    prompt_of,
    running,
    step_until,
)

CROWD = 20


def compare(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Largest difference of log-probabilities; infinite where the tokens differ."""
    if [answer.tokens for answer in some] != [answer.tokens for answer in others]:
        return float("inf")
    return largest_difference(some, others)


def alone(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    salted = [{"prompt_token_ids": p, "cache_salt": "alone"} for p in prompts]
    answers = engine.ask_each(salted, max_tokens=max_tokens)
    engine.settle()
    return answers


def abort_while(engine: Engine, prompts: Sequence[list[int]], what: str, at_least: int) -> int:
    """Abort all while so many operations run; how many did."""
    ids = [engine.add(f"{what} {i}", prompt) for i, prompt in enumerate(prompts)]
    step_until(engine, lambda: engine.running()[what] >= at_least)
    found = engine.running()[what]
    engine.abort(ids)
    return found


def run(engine: Engine) -> dict[str, Any]:
    prompts = [prompt_of(f"child {i}", PAGE + 30 + 5 * i) for i in range(CROWD)]
    right = alone(engine, prompts[:6], 60)
    cold = engine.ask_each(prompts[:6], max_tokens=60)
    engine.ask(prompts, max_tokens=1)
    engine.settle()
    engine.reset_device()
    found = {"loads": abort_while(engine, prompts, "loads", 2)}
    engine.settle()
    problems = engine.problems()
    others = [prompt_of(f"other {i}", PAGE + 30 + 5 * i) for i in range(CROWD)]
    found["saves"] = abort_while(engine, others, "saves", 1)
    engine.settle()
    problems += engine.problems()
    engine.reset_device()
    before, seen = engine.counters(), engine.published()["vllm:num_preemptions"]
    crowded = engine.ask(prompts[:6], max_tokens=60)
    engine.settle()
    counted = difference(engine.counters(), before)
    return {
        "found": found,
        "preemptions": engine.published()["vllm:num_preemptions"] - seen,
        "served": counted["served_tokens/host"],
        "differences": {"cold": compare(cold, right), "crowded": compare(crowded, right)},
        "problems": problems + engine.problems(),
    }


def answer(specification: Mapping[str, Any]) -> dict[str, Any]:
    options, extra = specification["options"], specification["extra"]
    with running(Path(specification["model"]), extra=extra, **options) as engine:
        return run(engine)

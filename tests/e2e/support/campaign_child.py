"""Child process: many mixed requests while storage is slow and fails, and caches are reset.

A specification has ``model``, ``folder`` (its own), ``options`` (vLLM's), ``seed``, ``number`` of
requests, ``number_skipping`` of those for a second engine, which loads only what is faster, and
``number_more`` of those for up to ``max_more`` engines, until every reason for not serving a token
was seen that can be.
"""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diverging_worker import DONE
from engine_in_process import SETTINGS, Answer, Engine, answer_of, running, sampling
from live_server import faulty_url
from mixed_requests import Wanted, requests, stored_before

from vllm_hicache.series import UNSERVED_REASONS
from vllm_hicache.testing import Fault, FaultFile

IN_FLIGHT = 10
NUM_BEST = 3  # log-probabilities of each place
PATIENCE_S = 600.0
MAX_DELAY_S, FAILURES = 0.05, 0.1
EXTRA: Mapping[str, object] = {
    "host_memory": "32MiB",
    "prefetch_policy": "timeout",
    "prefetch_timeout_base_s": 0.2,
    "prefetch_min_tokens": 100,
    "skip_slow_loads": False,
    "prefetch_tenant_max_percent": 1,
    "defer_max_blocks": 6,
    "fixed_weights": True,
}
WRITER: Mapping[str, object] = {"host_memory": "64MiB", "fixed_weights": True}
"""Of the engine before, whose storage is well."""
FETCH_PERCENTS = (8, 50)  # of host memory; 8 are more than one long prompt at once
NUM_DEVICE_BLOCKS = 130
RESETS = (0.3, 0.31, 0.32, 0.6, 0.61, 0.62)
"""Parts of the requests after which host forgets; soon again, when much is being fetched."""
FAILED_LOADS = tuple(0.8 + i / 50 for i in range(10))
"""When a load fails. It takes all pages behind its first one out of host, so it comes late."""


def answer(specification: Mapping[str, Any]) -> dict[str, Any]:
    seed = specification["seed"]
    asked = [
        list(requests(seed, specification["number"])),
        list(requests(seed + 1, specification["number_skipping"])),
    ]
    lives = [
        one_life(specification, "mixed", asked[0], EXTRA),
        one_life(specification, "skipping", asked[1], {**EXTRA, "skip_slow_loads": True}),
    ]
    while len(lives) < 2 + specification["max_more"] and unseen_reasons(lives):
        number = len(lives)
        asked.append(list(requests(seed + number, specification["number_more"])))
        extra = {**EXTRA, "prefetch_max_percent": FETCH_PERCENTS[number % len(FETCH_PERCENTS)]}
        lives.append(one_life(specification, f"more-{number}", asked[-1], extra))
    control = plain_answers(specification, [one for wanted in asked for one in wanted])
    for life, wanted in zip(lives, asked, strict=True):
        compare(life, wanted, control)
    return {"lives": lives}


def unseen_reasons(lives: Iterable[Mapping[str, Any]]) -> set[str]:
    """Every page of this model has all it needs: planner tests see ``missing_pool``."""
    seen = {
        reason
        for life in lives
        for reason in UNSERVED_REASONS
        if life["counters"][f"unserved_tokens/{reason}"]
    }
    return set(UNSERVED_REASONS) - seen - {"missing_pool"}


def compare(
    life: dict[str, Any], asked: list[Wanted], control: Mapping[tuple[int, ...], Answer]
) -> None:
    """Put what is to be judged in the place of a life's answers."""
    given_answers = life.pop("answers")
    pairs = [(given, control[asked[n].prompt]) for n, given in given_answers.items()]
    life["num_asked"], life["num_answers"] = len(asked), len(pairs)
    life["num_aborted"] = sum(w.steps is not None for w in asked)
    life["num_wrong"] = sum(given.tokens != right.tokens for given, right in pairs)
    life["wrong"] = [
        [number, len(asked[number].prompt), repr(given), repr(right)]
        for number, (given, right) in zip(given_answers, pairs, strict=True)
        if given.tokens != right.tokens
    ]
    life["difference"] = max(
        abs(a - b)
        for given, right in pairs
        if given.tokens == right.tokens
        for a, b in zip(by_rank(given), by_rank(right), strict=True)
    )


def by_rank(answer: Answer) -> list[float]:
    """Log-probabilities of each place by rank: of two that are almost equal either may be third."""
    values = answer.logprobs
    return [v for i in range(0, len(values), NUM_BEST) for v in sorted(values[i : i + NUM_BEST])]


def one_life(
    specification: Mapping[str, Any], name: str, wanted: list[Wanted], extra: Mapping[str, object]
) -> dict[str, Any]:
    folder = Path(specification["folder"]) / name
    folder.mkdir()
    url, faults = faulty_url(folder)
    skip_slow_loads = bool(extra["skip_slow_loads"])
    options = {**specification["options"], "num_gpu_blocks_override": NUM_DEVICE_BLOCKS}
    storage = {"url": url, "exists_timeout_s": 0.5}
    model = Path(specification["model"])
    if not skip_slow_loads:
        with running(model, storage, extra=WRITER, **specification["options"]) as engine:
            engine.ask(stored_before(), max_tokens=1)
            engine.settle()
    with running(model, storage, extra=extra, **options) as engine:
        hurt(faults)
        order = Path(os.environ["UNDER_TEST_DIVERGE"])
        order.unlink(missing_ok=True)
        if skip_slow_loads:
            order.write_text("2:slow loads")
        started = time.monotonic()
        answers = run_all(engine, wanted)
        seconds = time.monotonic() - started
        engine.settle()
        return {
            "answers": answers,
            "counters": engine.counters(),
            "published": engine.published(),
            "num_prompt_tokens": sum(len(wanted[n].prompt) for n in answers),
            "problems": engine.problems(),
            "seconds": seconds,
        }


def hurt(faults: FaultFile) -> None:
    """From now on each call may be late, and one in ten fails. Every worker draws for itself: of
    three pages, two come from all four."""
    faults.write(
        Fault(jitter_s=MAX_DELAY_S),
        *(
            Fault(operation=operation, chance=FAILURES, fails=True)
            for operation in ("contains", "read", "write")
        ),
    )


def run_all(engine: Engine, wanted: list[Wanted]) -> dict[int, Answer]:
    """Answers by the number of the request, those that were aborted left out."""
    answers: dict[int, Answer] = {}
    live: dict[int, list[Any]] = {}
    events = events_of(len(wanted))
    deadline = time.monotonic() + PATIENCE_S
    next_one = 0
    while next_one < len(wanted) or live:
        assert time.monotonic() < deadline, f"a hang: {sorted(live)}, {engine.running()}"
        while next_one < len(wanted) and len(live) < IN_FLIGHT:
            happen(engine, events.get(next_one))
            one = wanted[next_one]
            settings = {"max_tokens": one.max_tokens, **one.params}
            live[next_one] = [engine.add(str(next_one), one.asked, **settings), 0]
            next_one += 1
        for output in engine.step():
            if output.finished and int(output.request_id) in live:
                answers[int(output.request_id)] = answer_of(output, output.outputs[0])
                del live[int(output.request_id)]
        for number, (internal_id, age) in list(live.items()):
            live[number][1] = age + 1
            if wanted[number].steps == age:
                engine.abort([internal_id])
                del live[number]
    return answers


def events_of(number: int) -> dict[int, str]:
    if number < 100:
        return {}
    events = {int(part * number): "fail load" for part in FAILED_LOADS}
    return events | {int(part * number): "reset" for part in RESETS}


def happen(engine: Engine, event: str | None) -> None:
    if event == "reset":
        # vLLM refuses while requests run, and tells the connector all the same.
        engine.llm.reset_prefix_cache(reset_connector=True)
    elif event == "fail load":
        path = Path(os.environ["UNDER_TEST_DIVERGE"])
        path.with_name(DONE).unlink(missing_ok=True)
        path.write_text("2:fail load")


def plain_answers(
    specification: Mapping[str, Any], wanted: Iterable[Wanted]
) -> dict[tuple[int, ...], Answer]:
    """What an engine of the same workers without the connector says to each prompt."""
    from vllm import LLM

    prompts = {one.prompt: one.max_tokens for one in wanted}
    llm = LLM(model=specification["model"], **{**SETTINGS, **specification["options"]})
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        [sampling(max_tokens=max_tokens) for max_tokens in prompts.values()],
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()
    return {
        prompt: answer_of(output, output.outputs[0])
        for prompt, output in zip(prompts, outputs, strict=True)
    }

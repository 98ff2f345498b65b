"""Child process: cold, device, host and file answers of one topology.

A specification has ``model``, ``storage``, ``options`` (vLLM's), ``lengths``, ``pair`` and
``lives``: what each engine, one after the other, is asked.
A phase is ``NAME``, or ``reset:NAME`` to drop vLLM's own cache before it, or ``drop:NAME`` to
drop host pages too.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_in_process import Answer, Engine, difference, prompt_of, running

PUBLISHED = (
    "vllm:external_prefix_cache_hits",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens_by_source{source=external_kv_transfer}",
    "vllm:prompt_tokens_cached_by_source{source=device}",
    "vllm:prompt_tokens_cached_by_source{source=host}",
    "vllm:prompt_tokens_cached_by_source{source=disk}",
    "vllm:hicache_served_tokens{tier=host}",
    "vllm:hicache_served_tokens{tier=storage}",
)


def run_phase(engine: Engine, name: str, specification: Mapping[str, Any]) -> dict[str, Any]:
    """Ask everything once; counts are those of this phase alone."""
    before, seen = engine.counters(), published(engine)
    answers = engine.ask_each([prompt_of(n, n) for n in specification["lengths"]])
    pair = [prompt_of(f"pair {i}", n) for i, n in enumerate(specification["pair"])]
    pair_answers = engine.ask(pair) if pair else []
    engine.settle()
    wait_for_reads(engine)
    after = engine.counters()
    return {
        "name": name,
        "answers": [as_list(answer) for answer in answers],
        "pair": [as_list(answer) for answer in pair_answers],
        "counters": difference(after, before),
        "published": difference(published(engine), seen),
    }


def wait_for_reads(engine: Engine, patience_s: float = 10.0) -> None:
    """Storage processes tell their totals once a second; wait until all fetched bytes are told."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        engine.poll_storage()
        counters = engine.counters()
        if counters["bytes_read"] >= counters["fetched_bytes"] + 4096 * counters["objects_read"]:
            return
        time.sleep(0.02)


def wait_for_writes(engine: Engine, patience_s: float = 10.0) -> None:
    """The same of what was written."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        engine.poll_storage()
        counters = engine.counters()
        total = counters["persisted_bytes"] + 4096 * counters["objects_written"]
        if counters["bytes_written"] >= total:
            return
        time.sleep(0.02)


def published(engine: Engine) -> dict[str, float]:
    found = engine.published()
    return {name: found.get(name, 0.0) for name in PUBLISHED}


def as_list(answer: Answer) -> list[Any]:
    return [list(answer.tokens), list(answer.logprobs), answer.cached]


def run_life(specification: Mapping[str, Any], life: Mapping[str, Any]) -> dict[str, Any]:
    storage = Path(specification["storage"])
    options = specification["options"]
    with running(Path(specification["model"]), storage, extra=life["extra"], **options) as engine:
        phases = []
        for phase in life["phases"]:
            before, _, name = phase.rpartition(":")
            if before == "reset":
                engine.reset_device()
            elif before == "drop":
                engine.reset_all()
            phases.append(run_phase(engine, name, specification))
        return {
            "phases": phases,
            "problems": engine.problems(),
            "page_bytes": list(engine.planner.options.page_bytes),
        }


def answer(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [run_life(specification, life) for life in specification["lives"]]

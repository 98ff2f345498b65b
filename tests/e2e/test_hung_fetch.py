"""One fetch from storage hangs for ever; fifty others that come after it do not notice."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import (
    PAGE,
    Answer,
    Engine,
    answer_of,
    assert_same,
    difference,
    prompt_of,
    running,
)
from live_server import faulty_url

from vllm_hicache.hashing import PageHashChain, chain_root
from vllm_hicache.testing import Fault

pytestmark = [pytest.mark.e2e, pytest.mark.full]

NUM_OTHERS, ROUNDS, PAGES = 50, 3, 3
NUM_TOKENS = PAGES * PAGE + 5
NORMAL = 1.2
"""The best of three rounds beside a hung fetch, against the best of three without one."""
COLD_TOLERANCE = 1e-4


def first_page(prompt: list[int]) -> str:
    chain = PageHashChain(PAGE, chain_root())
    chain.extend(prompt, PAGE)
    return chain.hashes[0].hex()


def ask_others(engine: Engine, prompts: list[list[int]]) -> tuple[dict[str, Answer], float]:
    """Answers of all at once, and the seconds until the last one."""
    answers: dict[str, Answer] = {}
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(f"other {i}", prompt, max_tokens=2)
    while len(answers) < len(prompts):
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = answer_of(output, output.outputs[0])
    return answers, time.perf_counter() - started


def test_fifty_others_finish_at_normal_speed_beside_a_hung_fetch(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    url, faults = faulty_url(tmp_path)
    storage = {"url": url, "exists_timeout_s": 30, "operation_timeout_s": 3000}
    rounds = [
        [prompt_of(f"round {r} {i}", NUM_TOKENS) for i in range(NUM_OTHERS)]
        for r in range(2 * ROUNDS)
    ]
    hung = prompt_of("hung", NUM_TOKENS)
    extra = {"fixed_weights": True, "host_memory": "192MiB"}
    with running(tiny_llama(), storage, extra=extra) as engine:
        (cold,) = engine.ask([hung], max_tokens=2)
        for prompts in rounds:
            engine.ask(prompts, max_tokens=1)
        engine.settle()
    with running(tiny_llama(), storage, extra=extra) as engine:
        normal = min(ask_others(engine, prompts)[1] for prompts in rounds[:ROUNDS])
        faults.write(Fault(operation="read", name=first_page(hung), hangs=True))
        before = engine.counters()
        hanging = engine.add("hung", hung, max_tokens=2)  # and waits as long as it takes
        beside = []
        for prompts in rounds[ROUNDS:]:
            answers, seconds = ask_others(engine, prompts)
            beside.append(seconds)
            assert "hung" not in answers
            assert all(answer.cached == PAGES * PAGE for answer in answers.values())
        assert engine.planner.prefetcher.num_reading == 1
        assert min(beside) <= NORMAL * normal, (beside, normal)
        served = difference(engine.counters(), before)["served_tokens/storage"]
        assert served == ROUNDS * NUM_OTHERS * PAGES * PAGE
        engine.abort([hanging])
        faults.write()
        engine.assert_idle_and_clean()
        (warm,) = engine.ask([hung], max_tokens=2)
        assert warm.cached == PAGES * PAGE
        assert_same([warm], [cold], COLD_TOLERANCE)
        engine.assert_idle_and_clean()

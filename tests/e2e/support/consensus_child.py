"""Child process: an engine with the rank-consensus checker, and workers that diverge on purpose.

`python -P consensus_child.py SPECIFICATION RESULT`: JSON with ``model``, ``options`` (vLLM's),
``orders`` (each ``RANK:WHAT``, one after the other) and ``stop`` (a worker to stop, or null).
The environment has the checker's options, and UNDER_TEST_DIVERGE for `diverging_worker`.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from diverging_worker import DONE
from engine_in_process import PAGE, Answer, Engine, prompt_of, running

PROMPT = 2 * PAGE + 10
PATIENCE_S = 60.0


class Collector(logging.Handler):
    """What the checker says in this process, where the scheduler lives."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Found rank" in record.getMessage():
            self.texts.append(record.getMessage())


def obey(engine: Engine, collector: Collector, order: str) -> dict[str, Any]:
    """Give one order, run until it was obeyed and its step has been compared."""
    path, seen = Path(os.environ["UNDER_TEST_DIVERGE"]), len(collector.texts)
    done = path.with_name(DONE)
    done.unlink(missing_ok=True)
    path.write_text(order)
    answers: list[Answer] = []
    deadline = time.monotonic() + PATIENCE_S
    while not done.exists():
        assert time.monotonic() < deadline, f"nobody obeyed {order}"
        answers += engine.ask([prompt_of((order, len(answers)), PROMPT)], max_tokens=4)
    engine.ask([prompt_of((order, "after"), PROMPT)], max_tokens=4)
    engine.settle()
    return {"step": int(done.read_text()), "texts": collector.texts[seen:]}


def stop_worker(engine: Engine, collector: Collector, worker_id: int) -> dict[str, Any]:
    """Stop a worker while the engine answers, until the checker has said something."""
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    pid = executor.workers[worker_id].proc.pid
    checks = engine.side._checks
    seen, sent = len(collector.texts), []

    def stop_for_a_while() -> None:
        time.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while len(collector.texts) == seen and time.monotonic() < deadline:
            time.sleep(0.05)
        sent.append(checks.consensus.decisions.step - 1)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_for_a_while)
    thread.start()
    prompt = prompt_of("stopped", PROMPT)
    while thread.is_alive():
        engine.ask([prompt], max_tokens=100)
    thread.join()
    engine.settle()
    return {"last_sent": sent[0], "texts": collector.texts[seen:]}


def run(engine: Engine, collector: Collector, specification: dict[str, Any]) -> dict[str, Any]:
    prompts = [prompt_of(("clean", i), PAGE * i + 40) for i in range(5)]
    cold = engine.ask(prompts)
    engine.settle()
    engine.reset_device()
    before = engine.counters()["served_tokens/host"]
    warm = engine.ask(prompts)
    engine.settle()
    found: dict[str, Any] = {
        "clean": list(collector.texts),
        "same": [a.tokens for a in cold] == [a.tokens for a in warm],
        "served": engine.counters()["served_tokens/host"] - before,
        "watched": engine.side.planner.plan_step.__name__ in vars(engine.planner),
    }
    for order in specification["orders"]:
        found[order] = obey(engine, collector, order)
    if specification["stop"] is not None:
        found["stop"] = stop_worker(engine, collector, specification["stop"])
    return found | {"counters": engine.counters(), "problems": engine.problems()}


def answer(specification: dict[str, Any]) -> dict[str, Any]:
    collector = Collector()
    logging.getLogger("vllm_hicache.rank_consensus").addHandler(collector)
    with running(Path(specification["model"]), **specification["options"]) as engine:
        result = run(engine, collector, specification)
        num_told = len(collector.texts)
    return {**result, "told_at_the_end": collector.texts[num_told:]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answer(json.loads(sys.argv[1]))))

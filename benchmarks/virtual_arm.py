"""The arms of the modelled benchmark, each in a process of its own:
``python -P -m vllm_hicache.benchmarks.virtual_arm TASKS FOLDER``.

The tasks are a JSON file: for each arm its engine, the conversations and the seconds between turns.
"""

import heapq
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean
from typing import Any

from vllm_hicache.benchmarks.conversations import Conversation, Conversations
from vllm_hicache.benchmarks.virtual_clock import VirtualClock
from vllm_hicache.benchmarks.virtual_engine import ANSWER_TOKEN, VirtualAnswer, VirtualEngine
from vllm_hicache.benchmarks.virtual_scheduler import VirtualPlan

ARRIVAL_GAP_S = 1e-4
"""Between the first turns of two conversations: they come in order."""


def hold_conversations(
    engine: VirtualEngine, clock: VirtualClock, work: Conversations, think_s: float
) -> list[VirtualAnswer]:
    """All turns of all conversations, each asked ``think_s`` after the answer to the one before."""
    systems = [work.system_prompt(group) for group in range(work.groups)]
    talks = [Conversation(i, systems[work.group_of(i)]) for i in range(work.num_conversations)]
    due = [(clock.now_s + talk.number * ARRIVAL_GAP_S, talk.number) for talk in talks]
    running: dict[int, VirtualAnswer] = {}
    answers: list[VirtualAnswer] = []
    while due or running:
        while due and due[0][0] <= clock.now_s:
            asked_s, number = heapq.heappop(due)
            prompt = talks[number].ask(work.message(number, talks[number].turn))
            running[number] = engine.ask(prompt, work.answer_tokens, asked_s)
            answers.append(running[number])
        if not engine.has_work:
            if not due:
                raise RuntimeError(f"the engine rests, but {len(running)} answers are missing")
            clock.wait_until(due[0][0])
            continue
        engine.step()
        for number in [number for number, answer in running.items() if answer.is_done]:
            del running[number]
            talks[number].hear((ANSWER_TOKEN,) * work.answer_tokens)
            if talks[number].turn < work.turns:
                heapq.heappush(due, (clock.now_s + think_s, number))
    return answers


def warm_up(engine: VirtualEngine, clock: VirtualClock, work: Conversations) -> None:
    """As the benchmark on a real engine does: other prompts leave their pages in host memory and
    nothing on the device."""
    hold_conversations(engine, clock, work.warm_up(work.num_conversations), think_s=0.0)
    engine.drop_device()


def check_answers(answers: list[VirtualAnswer], work: Conversations) -> None:
    """Raises RuntimeError where the run was none of this workload."""
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    if prompt_tokens != work.prompt_tokens:
        raise RuntimeError(f"{prompt_tokens:,} prompt tokens, not {work.prompt_tokens:,}")
    for answer in answers:
        found = answer.device_tokens + answer.host_tokens + answer.computed_tokens
        if len(answer.token_times) != work.answer_tokens or found != answer.prompt_tokens:
            raise RuntimeError(f"an answer is not whole: {answer}")
        # vLLM computes the last token again where the whole prompt was found.
        if not 0 <= answer.again_tokens <= (sys.maxsize if answer.preemptions else 1):
            raise RuntimeError(f"an answer took {answer.again_tokens} tokens too many: {answer}")


def run(plan: VirtualPlan, work: Conversations, think_s: float, folder: Path) -> dict[str, Any]:
    """What an arm gave, in JSON's types; seconds are those of the model but for ``real_s``."""
    clock = VirtualClock()
    real_began_s = time.perf_counter()
    with clock.replacing_monotonic():
        engine = VirtualEngine(plan, clock, folder)
        try:
            warm_up(engine, clock, work)
            before, began_s = engine.totals(), clock.now_s
            answers = hold_conversations(engine, clock, work, think_s)
            wall_s = clock.now_s - began_s
            engine.finish()
            engine.check_end()
        finally:
            engine.close()
    check_answers(answers, work)
    return {
        **summary(answers),
        "wall_s": wall_s,
        **{name: total - before[name] for name, total in engine.totals().items()},
        "real_s": time.perf_counter() - real_began_s,
    }


def summary(answers: list[VirtualAnswer]) -> dict[str, Any]:
    """Times of all answers, and their prompt tokens by where they came from."""
    ttfts_s = sorted(answer.ttft_s for answer in answers)
    gaps_s = [
        late - early
        for answer in answers
        for early, late in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    return {
        "answers": len(answers),
        "output_tokens": sum(answer.answer_tokens for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "device_tokens": sum(answer.device_tokens for answer in answers),
        "host_tokens": sum(answer.host_tokens for answer in answers),
        "computed_tokens": sum(answer.computed_tokens for answer in answers),
        "again_tokens": sum(answer.again_tokens for answer in answers),
        "preemptions": sum(answer.preemptions for answer in answers),
        "ttft_mean_s": mean(ttfts_s),
        "ttft_p50_s": ttfts_s[len(ttfts_s) // 2],
        "ttft_p90_s": ttfts_s[len(ttfts_s) * 9 // 10],
        "inter_token_mean_s": mean(gaps_s) if gaps_s else 0.0,
    }


def run_task(task: dict[str, Any], result_path: Path) -> None:
    """Run one arm and write what it gave, or why it gave nothing."""
    plan, work = VirtualPlan(**task["plan"]), Conversations(**task["conversations"])
    try:
        with tempfile.TemporaryDirectory(prefix="hicache-model-") as folder:
            result = run(plan, work, task["think_s"], Path(folder))
    except BaseException as error:
        result_path.write_text(json.dumps({"failure": f"{type(error).__name__}: {error}"}))
        raise
    result_path.write_text(json.dumps(result))


def main() -> None:
    """Run all tasks of a file, as many at once as there are cores; ``FOLDER/0.json`` is the result
    of the first."""
    tasks, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    context = multiprocessing.get_context("fork")  # vLLM is imported once for all of them
    processes = [
        context.Process(target=run_task, args=(task, folder / f"{number}.json"))
        for number, task in enumerate(tasks)
    ]
    running: list[Any] = []
    for process in processes:
        if len(running) == len(os.sched_getaffinity(0)):
            ended = wait([other.sentinel for other in running])
            running = [other for other in running if other.sentinel not in ended]
        process.start()
        running.append(process)
    for process in running:
        process.join()


if __name__ == "__main__":
    main()

"""Replays a trace in one engine: every request is sent at its time, whatever still runs."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hicache.benchmarks.answers import AnsweringEngine
from vllm_hicache.benchmarks.trace_file import TracePrompts, TraceRequest


@dataclass(frozen=True, slots=True)
class Replayed:
    """One answered request; times in seconds, ``due_s`` and ``end_s`` since the start."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    due_s: float
    late_s: float
    """How long after its time the request was sent."""
    ttft_s: float
    """From its time, not from when it was sent."""
    end_s: float
    gaps_s: list[float]


async def replay(
    engine: AnsweringEngine, requests: Sequence[TraceRequest], prompts: TracePrompts
) -> list[Replayed]:
    """Answers in the order of the requests."""
    made = [prompts.prompt(request) for request in requests]
    started = time.perf_counter()

    async def send(number: int) -> Replayed:
        request = requests[number]
        await asyncio.sleep(started + request.arrival_s - time.perf_counter())
        answer = await engine.answer(made[number], request.output_tokens)
        due = started + request.arrival_s
        return Replayed(
            number=number,
            prompt_tokens=request.input_tokens,
            cached_tokens=answer.num_cached,
            due_s=request.arrival_s,
            late_s=answer.submitted - due,
            ttft_s=answer.arrivals[0] - due,
            end_s=answer.arrivals[-1] - started,
            gaps_s=answer.gaps_s(),
        )

    async with asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(send(number)) for number in range(len(requests))]
    return [task.result() for task in tasks]

"""What runs in one engine of the interference benchmark: waves of requests that decode."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vllm_hicache.benchmarks.answers import Answer, MeasuredEngine, RunFailed, cached_by_source
from vllm_hicache.benchmarks.waves import FRESH, QUIET, RESTORING, SEEN, Waves


async def run_waves(session: MeasuredEngine, work: Waves) -> list[dict[str, Any]]:
    """All concurrencies, each without and then with restores; the first wave of each not kept."""
    found = []
    for concurrency in work.concurrencies:
        for number in range(work.waves + 1):
            wave = await _wave(session, work, (concurrency, number, 0), [])
            if number:
                found.append({"load": QUIET, **wave})
        for number in range(work.waves if work.restores else 0):
            seen = work.prompts(SEEN, (concurrency, number))
            for prompt in seen:
                await session.answer(prompt, 1)
            await (session.drop_host() if work.from_files else session.drop_device())
            wave = await _wave(session, work, (concurrency, number, 1), seen)
            found.append({"load": RESTORING, **wave})
    return found


async def _wave(
    session: MeasuredEngine, work: Waves, key: tuple[int, int, int], seen: Sequence[list[int]]
) -> dict[str, Any]:
    prompts = work.prompts(FRESH, key)
    is_over = asyncio.Event()
    before = await session.counters()
    started = time.perf_counter()
    beside = asyncio.create_task(_ask_again(session, seen, is_over))
    answers = await asyncio.gather(*(session.answer(p, work.output_tokens) for p in prompts))
    ended = time.perf_counter()
    is_over.set()
    num_restored = await beside
    gaps = steady_gaps_s(answers)
    if not gaps:
        raise RunFailed(f"{key[0]} requests never decode all at once: raise --answer-tokens")
    return {
        "concurrency": key[0],
        "wall_s": ended - started,
        "output_tokens": work.output_tokens * len(prompts),
        "gaps_s": gaps,
        "restored_prompts": num_restored,
        "cached": cached_by_source(before, await session.counters()),
    }


async def _ask_again(
    session: MeasuredEngine, seen: Sequence[list[int]], is_over: asyncio.Event
) -> int:
    """How many stored prompts were answered before the wave was over."""
    for number, prompt in enumerate(seen):
        if is_over.is_set():
            return number
        await session.answer(prompt, 1)
    return len(seen)


def steady_gaps_s(answers: Sequence[Answer]) -> list[float]:
    """Gaps between tokens while all requests of a wave decode: no prompt of theirs is computed."""
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    gaps = []
    for answer in answers:
        for i in range(1, len(answer.arrivals)):
            if begin <= answer.arrivals[i - 1] and answer.arrivals[i] <= end:
                gap = (answer.arrivals[i] - answer.arrivals[i - 1]) / answer.counts[i]
                gaps += [gap] * answer.counts[i]
    return gaps

"""The workloads by name, as the process of an engine runs them."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from vllm_hicache.benchmarks.answers import MeasuredEngine, cached_by_source
from vllm_hicache.benchmarks.conversations import Conversations
from vllm_hicache.benchmarks.multiturn_clients import hold_conversations
from vllm_hicache.benchmarks.trace_clients import replay
from vllm_hicache.benchmarks.trace_file import TracePrompts, TraceRequest
from vllm_hicache.benchmarks.wave_clients import run_waves
from vllm_hicache.benchmarks.waves import Waves

Workload = Callable[[MeasuredEngine, dict[str, Any]], Awaitable[dict[str, Any]]]


async def multiturn(session: MeasuredEngine, work: dict[str, Any]) -> dict[str, Any]:
    """All conversations once; the warm-up leaves nothing on the device."""
    conversations = Conversations(**work["conversations"])
    concurrency = work["concurrency"]
    await hold_conversations(session, conversations.warm_up(concurrency), concurrency)
    await session.drop_device()
    before = await session.counters()
    started = time.perf_counter()
    turns = await hold_conversations(session, conversations, concurrency)
    wall_s = time.perf_counter() - started
    after = await session.counters()
    return {
        "wall_s": wall_s,
        "cached": cached_by_source(before, after),
        "counters": grown(before, after),
        "answers": [asdict(turn) for turn in turns],
    }


async def trace(session: MeasuredEngine, work: dict[str, Any]) -> dict[str, Any]:
    """All requests once, after a few that share nothing with them."""
    requests = [_request(row) for row in work["requests"]]
    prompts = TracePrompts(**work["prompts"])
    for number in range(work["warm_up"]):
        length = requests[number % len(requests)].input_tokens
        await session.answer([(number + i) % prompts.vocab_size for i in range(length)], 8)
    await session.drop_device()
    before = await session.counters()
    started = time.perf_counter()
    answers = await replay(session, requests, prompts)
    wall_s = time.perf_counter() - started
    after = await session.counters()
    return {
        "wall_s": wall_s,
        "cached": cached_by_source(before, after),
        "counters": grown(before, after),
        "answers": [asdict(answer) for answer in answers],
    }


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the connector counted in between: where tokens came from, and why others did not."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith("vllm:hicache_") and value != before.get(name, 0.0)
    }


def _request(row: list[Any]) -> TraceRequest:
    arrival_s, input_tokens, output_tokens, block_ids = row
    return TraceRequest(arrival_s, input_tokens, output_tokens, tuple(block_ids))


async def interference(session: MeasuredEngine, work: dict[str, Any]) -> dict[str, Any]:
    """All waves."""
    waves = Waves(**{**work, "concurrencies": tuple(work["concurrencies"])})
    before = await session.counters()
    found = await run_waves(session, waves)
    return {"waves": found, "counters": grown(before, await session.counters())}


WORKLOADS: dict[str, Workload] = {
    "multiturn": multiturn,
    "trace": trace,
    "interference": interference,
}

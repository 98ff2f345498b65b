"""The clients of the multi-turn benchmark: a closed loop over conversations, in one engine."""

import asyncio
import time
from dataclasses import dataclass

from vllm_hicache.benchmarks.answers import AnsweringEngine
from vllm_hicache.benchmarks.conversations import Conversation, Conversations


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn; times in seconds, ``started_s`` since the first turn of all."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    started_s: float
    ttft_s: float
    end_s: float
    gaps_s: list[float]


async def hold_conversations(
    engine: AnsweringEngine, work: Conversations, concurrency: int
) -> list[Turn]:
    """All turns of all conversations, at most ``concurrency`` at once, each conversation in order.

    The next turn of a conversation queues behind all that wait already, without time to think.
    """
    systems = [work.system_prompt(group) for group in range(work.groups)]
    ready: asyncio.Queue[Conversation | None] = asyncio.Queue()
    for number in range(work.num_conversations):
        ready.put_nowait(Conversation(number, systems[work.group_of(number)]))
    num_clients = min(concurrency, work.num_conversations)
    num_turns = work.num_conversations * work.turns
    turns: list[Turn] = []
    started = time.perf_counter()

    async def client() -> None:
        while (talk := await ready.get()) is not None:
            turns.append(await _hold_turn(engine, work, talk, started))
            if talk.turn < work.turns:
                ready.put_nowait(talk)
            if len(turns) == num_turns:
                for _ in range(num_clients):
                    ready.put_nowait(None)

    async with asyncio.TaskGroup() as clients:
        for _ in range(num_clients):
            clients.create_task(client())
    return turns


async def _hold_turn(
    engine: AnsweringEngine, work: Conversations, talk: Conversation, started: float
) -> Turn:
    prompt = talk.ask(work.message(talk.number, talk.turn))
    answer = await engine.answer(prompt, work.answer_tokens)
    talk.hear(answer.token_ids)
    return Turn(
        conversation=talk.number,
        turn=talk.turn - 1,
        prompt_tokens=len(prompt),
        cached_tokens=answer.num_cached,
        started_s=answer.submitted - started,
        ttft_s=answer.ttft_s,
        end_s=answer.arrivals[-1] - started,
        gaps_s=answer.gaps_s(),
    )

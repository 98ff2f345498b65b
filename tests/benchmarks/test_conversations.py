"""The multi-turn workload: equal for all arms, shared where it should be, in order."""

import asyncio
from dataclasses import replace

import pytest

from vllm_hicache.benchmarks.answers import Answer, RunFailed
from vllm_hicache.benchmarks.arm_process import first_cause
from vllm_hicache.benchmarks.conversations import Conversation, Conversations
from vllm_hicache.benchmarks.multiturn_clients import hold_conversations

WORK = Conversations(
    groups=2,
    per_group=3,
    turns=4,
    system_tokens=40,
    user_tokens=7,
    answer_tokens=5,
    vocab_size=1000,
    seed=3,
)


class EchoEngine:
    """Answers after some turns of the event loop, with tokens that follow from the prompt."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.running = self.most_running = 0

    async def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        self.prompts.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(1 + prompt[-1] % 5):
            await asyncio.sleep(0)
        self.running -= 1
        tokens = tuple(sum(prompt) + i for i in range(num_tokens))
        return Answer(0.0, (1.0, 2.0), (1, num_tokens - 1), tokens, num_cached=0)


def _hold(work, concurrency):
    engine = EchoEngine()
    turns = asyncio.run(hold_conversations(engine, work, concurrency))
    return engine, turns


def test_equal_seeds_give_equal_prompts_and_other_seeds_others():
    assert WORK.system_prompt(1) == replace(WORK).system_prompt(1)
    assert WORK.message(4, 2) == replace(WORK).message(4, 2)
    other = replace(WORK, seed=4)
    assert WORK.system_prompt(1) != other.system_prompt(1)
    assert WORK.message(4, 2) != other.message(4, 2)


def test_messages_differ_between_turns_and_conversations():
    messages = {tuple(WORK.message(talk, turn)) for talk in range(6) for turn in range(4)}
    assert len(messages) == 24
    assert all(0 <= token < WORK.vocab_size for message in messages for token in message)


def test_a_group_shares_its_system_prompt_and_nothing_more():
    _, turns = _hold(WORK, 6)
    assert len(turns) == 24
    engine, _ = _hold(replace(WORK, turns=1), 6)
    shared = [tuple(prompt[: WORK.system_tokens]) for prompt in engine.prompts]
    assert sorted(shared.count(prefix) for prefix in set(shared)) == [3, 3]
    rest = {tuple(prompt[WORK.system_tokens :]) for prompt in engine.prompts}
    assert len(rest) == 6


def test_a_prompt_is_the_whole_conversation_so_far():
    talk = Conversation(0, [1, 2])
    assert talk.ask([3]) == [1, 2, 3]
    talk.hear((4, 5))
    assert talk.ask([6]) == [1, 2, 3, 4, 5, 6]
    assert talk.turn == 1


@pytest.mark.parametrize("concurrency", [1, 2, 100])
def test_every_turn_is_held_once_and_in_order(concurrency):
    engine, turns = _hold(WORK, concurrency)
    by_talk = {number: [t.turn for t in turns if t.conversation == number] for number in range(6)}
    assert by_talk == {number: [0, 1, 2, 3] for number in range(6)}
    assert engine.most_running == min(concurrency, 6)
    assert sum(turn.prompt_tokens for turn in turns) == WORK.prompt_tokens


def test_sizes_are_those_of_the_prompts():
    engine, _ = _hold(WORK, 2)
    assert max(map(len, engine.prompts)) + WORK.answer_tokens == WORK.longest_tokens
    # What differs: the history of a conversation's last turn holds all of its earlier ones.
    own = 6 * (WORK.longest_tokens - WORK.system_tokens)
    assert WORK.distinct_tokens == 2 * WORK.system_tokens + own


def test_a_failed_answer_ends_the_run():
    class Failing(EchoEngine):
        async def answer(self, prompt, num_tokens):
            if len(self.prompts) == 5:
                raise RunFailed("no more")
            return await super().answer(prompt, num_tokens)

    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(asyncio.wait_for(hold_conversations(Failing(), WORK, 3), 10))
    assert str(first_cause(failed.value)) == "no more"


def test_the_warm_up_shares_no_prefix_with_the_conversations():
    warm, engine = EchoEngine(), EchoEngine()
    asyncio.run(hold_conversations(warm, WORK.warm_up(3), 3))
    asyncio.run(hold_conversations(engine, WORK, 3))
    assert len(warm.prompts) == 3
    starts = {tuple(prompt[:8]) for prompt in engine.prompts}
    assert not starts & {tuple(prompt[:8]) for prompt in warm.prompts}


def test_gaps_share_the_time_of_tokens_that_came_together():
    answer = Answer(1.0, (3.0, 4.0, 7.0), (1, 1, 3), (1, 2, 3, 4, 5), num_cached=0)
    assert answer.ttft_s == 2.0
    assert answer.gaps_s() == [1.0, 1.0, 1.0, 1.0]

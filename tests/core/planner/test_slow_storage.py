"""A timing model: a storage of 100 MB/s and 20 ms for each operation slows nobody down.

One engine computes 10,000 tokens a second, one prompt after the other; every prompt is in storage.
Reading a page takes longer than computing it, so the best that can be done is to compute.
"""

from collections import deque

import pytest
from planner_rig import Rig

from vllm_hicache.planner import ASK_AGAIN
from vllm_hicache.storage_messages import (
    Cancel,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    unpack_hashes,
)

PAGE, BLOCK = 256, 16
PAGE_BYTES = 32 << 20
TOKENS_PER_S = 10_000
TICK_S = 0.01
NUM_REQUESTS = 48


class _Storage:
    """Answers the planner's messages in time: operations wait in one line."""

    def __init__(self, rig: Rig, bytes_per_s: float, operation_s: float) -> None:
        self.rig = rig
        self.page_s = PAGE_BYTES / bytes_per_s
        self.operation_s = operation_s
        self.questions: deque[tuple[float, Exists]] = deque()
        self.reads: dict[int, list[int]] = {}
        self.next_at = 0.0
        self.num_seen = 0

    def tick(self) -> None:
        now = self.rig.now
        self._read_messages(now)
        while self.questions and self.questions[0][0] <= now:
            _, question = self.questions.popleft()
            num_pages = len(unpack_hashes(question.hashes))
            self.say(ExistsResult(question.op, num_pages, ok=True))
        self._read_messages(now)
        while self.reads and self.next_at <= now:
            op, (done, wanted) = next(iter(self.reads.items()))
            self.next_at += self.operation_s + self.page_s
            self._arrive(op, done + 1, wanted)

    def say(self, *events: object) -> None:
        """Without an audit: thousands of pages would be looked at in every tick."""
        self.rig.channels.inbox += [(0, event) for event in events]
        self.rig.planner.settle_storage(self.rig.now)

    def _arrive(self, op: int, done: int, wanted: int) -> None:
        self.reads[op][0] = done
        if done < wanted:
            self.say(FetchProgress(op, done))
        else:
            del self.reads[op]
            self.say(FetchSettled(op, done, "complete"), FetchReleased(op))

    def _read_messages(self, now: float) -> None:
        sent = self.rig.channels.sent[0]
        for message in sent[self.num_seen :]:
            if isinstance(message, Exists):
                self.questions.append((now + self.operation_s, message))
            elif isinstance(message, Fetch):
                if not self.reads:
                    self.next_at = now + self.operation_s + self.page_s
                self.reads[message.op] = [0, len(unpack_hashes(message.hashes))]
            elif isinstance(message, Cancel) and message.op in self.reads:
                done, _ = self.reads.pop(message.op)
                self.say(FetchSettled(message.op, done, "cancelled"))
                self.say(FetchReleased(message.op))
        self.num_seen = len(sent)


def _mean_ttft(
    num_tokens: int,
    concurrency: int,
    bytes_per_s: float,
    operation_s: float,
    *,
    skip_slow_loads: bool = True,
) -> float:
    """Mean time to first token in units of an engine without connector, over several rounds."""
    rig = Rig(
        page=PAGE,
        block=BLOCK,
        num_slots=4096,
        has_storage=True,
        page_bytes=(PAGE_BYTES,),
        skip_slow_loads=skip_slow_loads,
        fetch={"base_s": 1.0, "per_1k_tokens_s": 0.25, "min_tokens": 256},
    )
    for _ in range(8):
        rig.planner.costs.prefilled(1000, 1000 / TOKENS_PER_S)
    storage = _Storage(rig, bytes_per_s, operation_s)
    compute_s = num_tokens / TOKENS_PER_S
    num_rounds = NUM_REQUESTS // concurrency
    spent = 0.0
    for number in range(num_rounds):
        begun = rig.now
        waiting = [
            rig.request(f"{number}-{i}", [number, i] + [7] * (num_tokens - 2))
            for i in range(concurrency)
        ]
        free_at = rig.now
        while waiting:
            storage.tick()
            for state in list(waiting) if free_at <= rig.now else ():
                match = rig.match(state)
                if match == ASK_AGAIN:
                    continue
                rig.planner.admit(state)
                rig.planner.finish(state, rig.now)
                waiting.remove(state)
                free_at = rig.now + (num_tokens - match.num_tokens) / TOKENS_PER_S
                spent += free_at - begun
                rig.planner.costs.prefilled(num_tokens, compute_s)
                break
            rig.planner.plan_step(is_busy=True, now=rig.now)
            rig.now += TICK_S
        rig.now = max(rig.now, free_at)
    ideal = num_rounds * compute_s * concurrency * (concurrency + 1) / 2
    rig.audit()
    return spent / ideal


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("num_tokens", [1024, 8192, 32768])
def test_a_slow_storage_costs_at_most_a_tenth_of_the_time_to_first_token(num_tokens, concurrency):
    assert _mean_ttft(num_tokens, concurrency, 100e6, 0.02) <= 1.1


def test_without_the_prediction_it_costs_much_more():
    assert _mean_ttft(8192, 1, 100e6, 0.02, skip_slow_loads=False) > 1.5


@pytest.mark.parametrize("num_tokens", [8192, 32768])
def test_a_fast_storage_saves_most_of_the_time(num_tokens):
    assert _mean_ttft(num_tokens, 1, 10e9, 0.0005) <= 0.5

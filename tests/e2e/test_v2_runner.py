"""vLLM's V2 model runner, on a CPU: cold, host and file answers are the same, and so is V1's.

One child has two engines of the V2 runner, one after the other, on one folder: the first loads
synchronously, the second asynchronously. Then an engine of the V1 runner reads what they wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from child_process import run_child
from engine_in_process import (
    BLOCK,
    HEADER_BYTES,
    PAGE,
    Answer,
    assert_same,
    restored_hit,
)
from model_results import note_restored
from tiny_latent_experts import write_latent_experts
from v2_runner import RUNNER, run_v2_child
from watched_restore import ANSWER, NUM_REPEATED, NUM_SAID, TURN_TOKENS

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
"""Between log-probabilities of other chunks or another runner."""
LENGTHS = (PAGE - 1, PAGE, PAGE + 1, 600)
TURN = TURN_TOKENS + NUM_REPEATED
ASKED = (*LENGTHS, TURN)
SYNC, ASYNC = {"sync_load_max_ms": 10_000}, {"sync_load_max_ms": 0}
LIVES = (
    {"extra": SYNC, "phases": ["cold", "reset:host"]},
    {"extra": ASYNC, "phases": ["file", "reset:host again"]},
)
V1_LIFE = {"extra": ASYNC, "phases": ["file of V2"]}


def llama(model: Path) -> Path:
    return model


def latent(model: Path) -> Path:
    return write_latent_experts(model.parent / "latent-experts", model)


def ngrams(model: Path) -> dict[str, object]:
    return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, vLLM's options, and what is known of both."""

    family: str
    """As README calls it."""
    write: Callable[[Path], Path]
    """From the folder of the tiny Llama, that of the model."""
    shards_per_page: int
    options: Mapping[str, object] = field(default_factory=dict)
    speculation: Callable[[Path], dict[str, object]] | None = None
    """From the folder of the tiny Llama, what vLLM is to speculate with."""
    block: int = BLOCK
    is_async: bool = False
    has_one_kernel: bool = True
    """vLLM answers behind a known prefix as it does when cold."""


CHUNKS = {"max_num_batched_tokens": 256}
LLAMA = "Llama (GQA)"
KINDS = {
    "llama": Kind(LLAMA, llama, 2, CHUNKS),
    "llama-async": Kind(LLAMA, llama, 2, CHUNKS, is_async=True),
    "llama-ngrams": Kind(LLAMA, llama, 2, CHUNKS, ngrams),
    "llama-ngrams-async": Kind(LLAMA, llama, 2, CHUNKS, ngrams, is_async=True),
    "latent": Kind("DeepSeek-V3", latent, 1, block=16, has_one_kernel=False),
}


@dataclass(frozen=True, slots=True)
class Phase:
    """What was asked once, what it cost, and what lay in the device blocks of each request."""

    answers: list[Answer]
    blocks: list[list[dict[str, str]]]
    counters: Mapping[str, float]
    published: Mapping[str, float]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Phase":
        answers = [Answer(tuple(t), tuple(p), cached) for t, p, cached in record["answers"]]
        return cls(answers, record["blocks"], record["counters"], record["published"])

    @property
    def served(self) -> tuple[float, float]:
        return self.counters["served_tokens/host"], self.counters["served_tokens/storage"]


@dataclass(frozen=True, slots=True)
class Run:
    kind: Kind
    lives: list[dict[str, Any]]
    phases: Mapping[str, Phase]

    @property
    def v2_lives(self) -> list[dict[str, Any]]:
        return self.lives[:2]

    @property
    def hits(self) -> list[int]:
        return [restored_hit(length, PAGE, self.kind.block) for length in ASKED]

    @property
    def restored(self) -> Mapping[str, Phase]:
        return {name: phase for name, phase in self.phases.items() if name != "cold"}


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest,
    tiny_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder, kind = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    model, options = tiny_llama(), {**kind.options, "block_size": kind.block}
    if kind.speculation is not None:
        options["speculative_config"] = kind.speculation(model)
    specification = {
        "model": str(kind.write(model)),
        "storage": {"url": f"file://{folder}/store"},
        "options": options,
        "lengths": LENGTHS,
    }
    child = {**specification, "lives": LIVES, "is_async": kind.is_async}
    lives = run_v2_child(child, folder)
    v1 = {**specification, **V1_LIFE, "said": lives[0]["said"]}
    lives.append(run_child("watched_restore", v1, folder))
    phases = {phase["name"]: Phase.of(phase) for life in lives for phase in life["phases"]}
    return Run(kind, lives, phases)


def test_the_v2_runner_runs_and_batches_overlap_where_they_should(run: Run) -> None:
    assert [life["runner"] for life in run.v2_lives] == [RUNNER] * 2
    assert run.lives[2]["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert [life["most_batches"] for life in run.v2_lives] == [1 + run.kind.is_async] * 2


BEFORE = "preemptions > bind"
V2_END = "save > results > report > clear"
V2_HOOKS = {
    f"{BEFORE} > load > forward > end of forward > {V2_END}",
    f"{BEFORE} > forward > end of forward > load > {V2_END}",
    f"{BEFORE} > end of forward > load > {V2_END}",
}
V1_HOOKS = {
    f"{BEFORE} > forward > load > save > results > report > clear",
    f"{BEFORE} > load > save > results > report > clear",
}
V1_SPECULATING_HOOKS = {
    f"{BEFORE} > forward > load > results > report > save > clear",
    f"{BEFORE} > load > save > results > report > clear",
}


def test_the_hooks_came_in_the_orders_that_unit_tests_assume(run: Run) -> None:
    v1 = V1_SPECULATING_HOOKS if run.kind.speculation else V1_HOOKS
    assert {order for life in run.v2_lives for order in life["hooks"]} == V2_HOOKS
    assert set(run.lives[2]["hooks"]) == v1


def test_restored_answers_are_equal_and_those_of_both_runners(run: Run) -> None:
    host = run.phases["host"].answers
    for name in ("file", "host again"):
        assert_same(run.phases[name].answers, host)
    assert_same(run.phases["file of V2"].answers, host, TOLERANCE)


def test_restored_answers_equal_cold_ones(run: Run) -> None:
    *short, long = run.phases["cold"].answers
    assert len(long.tokens) == NUM_SAID
    end = NUM_REPEATED * len(long.logprobs) // NUM_SAID
    cold = [*short, Answer(long.tokens[NUM_REPEATED:], long.logprobs[end:], 0)]
    # One token below a page nothing is restored, and vLLM's own cache has no say in it.
    alike = range(len(ASKED)) if run.kind.has_one_kernel else [0]
    for phase in run.restored.values():
        assert_same([phase.answers[i] for i in alike], [cold[i] for i in alike], TOLERANCE)


def test_device_blocks_hold_what_was_computed_cold_byte_for_byte(run: Run) -> None:
    cold = run.phases["cold"].blocks
    for phase in run.restored.values():
        for hit, computed, restored in zip(run.hits, cold, phase.blocks, strict=True):
            assert_held(computed, restored, hit // run.kind.block)
    total, drafter = sum(run.hits), "n-grams" if run.kind.speculation else ""
    for name, phase in run.restored.items():
        assert sum(phase.served) == total, name
    note_restored(run.kind.family, runner="V2", drafter=drafter)
    note_restored(run.kind.family, ["file"], drafter=drafter)


def assert_held(
    computed: Sequence[Mapping[str, str]], restored: Sequence[Mapping[str, str]], num_blocks: int
) -> None:
    """Of the first blocks, those that both requests still had are the same in every group."""
    both = [
        (group[place], other[place])
        for group, other in zip(computed, restored, strict=True)
        for place in map(str, range(num_blocks))
        if place in group and place in other
    ]
    assert len(both) >= num_blocks
    assert [one for one, _ in both] == [other for _, other in both]


def test_tokens_came_from_each_tier_by_our_count_and_by_vllms(run: Run) -> None:
    total, source = sum(run.hits), "vllm:prompt_tokens_cached_by_source{{source={}}}".format
    tiers = {"host": (total, 0), "host again": (total, 0), "cold": (0, 0)}
    for name, phase in run.phases.items():
        expected = tiers.get(name, (0, total))
        assert phase.served == expected, name
        assert [answer.cached for answer in phase.answers] == (
            [0] * len(ASKED) if name == "cold" else run.hits
        )
        counted = phase.published
        assert (counted[source("host")], counted[source("disk")]) == expected, name
        assert counted["vllm:external_prefix_cache_hits"] == sum(expected), name


def test_bytes_of_files_are_those_of_the_pages(run: Run) -> None:
    page_bytes = run.lives[0]["page_bytes"]
    pages = sum(length // PAGE for length in ASKED)
    for name, phase in run.phases.items():
        fetched = pages if name.startswith("file") else 0
        counters = phase.counters
        assert counters["fetched_bytes"] == fetched * page_bytes, name
        headers = fetched * run.kind.shards_per_page * HEADER_BYTES
        assert counters["bytes_read"] == fetched * page_bytes + headers, name
    written = run.lives[0]["counters"]
    # Pages that answers filled are stored, too; the last token of an answer has no KV.
    told = [*(length + ANSWER for length in LENGTHS), TURN_TOKENS + NUM_SAID]
    stored = sum((length - 1) // PAGE for length in told)
    assert written["persisted_bytes"] == stored * page_bytes
    assert written["objects_written"] == stored * run.kind.shards_per_page


def test_loads_were_synchronous_and_asynchronous_as_told(run: Run) -> None:
    total = sum(run.hits) * run.lives[0]["page_bytes"] // PAGE
    for name, phase in run.restored.items():
        loaded = [phase.counters[f"loaded_bytes/{mode}"] for mode in ("sync", "async")]
        assert loaded == ([total, 0] if name == "host" else [0, total]), name


def test_drafts_were_made_where_they_should(run: Run) -> None:
    speculates = run.kind.speculation is not None
    for life in run.lives:
        assert (life["drafts"]["draft_tokens"] > 0) == speculates


def test_nothing_is_left_of_any_request(run: Run) -> None:
    assert [life["problems"] for life in run.lives] == [[], [], []]

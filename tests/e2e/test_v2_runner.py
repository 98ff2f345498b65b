"""vLLM's V2 model runner, on a CPU: cold, host and file answers are the same, and so is V1's.

One child has two engines of the V2 runner, one after the other, on one folder: the first loads
synchronously, the second asynchronously. Then an engine of the V1 runner reads what they wrote.
"""

from collections import Counter
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
from tiny_drafters import write_eagle
from tiny_hybrids import write_hybrid
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
UNDRAFTED = "cold without drafter"


def llama(model: Path) -> Path:
    return model


def latent(model: Path) -> Path:
    return write_latent_experts(model.parent / "latent-experts", model)


def gemma3(model: Path) -> Path:
    return write_hybrid("gemma3", model.parent / "gemma3", model)


def gptoss(model: Path) -> Path:
    return write_hybrid("gptoss", model.parent / "gptoss", model)


def ngrams(model: Path) -> dict[str, object]:
    return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def draft_model(model: Path) -> dict[str, object]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}


def eagle(model: Path) -> dict[str, object]:
    folder = model.parent / f"eagle-of-{model.name}"
    head = folder if folder.exists() else write_eagle(folder, model)
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, vLLM's options, and what is known of both."""

    family: str
    """As README calls it."""
    write: Callable[[Path], Path]
    """From the folder of the tiny Llama, that of the model."""
    pools: Mapping[str, int]
    """Those of its pages, and the objects of each."""
    options: Mapping[str, object] = field(default_factory=dict)
    speculation: Callable[[Path], dict[str, object]] | None = None
    """From the folder of a tiny Llama, what vLLM is to speculate with."""
    draft_sizes: Mapping[str, int] = field(default_factory=dict)
    """Of that Llama, if it is another one."""
    drafter: str = ""
    """As the table of models calls it."""
    dropped: int = 0
    """Tokens at the end of a hit that this drafter needs computed again."""
    acceptance: float = 0.0
    """The least part of what is proposed that is to be accepted, in every phase."""
    is_refused_on_v1: bool = False
    """Asked there without drafter, cold, instead of reading what V2 wrote."""
    block: int = BLOCK
    is_async: bool = False
    has_one_kernel: bool = True
    """vLLM answers behind a known prefix as it does when cold."""

    @property
    def has_windows(self) -> bool:
        return "window-64" in self.pools

    @property
    def has_draft_state(self) -> bool:
        return "draft" in self.pools

    @property
    def shards_per_page(self) -> int:
        return sum(self.pools.values())

    def restored(self, num_tokens: int) -> int:
        return max(0, restored_hit(num_tokens, PAGE, self.block) - self.dropped)


CHUNKS = {"max_num_batched_tokens": 256}
LATENT_KERNEL = {"attention_backend": "CPU_MLA"}  # the other one, for AMX, has no float32
LLAMA = "Llama (GQA)"
FULL = {"full": 2}
WINDOWS = FULL | {"window-64": 2}
DRAFT = {"draft": 2}
NGRAMS = {"speculation": ngrams, "drafter": "n-grams"}
DRAFT_MODEL = {"speculation": draft_model, "drafter": "draft_model"}
EAGLE = {"speculation": eagle, "drafter": "eagle", "dropped": BLOCK}
KINDS = {
    "llama": Kind(LLAMA, llama, FULL, CHUNKS),
    "llama-async": Kind(LLAMA, llama, FULL, CHUNKS, is_async=True),
    "llama-ngrams": Kind(LLAMA, llama, FULL, CHUNKS, **NGRAMS),
    "llama-ngrams-async": Kind(LLAMA, llama, FULL, CHUNKS, **NGRAMS, is_async=True),
    "llama-draft-model": Kind(LLAMA, llama, FULL | DRAFT, CHUNKS, **DRAFT_MODEL, acceptance=0.8),
    "llama-eagle": Kind(LLAMA, llama, FULL | DRAFT, CHUNKS, **EAGLE),
    "latent": Kind(
        *("DeepSeek-V3", latent, {"latent": 1}, LATENT_KERNEL), block=16, has_one_kernel=False
    ),
    "gptoss": Kind("GPT-OSS", gptoss, WINDOWS, CHUNKS),
    # The draft layers are beside full attention, which is not group 0.
    "gemma3-draft-model": Kind(
        *("Gemma 3", gemma3, WINDOWS | DRAFT, CHUNKS),
        **DRAFT_MODEL,
        draft_sizes={"vocab_size": 256, "num_layers": 1, "seed": 1},
        is_refused_on_v1=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Phase:
    """What was asked once, what it cost, and what lay in the device blocks of each request."""

    answers: list[Answer]
    blocks: list[list[dict[str, str]]]
    counters: Mapping[str, float]
    published: Mapping[str, float]
    drafts: Mapping[str, float]
    proposed: list[list[int]]
    """Ids, step by step; those of the last request are left out."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Phase":
        answers = [Answer(tuple(t), tuple(p), cached) for t, p, cached in record["answers"]]
        counts = (record[key] for key in ("counters", "published", "drafts", "proposed"))
        return cls(answers, record["blocks"], *counts)

    @property
    def served(self) -> tuple[float, float]:
        return self.counters["served_tokens/host"], self.counters["served_tokens/storage"]


@dataclass(frozen=True, slots=True)
class Run:
    kind: Kind
    lives: list[dict[str, Any]]
    phases: Mapping[str, Phase]
    store: Path
    undrafted: Phase | None
    """What V1 says that must refuse the drafter."""

    @property
    def v2_lives(self) -> list[dict[str, Any]]:
        return self.lives[:2]

    @property
    def v1(self) -> dict[str, Any]:
        return self.lives[2]

    @property
    def hits(self) -> list[int]:
        return [self.kind.restored(length) for length in ASKED]

    @property
    def v2_restored(self) -> Mapping[str, Phase]:
        """V1's are left out."""
        return {name: phase for name, phase in self.restored.items() if name != "file of V2"}

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
        options["speculative_config"] = kind.speculation(tiny_llama(**kind.draft_sizes))
    specification = {
        "model": str(kind.write(model)),
        "storage": {"url": f"file://{folder}/store"},
        "options": options,
        "lengths": LENGTHS,
    }
    child = {**specification, "lives": LIVES, "is_async": kind.is_async}
    lives = run_v2_child(child, folder)
    v1 = {**specification, **V1_LIFE, "said": lives[0]["said"]}
    if kind.is_refused_on_v1:
        options["speculative_config"] = None
        v1 |= {"phases": [UNDRAFTED], "storage": {"url": f"file://{folder}/other"}, "said": ()}
    lives.append(run_child("watched_restore", v1, folder))
    phases = {phase["name"]: Phase.of(phase) for life in lives for phase in life["phases"]}
    undrafted = phases.pop(UNDRAFTED, None)
    return Run(kind, lives, phases, folder / "store", undrafted)


def test_the_v2_runner_runs_and_batches_overlap_where_they_should(run: Run) -> None:
    assert [life["runner"] for life in run.v2_lives] == [RUNNER] * 2
    assert run.v1["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert [life["most_batches"] for life in run.v2_lives] == [1 + run.kind.is_async] * 2


BEFORE = "preemptions > bind"
V2_END = "save > results > report > clear"


def v2_hooks(kind: Kind) -> set[str]:
    """A drafter's layers have a forward of their own, before anything is saved."""
    end = "end of forward > forward" if kind.has_draft_state else "end of forward"
    orders = {
        f"{BEFORE} > forward > {end} > load > {V2_END}",
        f"{BEFORE} > end of forward > load > {V2_END}",
    }
    if kind.has_windows or kind.is_async:
        return orders
    return orders | {f"{BEFORE} > load > forward > {end} > {V2_END}"}


def v1_hooks(kind: Kind) -> set[str]:
    """It reports before it drafts, and ends the step after that."""
    end = "save > results > report > clear"
    ends = {
        "": end,
        "n-grams": "results > report > save > clear",
        "draft_model": "results > report > forward > save > clear",
        "eagle": "results > report > forward > save > clear",
    }
    speculates = not kind.is_refused_on_v1
    return {
        f"{BEFORE} > forward > load > {ends[kind.drafter if speculates else '']}",
        f"{BEFORE} > load > {end}",
    }


def test_the_hooks_came_in_the_orders_that_unit_tests_assume(run: Run) -> None:
    assert {order for life in run.v2_lives for order in life["hooks"]} == v2_hooks(run.kind)
    assert set(run.v1["hooks"]) == v1_hooks(run.kind)


def test_restored_answers_are_equal_and_those_of_both_runners(run: Run) -> None:
    host = run.phases["host"].answers
    for name in ("file", "host again"):
        assert_same(run.phases[name].answers, host)
    if run.undrafted is None:
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


def test_a_drafter_that_v1_must_refuse_leaves_the_answers_alone(run: Run) -> None:
    assert (run.undrafted is not None) == run.kind.is_refused_on_v1
    if run.undrafted is not None:
        assert_same(run.phases["cold"].answers, run.undrafted.answers, TOLERANCE)


def test_device_blocks_hold_what_was_computed_cold_byte_for_byte(run: Run) -> None:
    cold = run.phases["cold"].blocks
    for phase in run.restored.values():
        for hit, computed, restored in zip(run.hits, cold, phase.blocks, strict=True):
            assert_held(computed, restored, hit // run.kind.block)
    total, drafter = sum(run.hits), run.kind.drafter
    for name, phase in run.restored.items():
        assert sum(phase.served) == total, name
    note_restored(run.kind.family, runner="V2", drafter=drafter)
    if run.undrafted is None:
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
    assert all(set(group) & set(other) for group, other in zip(computed, restored, strict=True))
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


def test_pages_have_every_pool_and_their_objects_are_told_apart_by_name(run: Run) -> None:
    pools = run.lives[0]["pools"]
    assert {name: pool["objects"] for name, pool in pools.items()} == run.kind.pools
    assert sum(pool["page_bytes"] for pool in pools.values()) == run.lives[0]["page_bytes"]
    for life in run.lives if run.undrafted is None else run.v2_lives:
        assert life["pools"] == pools
    digests = [pool["digest"] for pool in pools.values()]
    assert len(set(digests)) == len(digests)
    pages = run.lives[0]["counters"]["objects_written"] // run.kind.shards_per_page
    found = Counter(file.name.partition("_P")[2] for file in run.store.rglob("*_H[01]*"))
    assert found == {pool["digest"]: pages * pool["objects"] for pool in pools.values()}


def test_loads_were_synchronous_and_asynchronous_as_told(run: Run) -> None:
    """With several KV cache groups, or batches in flight, none is synchronous, whatever is told."""
    total = sum(
        loaded_tokens(hit, pool["reach"]) * pool["page_bytes"] // PAGE
        for hit in run.hits
        for pool in run.lives[0]["pools"].values()
    )
    sync = "" if run.kind.has_windows or run.kind.is_async else "host"
    for name, phase in run.restored.items():
        loaded = [phase.counters[f"loaded_bytes/{mode}"] for mode in ("sync", "async")]
        assert loaded == ([total, 0] if name == sync else [0, total]), name


def loaded_tokens(hit: int, reach: int) -> int:
    """Of a pool: all, or the last window, which here is whole blocks."""
    return min(hit, reach) if reach else hit


def test_drafts_were_made_where_they_should(run: Run) -> None:
    speculates = run.kind.speculation is not None
    for name, phase in run.phases.items():
        made, accepted = phase.drafts["draft_tokens"], phase.drafts["accepted_tokens"]
        if run.kind.drafter != "n-grams":
            assert (made > 0) == speculates, name
        assert accepted >= run.kind.acceptance * made, name
    assert (sum(phase.drafts["draft_tokens"] for phase in run.phases.values()) > 0) == speculates


def test_a_restored_drafter_proposes_what_it_did_cold(run: Run) -> None:
    """With asynchronous scheduling nobody is told what was proposed."""
    cold = run.phases["cold"].proposed
    assert bool(cold) == (run.kind.speculation is not None and not run.kind.is_async)
    assert all(phase.proposed == cold for phase in run.v2_restored.values())


def test_nothing_is_left_of_any_request(run: Run) -> None:
    assert [life["problems"] for life in run.lives] == [[]] * len(run.lives)

"""Models with KV of several kinds: cold, device, host and file answers are the same, and a hit is
as long as every kind allows, where the device or the store has lost one of them.

Windows of 64 tokens are one page of two blocks; a state is known every 160 tokens, which is what
vLLM makes of blocks of 32 here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import restore_child
from child_process import run_child, workers
from engine_in_process import (
    PAGE,
    Answer,
    Engine,
    assert_same,
    difference,
    prompt_of,
    restored_hit,
    running,
)
from model_results import note_restored
from tiny_hybrids import write_hybrid

from vllm_hicache.hashing import PageHashChain, chain_root

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

COLD_TOLERANCE = 1e-4
BUDGET = 256
"""Tokens of a step; windows are shorter, so that most of a prompt leaves them while it is computed.
"""
LIVES = (
    {"extra": {"fixed_weights": True}, "phases": ["cold", "device", "reset:host", "drop:file"]},
)


@dataclass(frozen=True, slots=True)
class Model:
    """One model, the boundaries at which it can be restored, and what its numbers are worth."""

    name: str
    family: str
    """As README calls it."""
    page: int = PAGE
    unit: int = 32
    dtype: str = "float32"
    lengths: tuple[int, ...] = (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 300, 1025)
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether log-probabilities are comparable; in 16 bits an expert may be another."""
        return self.dtype == "float32"

    @property
    def engine_options(self) -> dict[str, object]:
        return {"dtype": self.dtype, "max_num_batched_tokens": BUDGET, **self.options}

    @property
    def extra(self) -> dict[str, object]:
        return {"fixed_weights": True, "page_size": self.page}

    def restored(self, num_tokens: int) -> int:
        return restored_hit(num_tokens, self.page, self.unit)

    def on_device(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.unit * self.unit


STATES = 160
"""With states in float32: the default, and with it vLLM's block, depends on the processor."""
MODELS = {
    model.name: model
    for model in (
        Model("mistralswa", "Mistral, windows"),
        Model("gemma3", "Gemma 3"),
        Model("gptoss", "GPT-OSS"),
        Model(
            "qwen3next",
            "Qwen3-Next",
            page=STATES,
            unit=STATES,
            dtype="bfloat16",
            lengths=(STATES - 1, STATES, STATES + 1, 2 * STATES, 500, 1025),
            options={"mamba_ssm_cache_dtype": "float32"},
        ),
    )
}
TOPOLOGIES = [
    pytest.param(
        *(name, tp, pp),
        id=f"{name}-tp{tp}-pp{pp}",
        marks=[] if (name, tp, pp) == ("gemma3", 1, 1) else [pytest.mark.full],
    )
    for name, tp, pp in [*((name, tp, 1) for name in MODELS for tp in (1, 2)), ("gemma3", 1, 2)]
]


@pytest.fixture(scope="module")
def folder_of(tiny_llama: Callable[..., Path]) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        llama = tiny_llama()
        return write_hybrid(name, llama.parent / name, llama)

    return write


def phases_of(
    model: Model, folder: Path, store: Path, tp: int = 1, pp: int = 1, **options: object
) -> tuple[dict[str, list[Answer]], dict[str, Mapping[str, float]], list[str]]:
    """Answers and counters of each phase of one engine, and what it left behind."""
    topology, env = workers(tp, pp) if tp * pp > 1 else ({}, {})
    specification = {
        "model": str(folder),
        "storage": str(store / "store"),
        "options": {**model.engine_options, **topology, **options},
        "lengths": model.lengths,
        "pair": (700, 900),
        "lives": [{**life, "extra": {**life["extra"], **model.extra}} for life in LIVES],
    }
    if topology:
        (life,) = run_child("restore_child", specification, store, env)
    else:
        (life,) = restore_child.answer(specification)
    answers = {
        phase["name"]: [
            Answer(tuple(tokens), tuple(logprobs), cached)
            for tokens, logprobs, cached in (*phase["answers"], *phase["pair"])
        ]
        for phase in life["phases"]
    }
    counters = {phase["name"]: phase["counters"] for phase in life["phases"]}
    return answers, counters, life["problems"]


def assert_all_tiers_agree(
    model: Model,
    answers: Mapping[str, list[Answer]],
    counters: Mapping[str, Mapping[str, float]],
) -> None:
    lengths = [*model.lengths, 700, 900]
    hits = [model.restored(n) for n in lengths]
    expected = {
        "cold": [0] * len(lengths),
        "device": [model.on_device(n) for n in lengths],
        "host": hits,
        "file": hits,
    }
    assert {name: [a.cached for a in given] for name, given in answers.items()} == expected
    served = {
        name: (told["served_tokens/host"], told["served_tokens/storage"])
        for name, told in counters.items()
    }
    total = sum(hits)
    assert served == {"cold": (0, 0), "device": (0, 0), "host": (total, 0), "file": (0, total)}
    for name in ("device", "host", "file"):
        if model.is_exact:
            assert_same(answers[name], answers["cold"], COLD_TOLERANCE)
        assert [a.tokens for a in answers[name]] == [a.tokens for a in answers["cold"]], name


@pytest.mark.parametrize(("name", "tp", "pp"), TOPOLOGIES)
def test_cold_device_host_and_file_answers_are_the_same(
    name: str, tp: int, pp: int, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = MODELS[name]
    answers, counters, problems = phases_of(model, folder_of(name), tmp_path, tp, pp)
    assert_all_tiers_agree(model, answers, counters)
    if model.is_exact:
        # A prompt below one page has nothing in host; host and file load the same rows.
        assert_same(answers["file"], answers["host"])
    assert problems == []
    note_restored(model.family, tp=tp, pp=pp)


@pytest.mark.full
def test_windows_that_vllm_keeps_whole_come_back_whole(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    answers, counters, problems = phases_of(
        MODELS["gemma3"], folder_of("gemma3"), tmp_path, disable_hybrid_kv_cache_manager=True
    )
    assert_all_tiers_agree(MODELS["gemma3"], answers, counters)
    assert problems == []


# The device lost one kind ------------------------------------------------------------------------


def blocks_on_device(engine: Engine, prompt: Any) -> list[list[int]]:
    """Blocks of a prompt in vLLM's own cache, by group, without those it has not kept."""
    request_id = engine.add("look", prompt)
    blocks, _, *_ = engine.scheduler.kv_cache_manager.get_computed_blocks(
        engine.scheduler.requests[request_id]
    )
    engine.abort([request_id])
    return [[block for block in group if block] for group in blocks.get_block_ids()]


def evict(engine: Engine, prompt: Any, group: int) -> None:
    """Drop all that vLLM's own cache has of a prompt in one group: a restored block is another
    beside the one that was computed."""
    while blocks := blocks_on_device(engine, prompt)[group]:
        engine.scheduler.kv_cache_manager.evict_blocks(set(blocks))


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3", "gptoss", "qwen3next"])
def test_what_the_device_lost_of_one_group_comes_from_host_with_the_rest(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """Full attention is the last group, windows and states are before it."""
    model, length = MODELS[name], 500
    prompt, hit = prompt_of("evicted", length), model.restored(length)
    extra = {"page_size": model.page}
    with running(folder_of(name), extra=extra, **model.engine_options) as engine:
        cold = engine.ask([prompt])
        engine.settle()
        groups = blocks_on_device(engine, prompt)
        assert len(groups) > 1
        assert all(groups)
        for lost in range(len(groups)):
            before = engine.counters()
            evict(engine, prompt, lost)
            assert not any(blocks_on_device(engine, prompt)), "vLLM still has a hit of all groups"
            found = engine.ask([prompt])
            assert [answer.tokens for answer in found] == [answer.tokens for answer in cold]
            if model.is_exact:
                assert_same(found, cold, COLD_TOLERANCE)
            assert [answer.cached for answer in found] == [hit]
            assert difference(engine.counters(), before)["served_tokens/host"] == hit
            engine.settle()
        engine.assert_idle_and_clean()


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3", "qwen3next"])
def test_pages_that_are_saved_by_their_second_user_get_windows_and_states_when_they_are_computed(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """The device has the window before its own hit, at 480, and no longer that of a page's end; a
    state is offered to those alone that compute it."""
    model, length = MODELS[name], 500
    prompt, hit = prompt_of("selective", length), model.restored(length)
    extra = {"page_size": model.page, "write_policy": "write_through_selective"}
    with running(folder_of(name), extra=extra, **model.engine_options) as engine:
        cold = engine.ask([prompt])
        engine.settle()
        assert engine.counters()["saved_tokens"] == 0
        found = engine.ask([prompt])
        engine.settle()
        assert engine.counters()["saved_tokens"] >= hit
        for _ in range(2):
            engine.reset_device()
            found += engine.ask([prompt])
            engine.settle()
        engine.assert_idle_and_clean()
    assert [answer.cached for answer in found] == [model.on_device(length), 0, hit]
    assert [answer.tokens for answer in found] == [answer.tokens for answer in cold] * 3


# The store lost one object -----------------------------------------------------------------------

NUM_PAGES = 5
TAIL = 10
"""Tokens of a prompt behind its last page."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Objects of one page that are deleted, and the hit that is left, in tokens."""

    page: int
    is_optional: bool
    """Those of windows or states, else those of the pool that every page has."""
    hit: int


ALL = NUM_PAGES * PAGE
LOSSES: dict[str, dict[str, Loss]] = {
    # The window before 320 begins in page 4, before 288 and 256 in page 3.
    "gemma3": {
        "the last window": Loss(4, True, 4 * PAGE),
        "the window before it": Loss(3, True, ALL),
        "the first window": Loss(0, True, ALL),
        "full attention": Loss(2, False, 2 * PAGE),
    },
    "gptoss": {
        "the last window": Loss(4, True, 4 * PAGE),
        "the first window": Loss(0, True, ALL),
        "full attention": Loss(2, False, 2 * PAGE),
    },
    "mistralswa": {
        "the last window": Loss(4, True, 4 * PAGE),
        "a window before it": Loss(2, True, ALL),
    },
    # Steps of 192 tokens: states at 192, 384 and 480.
    "qwen3next": {
        "the last state": Loss(4, True, 4 * STATES),
        "a state before it": Loss(3, True, NUM_PAGES * STATES),
        "full attention": Loss(2, False, 2 * STATES),
    },
}


def prompt_without(loss: str, model: Model) -> list[int]:
    return prompt_of(f"store without {loss}", NUM_PAGES * model.page + TAIL)


def delete(store: Path, model: Model, digests: Mapping[str, str], what: str, loss: Loss) -> int:
    """Delete the objects of one kind of one page; returns how many there were."""
    chain = PageHashChain(model.page, chain_root())
    chain.extend(prompt_without(what, model), NUM_PAGES * model.page)
    endings = {
        f"_P{digest}" if digest else "_H[01]"
        for pool, digest in digests.items()
        if (pool != "full") == loss.is_optional
    }
    page = chain.hashes[loss.page].hex()
    found = [file for ending in endings for file in store.rglob(f"{page}_*{ending}")]
    for file in found:
        file.unlink()
    return len(found)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "qwen3next" else [pytest.mark.full]) for n in MODELS]
)
def test_a_hit_is_as_long_as_what_the_store_has_of_every_kind_allows(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model, losses, store = MODELS[name], LOSSES[name], tmp_path / "store"
    options = dict(model.engine_options)
    if name == "qwen3next":  # a state at the end of every step, not of the prompt alone
        options |= {"prefix_cache_retention_interval": STATES, "max_num_batched_tokens": 2 * STATES}
    prompts = [prompt_without(what, model) for what in losses]
    with running(folder_of(name), store, extra=model.extra, **options) as engine:
        cold = engine.ask_each(prompts)
        engine.settle()
        digests = {one.pool.name: one.pool.digest for one in engine.worker_side.pools}
    for what, loss in losses.items():
        assert delete(store, model, digests, what, loss) > 0, what
    with running(folder_of(name), store, extra=model.extra, **options) as engine:
        found = engine.ask_each(prompts)
        engine.assert_idle_and_clean()
    hits = dict(zip(losses, (answer.cached for answer in found), strict=True))
    assert hits == {what: loss.hit for what, loss in losses.items()}
    assert [answer.tokens for answer in found] == [answer.tokens for answer in cold]
    if model.is_exact:
        assert_same(found, cold, COLD_TOLERANCE)

"""Drafters on a real engine: what they propose depends on their KV of the prefix.

Random heads have about nothing accepted, so that what they propose is compared. A draft model with
the target's own weights has about everything accepted while its KV is whole.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_in_process import (
    BLOCK,
    PAGE,
    Engine,
    device_hit,
    difference,
    prompt_of,
    restored_hit,
    running,
)
from model_results import note_restored
from speculation import Drafter, Run, drafting
from tiny_drafters import WRITERS

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.draft_identity import draft_digest
from vllm_hicache.connectors.draft_layers import draft_pools, dropped_blocks
from vllm_hicache.connectors.model_identity import draft_fingerprint
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_DRAFTED = 3
"""Tokens that are proposed for a step."""
LENGTHS = (4 * BLOCK, 200, 513)
MANY, LONG = 12, 240
"""Prompts and tokens of their answers, for which 2,000 tokens are proposed at least."""


@dataclass(frozen=True)
class Case:
    """A target and what drafts for it, by the names of their makers; ``llama`` is the default."""

    method: str
    target: str = "llama"
    draft: str = "llama"
    family: str = "Llama (GQA)"
    """The target's, as README calls it."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of a draft that is a Llama of its own."""
    num_layers: int = 1
    is_packed: bool = True
    """Whether draft layers have the shape of the target's."""
    rule: HitRule = HitRule.EVERY
    drops: int = 0
    """Blocks that vLLM computes again at the end of a hit."""
    block: int = BLOCK

    def restored(self, num_tokens: int) -> int:
        """Tokens of a prompt that come back from host or storage."""
        return restored_hit(num_tokens, PAGE, self.block) - self.drops * self.block


CASES = {
    "deeper than the target": Case("draft_model", sizes={"num_layers": 6, "seed": 1}, num_layers=6),
    "other heads": Case(
        "draft_model",
        sizes={"num_kv_heads": 1, "num_layers": 2, "seed": 2},
        num_layers=2,
        is_packed=False,
    ),
    "other heads beside windows": Case(
        "draft_model",
        target="windowed",
        family="Mistral, windows",
        sizes={"num_kv_heads": 1, "num_layers": 2, "seed": 2},
        num_layers=2,
        is_packed=False,
        rule=HitRule.WINDOW,
    ),
    "eagle": Case("eagle", draft="eagle", drops=1),
    "eagle3": Case("eagle3", draft="eagle3", drops=1),
}

RESTORED = {
    **CASES,
    # On a CPU vLLM keeps no latents on the device: only a restore has a hit.
    "next token layer": Case(
        "mtp", target="mtp", draft="mtp", family="DeepSeek-V3", drops=1, block=16
    ),
}
OWN = Case("draft_model")
SERVED = ("served_tokens/host", "served_tokens/storage")


@pytest.fixture(scope="module")
def models(tiny_llama: Callable[..., Path]) -> Callable[..., Path]:
    def find(name: str, **sizes: int) -> Path:
        llama = tiny_llama(**sizes)
        if name == "llama":
            return llama
        folder = llama.parent / f"{name}-of-{llama.name}"
        return folder if folder.exists() else WRITERS[name](folder, llama)

    return find


def speculation_of(case: Case, models: Callable[..., Path]) -> dict[str, object]:
    draft = str(models(case.draft, **case.sizes))
    return {"method": case.method, "model": draft, "num_speculative_tokens": NUM_DRAFTED}


def same_steps(some: Run, others: Run) -> list[float]:
    """Of each prompt the part of the steps in which the same ids were proposed."""
    return [
        sum(one == other for one, other in zip(a, b, strict=False)) / max(len(a), len(b))
        for a, b in zip(some.proposals, others.proposals, strict=True)
    ]


def check_pool(drafter: Drafter, case: Case) -> None:
    """What is made of this worker's KV, against what its drafter says of itself."""
    config = drafter.vllm_config
    (pool,) = draft_pools(config, drafter.kv_cache_config, page_size=PAGE)
    assert sorted(pool.layers) == drafter.layers
    assert len(pool.layers) == case.num_layers
    assert (pool.group, pool.is_packed, pool.rule) == (0, case.is_packed, case.rule)
    assert dropped_blocks(config) == case.drops
    assert draft_fingerprint(config) is not None
    assert len(draft_digest(config, HiCacheConfig.parse({}), pool, heads_per_group=1)) == 8


@pytest.mark.full
def test_the_targets_own_weights_are_accepted_while_their_kv_is_whole(
    models: Callable[..., Path],
) -> None:
    prompts = [prompt_of(f"own weights {i}", 300) for i in range(MANY)]
    with drafting(models("llama"), speculation_of(OWN, models)) as drafter:
        cold = drafter.ask(prompts, max_tokens=LONG)
        hit = drafter.ask(prompts, max_tokens=LONG)
        drafter.forget()
        without = drafter.ask(prompts, max_tokens=LONG // 4)
    assert min(cold.drafted, hit.drafted, without.drafted) >= 2000
    assert cold.cached == [0] * MANY
    assert hit.cached == without.cached == [device_hit(300)] * MANY
    assert cold.acceptance > 0.98
    assert abs(hit.acceptance - cold.acceptance) < 0.02
    assert without.acceptance < cold.acceptance / 2
    assert hit.texts == cold.texts
    assert without.texts == [text[: LONG // 4] for text in cold.texts]


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_drafter_proposes_the_same_after_a_device_hit_and_something_else_without_its_kv(
    models: Callable[..., Path], name: str
) -> None:
    case = CASES[name]
    prompts = [prompt_of(f"{name} {length}", length) for length in LENGTHS]
    with drafting(models(case.target), speculation_of(case, models)) as drafter:
        check_pool(drafter, case)
        cold, hit = drafter.ask_each(prompts), drafter.ask_each(prompts)
        drafter.forget()
        without = drafter.ask_each(prompts)
    hits = [device_hit(length) - case.drops * BLOCK for length in LENGTHS]
    assert hit.cached == without.cached == hits
    assert hit.proposals == cold.proposals
    assert max(same_steps(without, cold)) < 0.9
    assert hit.texts == without.texts == cold.texts


@pytest.mark.full
def test_a_layer_for_the_next_token_proposes_the_same_for_the_same_prompt_without_any_hit(
    models: Callable[..., Path],
) -> None:
    """On a CPU vLLM keeps no latents for later requests: only a connector's hit can lose state."""
    case = Case("mtp", target="mtp", draft="mtp", drops=1)
    prompts = [prompt_of(f"next token {length}", length) for length in LENGTHS]
    with drafting(models("mtp"), speculation_of(case, models), block_size=16) as drafter:
        check_pool(drafter, case)
        cold, again = drafter.ask_each(prompts), drafter.ask_each(prompts)
    assert again.cached == cold.cached == [0] * len(LENGTHS)
    assert again.proposals == cold.proposals
    assert len({ids for steps in cold.proposals for ids in steps}) > 10
    assert again.texts == cold.texts


@pytest.mark.full
def test_a_draft_model_beside_two_kinds_of_layers_spoils_the_answers_of_the_v1_runner(
    models: Callable[..., Path],
) -> None:
    """Why such engines are refused. When this fails, vLLM has mended it and we need not refuse."""
    prompt = prompt_of("two kinds", 200)
    case = Case("draft_model", target="mixed", sizes={"num_layers": 1, "seed": 1})
    with drafting(models("mixed"), speculation_of(case, models)) as drafter:
        with pytest.raises(ConfigError, match=r"draft_model\.model\.layers\.0.* in .*group 1, but"):
            draft_pools(drafter.vllm_config, drafter.kv_cache_config, page_size=PAGE)
        wrong = drafter.ask([prompt])
    with drafting(models("mixed"), None) as undrafted:
        right = undrafted.ask([prompt])
    # The prompt was computed rightly; then the drafter wrote over its KV.
    assert wrong.texts[0][0] == right.texts[0][0]
    assert wrong.texts != right.texts


# With the connector ------------------------------------------------------------------------------


@contextmanager
def keeping(
    case: Case | None,
    models: Callable[..., Path],
    store: Path,
    draft_miss: str = "cut",
    target: str = "llama",
) -> Iterator[tuple[Engine, Drafter]]:
    """An engine with the connector and a store; without a case it does not speculate."""
    options = {"block_size": case.block if case is not None else BLOCK}
    speculation = speculation_of(case, models) if case is not None else None
    with running(
        models(case.target if case is not None else target),
        store,
        extra={"draft_miss": draft_miss, "fixed_weights": True},
        speculative_config=speculation,
        **options,
    ) as engine:
        yield engine, Drafter(engine.llm)
        engine.assert_idle_and_clean()


def draft_objects(store: Path) -> set[Path]:
    return set(store.rglob("*_P[0-9a-f]*"))


def served(engine: Engine, before: dict[str, float]) -> list[float]:
    counted = difference(engine.counters(), before)
    return [counted[tier] for tier in SERVED]


def test_acceptance_survives_host_and_files_and_falls_without_draft_objects(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = [prompt_of(f"accepted {i}", 300) for i in range(MANY)]
    hits = [OWN.restored(300)] * MANY
    with keeping(OWN, models, tmp_path) as (engine, drafter):
        cold = drafter.ask(prompts, max_tokens=LONG)
        engine.settle()
        engine.reset_device()
        host = drafter.ask(prompts, max_tokens=LONG)
        engine.settle()
        engine.reset_all()
        file = drafter.ask(prompts, max_tokens=LONG)
    for restored in (host, file):
        assert restored.cached == hits
        assert restored.texts == cold.texts
        assert restored.drafted >= 2000
        assert abs(restored.acceptance - cold.acceptance) < 0.02
    assert cold.acceptance > 0.98
    for path in draft_objects(tmp_path):
        path.unlink()
    with keeping(OWN, models, tmp_path, "target_only") as (engine, drafter):
        without = drafter.ask(prompts, max_tokens=LONG // 4)
        engine.settle()
        zeroed = engine.counters()["zeroed_pages"]
    assert without.cached == hits
    assert without.texts == [text[: LONG // 4] for text in cold.texts]
    assert without.drafted >= 2000
    assert without.acceptance < cold.acceptance / 2
    assert zeroed == sum(-(-hit // PAGE) for hit in hits)


@pytest.mark.full
@pytest.mark.parametrize("name", RESTORED)
def test_a_drafter_proposes_the_same_after_host_and_files_and_something_else_without_its_objects(
    models: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    case = RESTORED[name]
    prompts = [prompt_of(f"{name} {length}", length) for length in LENGTHS]
    hits = [case.restored(length) for length in LENGTHS]
    with keeping(case, models, tmp_path) as (engine, drafter):
        cold = drafter.ask_each(prompts)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        host = drafter.ask_each(prompts)
        engine.settle()
        assert served(engine, before) == [sum(hits), 0]
        engine.reset_all()
        before = engine.counters()
        file = drafter.ask_each(prompts)
        engine.settle()
        assert served(engine, before) == [0, sum(hits)]
    assert cold.cached == [0] * len(LENGTHS)
    # The kernel of CPUs for latents answers a known prefix otherwise than a prompt without one.
    right = host if case.target == "mtp" else cold
    for restored in (host, file):
        assert restored.cached == hits
        assert restored.texts == right.texts
        assert restored.proposals == right.proposals
    for path in draft_objects(tmp_path):
        path.unlink()
    with keeping(case, models, tmp_path, "target_only") as (_, drafter):
        without = drafter.ask_each(prompts)
    assert without.cached == hits
    assert without.texts == right.texts
    assert max(same_steps(without, right)) < 0.9
    note_restored(case.family, drafter=case.method)


def test_pages_written_without_speculation_are_cut_or_used_without_draft_state(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    case = CASES["eagle"]
    prompts = [prompt_of(f"written plainly {length}", length) for length in LENGTHS]
    with keeping(None, models, tmp_path) as (engine, plain):
        cold = plain.ask_each(prompts)
    assert draft_objects(tmp_path) == set()
    with keeping(case, models, tmp_path, "target_only") as (engine, drafter):
        without = drafter.ask_each(prompts)
        engine.settle()
        assert engine.counters()["zeroed_pages"] > 0
    assert without.cached == [case.restored(length) for length in LENGTHS]
    assert without.texts == cold.texts
    # Zeros that stood in for draft state are not stored as draft state.
    with keeping(case, models, tmp_path, "cut") as (engine, drafter):
        cut = drafter.ask_each(prompts)
        engine.settle()
        assert engine.counters()["zeroed_pages"] == 0
        engine.reset_all()
        again = drafter.ask_each(prompts)
    assert cut.cached == [0] * len(LENGTHS)
    assert cut.texts == cold.texts
    assert max(same_steps(without, cut)) < 0.9
    # What was computed again has draft state now, beside the target's objects that were there.
    assert again.cached == [case.restored(length) for length in LENGTHS]
    assert again.proposals == cut.proposals


@pytest.mark.full
def test_pages_written_with_speculation_are_read_without_and_by_another_drafter(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = [prompt_of(f"written by eagle {length}", length) for length in LENGTHS]
    with keeping(CASES["eagle"], models, tmp_path) as (_, drafter):
        cold = drafter.ask_each(prompts)
    written = draft_objects(tmp_path)
    assert written
    with keeping(None, models, tmp_path) as (engine, plain):
        before = engine.counters()
        read = plain.ask_each(prompts)
        engine.settle()
        assert served(engine, before) == [0, sum(restored_hit(n) for n in LENGTHS)]
    assert read.texts == cold.texts
    assert draft_objects(tmp_path) == written
    other = CASES["eagle3"]
    with keeping(other, models, tmp_path, "target_only") as (_, drafter):
        theirs = drafter.ask_each(prompts)
    assert theirs.cached == [other.restored(length) for length in LENGTHS]
    assert theirs.texts == cold.texts


@pytest.mark.full
@pytest.mark.parametrize("draft_miss", ["cut", "target_only", "auto"])
def test_a_prefix_whose_later_pages_lack_their_draft_objects_alone(
    models: Callable[..., Path], tmp_path: Path, draft_miss: str
) -> None:
    case = CASES["other heads"]
    prompt = prompt_of(f"half {draft_miss}", 8 * PAGE + 1)
    with keeping(case, models, tmp_path) as (engine, drafter):
        drafter.ask([prompt[: 3 * PAGE + 1]], max_tokens=1)
        engine.settle()
        kept = draft_objects(tmp_path)
        cold = drafter.ask([prompt], max_tokens=40)
    lost = draft_objects(tmp_path) - kept
    assert len(lost) == 5 * len(kept) // 3 > 0
    for path in lost:
        path.unlink()
    with keeping(case, models, tmp_path, draft_miss) as (engine, drafter):
        read = drafter.ask([prompt], max_tokens=40)
        engine.settle()
        zeroed = engine.counters()["zeroed_pages"]
    assert read.texts == cold.texts
    cut, whole = ([3 * PAGE], 0), ([8 * PAGE], 5)
    expected = {"cut": [cut], "target_only": [whole], "auto": [cut, whole]}[draft_miss]
    assert (read.cached, zeroed) in expected
    if read.cached == [3 * PAGE]:
        assert read.proposals == cold.proposals
    else:
        assert same_steps(read, cold)[0] < 0.9

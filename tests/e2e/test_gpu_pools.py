"""On one GPU: windows beside full attention, and a drafter's state, are restored from host memory
and from files as they were computed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import Engine, assert_same, difference, prompt_of, restored_hit, running
from speculation import Drafter, Run
from tiny_hybrids import write_hybrid

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

BLOCK = 16
LENGTHS = (129, 300, 500, 1025)
HITS = [restored_hit(n, block=BLOCK) for n in LENGTHS]
COLD_TOLERANCE = 0.15
"""bfloat16: a cold prompt is computed in other chunks."""
NUM_PROMPTS, NUM_TOKENS, NUM_ANSWERED = 20, 300, 160
BASE = {"dtype": "bfloat16", "block_size": BLOCK}


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["gemma3", "mistralswa"])
def test_windows_come_back_from_host_and_files(
    tiny_llama: Callable[..., Path], tmp_path: Path, name: str, is_eager: bool
) -> None:
    llama = tiny_llama()
    model = write_hybrid(name, llama.parent / name, llama)
    prompts = [prompt_of(f"{name} {length}", length) for length in LENGTHS]
    options = {**BASE, "enforce_eager": is_eager}
    extra = {"fixed_weights": True}
    with running(model, tmp_path / "store", extra=extra, **options) as engine:
        cold = engine.ask_each(prompts)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        host = engine.ask_each(prompts)
        engine.settle()
        engine.reset_all()
        file = engine.ask_each(prompts)
        engine.settle()
        counted = difference(engine.counters(), before)
        engine.assert_idle_and_clean()
    assert [a.cached for a in cold] == [0] * len(LENGTHS)
    assert [a.cached for a in host] == [a.cached for a in file] == HITS
    assert counted["served_tokens/host"] == counted["served_tokens/storage"] == sum(HITS)
    assert_same(host, cold, COLD_TOLERANCE)
    assert_same(file, host)


def answers_of(engine: Engine, model: Path, prompts: list[list[int]]) -> list[Run]:
    """Cold, from host and from files."""
    drafter = Drafter(engine.llm)
    runs = [drafter.ask(prompts, max_tokens=NUM_ANSWERED)]
    engine.settle()
    engine.reset_device()
    runs.append(drafter.ask(prompts, max_tokens=NUM_ANSWERED))
    engine.settle()
    engine.reset_all()
    runs.append(drafter.ask(prompts, max_tokens=NUM_ANSWERED))
    engine.settle()
    return runs


def test_a_draft_model_is_accepted_after_a_restore_as_before_and_not_without_its_state(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """The target drafts for itself: what it proposes is right while its KV is."""
    llama, store = tiny_llama(), tmp_path / "store"
    speculation = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 3}
    options = {**BASE, "dtype": "float32", "speculative_config": speculation}
    prompts = [prompt_of(f"drafted {i}", NUM_TOKENS) for i in range(NUM_PROMPTS)]
    hits = [restored_hit(NUM_TOKENS, block=BLOCK)] * NUM_PROMPTS
    extra = {"fixed_weights": True}
    with running(llama, store, extra=extra, **options) as engine:
        cold, host, file = answers_of(engine, llama, prompts)
        engine.assert_idle_and_clean()
    assert cold.acceptance > 0.9
    for restored in (host, file):
        assert restored.cached == hits
        assert restored.drafted >= 2000
        assert abs(restored.acceptance - cold.acceptance) < 0.02
    for path in store.rglob("*_P[0-9a-f]*"):
        path.unlink()
    with running(llama, store, extra={**extra, "draft_miss": "target_only"}, **options) as engine:
        without = Drafter(engine.llm).ask(prompts, max_tokens=40)
    assert without.cached == hits
    assert without.acceptance < cold.acceptance / 2

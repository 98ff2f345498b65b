"""A real pipeline of two stages of which one is slow or lacks pages: both act on one cache."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from child_process import run_child, workers
from engine_in_process import PAGE
from stages_child import DELAY_S, NUM_LACKING, NUM_PAGES, PAIRS, ROUNDS, WAYS

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

COLD_TOLERANCE = 1e-4
LATENCY_TOLERANCE = 1.03


def run(tiny_llama: Callable[..., Path], folder: Path, task: str) -> dict[str, Any]:
    options, env = workers(1, 2)
    specification = {
        "model": str(tiny_llama()),
        "folder": str(folder),
        "options": options,
        "task": task,
    }
    env = {**env, "UNDER_TEST_SLOW_COPIES": f"1:{folder}/delay"}
    return run_child("stages_child", specification, folder, env)


def test_what_the_fast_stage_has_saved_is_not_visible_before_the_slow_one_has(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    result = run(tiny_llama, tmp_path, "save")
    assert result["problems"] == []
    assert any(fast > slow for (fast, slow), _, _ in result["records"])
    assert any(fast > slow > 0 for (fast, slow), _, _ in result["records"]), "never a surplus"
    for done, consumed, (first, second) in result["records"]:
        assert consumed <= min(done)
        assert second == 0 or first == 2, "the second prompt was saved after the first"
        assert (first > 0) <= (consumed > 0)
    assert result["records"][-1][2] == [2, 2]
    assert result["served"] == 2 * 2 * PAGE
    assert result["is_same"]
    assert result["difference"] <= COLD_TOLERANCE


def test_slow_copies_of_one_stage_cost_those_who_decode_nothing(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    result = run(tiny_llama, tmp_path, "decode")
    assert result["problems"] == []
    assert result["served"] == ROUNDS * PAIRS * 2 * 3 * PAGE
    assert result["load_s"] > DELAY_S / 2  # the delay was there, in every second phase
    assert result["most"]["late"] == result["most"]["in time"] >= 2
    assert result["batches"]["late"] >= result["batches"]["in time"] / LATENCY_TOLERANCE
    assert len(result["ratios"]) >= 0.75 * ROUNDS * PAIRS, "copies were not late for long enough"
    assert result["cost"] <= LATENCY_TOLERANCE, result
    assert result["longest"] < 1, "a step waited for a copy"


@pytest.fixture(scope="module")
def restored(
    tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    result = run(tiny_llama, tmp_path_factory.mktemp("short"), "restore")
    assert result["problems"] == []
    return result["found"]


@pytest.mark.parametrize("way", WAYS)
def test_both_stages_use_the_pages_that_the_short_one_has(
    restored: Mapping[str, Any], way: str
) -> None:
    found = restored[way]
    usable = (NUM_PAGES - NUM_LACKING) * PAGE
    assert found["counters"]["served_tokens/storage"] == usable == found["cached"]
    assert found["is_same"]
    assert found["difference"] <= COLD_TOLERANCE
    assert found["in_host"] == NUM_PAGES  # the others were computed and saved


@pytest.mark.parametrize(
    ("way", "reason"), [("deleted", None), ("unreadable", "short_fetch"), ("late", "deadline")]
)
def test_the_ledger_says_why_the_last_pages_were_computed(
    restored: Mapping[str, Any], way: str, reason: str | None
) -> None:
    counters = restored[way]["counters"]
    unserved = {k: v for k, v in counters.items() if k.startswith("unserved_tokens/") and v}
    expected = {} if reason is None else {f"unserved_tokens/{reason}": NUM_LACKING * PAGE}
    assert unserved == expected

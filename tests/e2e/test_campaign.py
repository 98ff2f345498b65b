"""500 mixed requests on a real engine of TP 2 x PP 2 whose storage is slow and fails."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from child_process import run_child, workers

from vllm_hicache.series import UNSERVED_REASONS

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]

SEED = 7
NUMBER, NUMBER_SKIPPING, NUMBER_MORE = 450, 50, 200
MAX_MORE = 5
TOLERANCE = 1e-3
"""Of log-probabilities: chunks depend on the neighbours, and rounding with them."""
SLOW_COPIES_S = 0.02


@pytest.fixture(scope="module")
def lives(
    tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("campaign")
    options, env = workers(2, 2)
    specification = {
        "model": str(tiny_llama()),
        "folder": str(folder),
        "options": {**options, "max_model_len": 2048, "max_num_batched_tokens": 512},
        "seed": SEED,
        "number": NUMBER,
        "number_skipping": NUMBER_SKIPPING,
        "number_more": NUMBER_MORE,
        "max_more": MAX_MORE,
    }
    env |= {
        "UNDER_TEST_DIVERGE": str(folder / "order"),
        "UNDER_TEST_SLOW_COPIES": f"3:{SLOW_COPIES_S}",
    }
    lives = run_child("campaign_child", specification, folder, env)["lives"]
    for life in lives:
        logger.info("%s", {k: v for k, v in life["counters"].items() if v and "tokens" in k})
    return lives


def unserved(life: Mapping[str, Any]) -> dict[str, float]:
    head = "unserved_tokens/"
    return {k.removeprefix(head): v for k, v in life["counters"].items() if k.startswith(head)}


def test_every_answer_is_that_of_an_engine_without_the_connector(
    lives: list[dict[str, Any]],
) -> None:
    assert [life["num_asked"] for life in lives[:2]] == [NUMBER, NUMBER_SKIPPING]
    for life in lives:
        number = life["num_asked"]
        assert life["num_wrong"] == 0, life["wrong"]
        assert life["difference"] <= TOLERANCE
        assert number - life["num_aborted"] <= life["num_answers"] < number


def test_a_third_of_the_prompt_tokens_came_from_the_tiers(lives: list[dict[str, Any]]) -> None:
    mixed = lives[0]
    served = {tier: mixed["counters"][f"served_tokens/{tier}"] for tier in ("host", "storage")}
    assert sum(served.values()) >= 0.3 * mixed["num_prompt_tokens"], served
    assert min(served.values()) > 0


def test_every_reason_for_not_serving_was_seen(lives: list[dict[str, Any]]) -> None:
    seen = {reason for life in lives for reason, tokens in unserved(life).items() if tokens}
    # Every page of this model has all it needs: planner tests see the last reason.
    assert sorted(seen - set(UNSERVED_REASONS)) == []
    assert sorted(set(UNSERVED_REASONS) - seen) == ["missing_pool"]


def test_found_tokens_are_served_or_have_a_reason(lives: list[dict[str, Any]]) -> None:
    for life in lives:
        counters = life["counters"]
        found, served = (
            sum(counters[f"{name}_tokens/{tier}"] for tier in ("host", "storage"))
            for name in ("found", "served")
        )
        assert found == served + sum(unserved(life).values())


def test_nothing_is_left_when_all_is_done(lives: list[dict[str, Any]]) -> None:
    for life in lives:
        assert life["problems"] == []

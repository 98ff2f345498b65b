"""A real engine of TP 2 x PP 2 whose workers diverge on purpose, and what the checker says."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from child_process import EXAMPLES, SUPPORT, run_child, workers
from engine_in_process import ENVIRONMENT

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

STALL_S = 5
FAILING, ARGUMENTS, RESULT, ORDER, STOPPED = "1:fail", "3:arguments", "2:result", "1:order", 1
PLACES = [
    "worker 0 (tp 0, pp 0, cp 0)",
    "worker 1 (tp 1, pp 0, cp 0)",
    "worker 2 (tp 0, pp 1, cp 0)",
    "worker 3 (tp 1, pp 1, cp 0)",
]


def environment(folder: Path, mode: str) -> dict[str, str]:
    return {
        "HICACHE_RANK_CONSENSUS": mode,
        "HICACHE_RANK_CONSENSUS_FOLDER": str(folder / "ranks"),
        "HICACHE_RANK_CONSENSUS_STALL_S": str(STALL_S),
        "UNDER_TEST_DIVERGE": str(folder / "order"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(tiny_llama: Callable[..., Path], folder: Path) -> Mapping[str, Any]:
    """One engine, where nothing diverges first, then each class, then a worker stops."""
    options, env = workers(2, 2)
    specification = {
        "model": str(tiny_llama()),
        "options": options,
        "orders": [FAILING, ARGUMENTS, RESULT, ORDER],
        "stop": STOPPED,
    }
    env |= environment(folder, "report")
    return run_child("consensus_child", specification, folder, env)


def _first_line(found: Mapping[str, Any], order: str) -> str:
    return found[order]["texts"][0].splitlines()[0]


def test_workers_that_do_the_same_are_not_reported(found: Mapping[str, Any]) -> None:
    assert found["clean"] == []
    assert found["same"]
    assert found["served"] > 0
    assert found["watched"]


def test_a_copy_that_fails_on_one_worker_is_not_reported(found: Mapping[str, Any]) -> None:
    assert found[FAILING]["texts"] == []
    assert found["counters"]["copy_failures"] == 1


@pytest.mark.parametrize(
    ("order", "kind", "call"),
    [
        (ARGUMENTS, "arguments", "bind"),
        (RESULT, "result", "take_failed_requests"),
        (ORDER, "order", "take_failed_requests"),
    ],
)
def test_the_class_the_step_the_call_and_the_worker_are_named(
    found: Mapping[str, Any], order: str, kind: str, call: str
) -> None:
    place, step = PLACES[int(order[0])], found[order]["step"]
    expected = f"Found rank divergence ({kind}) at step {step} in {call}: {place}"
    assert _first_line(found, order) == expected
    assert found["counters"][f"rank_divergences/{kind}"] >= 1
    text = found[order]["texts"][0]
    assert all(f"  {worker}: step " in text for worker in PLACES)


def test_other_rows_are_seen_where_they_arrive_and_where_they_are_copied(
    found: Mapping[str, Any],
) -> None:
    calls = [re.search(r" in (\w+): ", text).group(1) for text in found[ARGUMENTS]["texts"]]
    assert calls == ["bind", "_submit"]
    assert "  scheduler: step " in found[ARGUMENTS]["texts"][0]


def test_the_file_has_the_last_events_of_all_workers_and_the_scheduler(
    found: Mapping[str, Any],
) -> None:
    (path,) = re.findall(r"last events of all: (\S+)", found[ORDER]["texts"][0])
    record = json.loads(Path(path).read_text())
    assert record["differing"] == [PLACES[1]]
    last = record["last_events"]
    assert list(last) == [*PLACES, "scheduler"]
    decided = {event["call"] for event in last["scheduler"]}
    assert {"add_request", "match", "collect_saves", "plan_step", "settle", "finish"} <= decided
    for place in PLACES:
        called = {event["call"] for event in last[place]}
        assert {"bind", "_submit", "_publish", "take_failed_requests"} <= called


def test_a_stopped_worker_is_named_while_all_wait_for_it(found: Mapping[str, Any]) -> None:
    (text,) = found["stop"]["texts"]
    first = text.splitlines()[0]
    match = re.fullmatch(r"Found rank stall at step (\d+): (.*)", first)
    assert match is not None, first
    assert match.group(2) == f"{PLACES[STOPPED]}: no sign of life of the process for {STALL_S} s"
    last = found["stop"]["last_sent"]
    assert int(match.group(1)) in (last - 1, last, last + 1)
    assert found["counters"]["rank_divergences/stall"] == 1


def test_the_engine_goes_on_after_all_of_it(found: Mapping[str, Any]) -> None:
    assert found["problems"] == []


def test_workers_that_end_with_their_engine_are_not_missed(found: Mapping[str, Any]) -> None:
    assert found["told_at_the_end"] == []


# The other modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raise", "abort"])
def test_a_divergence_stops_the_engine(
    mode: str, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    options, env = workers(2, 1)
    specification = {
        "model": str(tiny_llama()),
        "options": options,
        "orders": [RESULT.replace("2", "1")],
        "stop": None,
    }
    path = os.pathsep.join([str(SUPPORT), str(EXAMPLES)])
    child = subprocess.run(
        [
            sys.executable,
            "-P",
            SUPPORT / "consensus_child.py",
            json.dumps(specification),
            tmp_path / "result.json",
        ],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **env, **environment(tmp_path, mode)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = child.stdout + child.stderr
    assert "Found rank divergence (result) at step " in said
    assert not (tmp_path / "result.json").exists()
    if mode == "abort":
        assert child.returncode == 70
    else:
        assert child.returncode == 1
        assert "vllm_hicache.errors.RankDivergence: Found rank divergence (result)" in said

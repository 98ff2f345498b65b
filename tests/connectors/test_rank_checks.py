"""The checker on a connector's real sides: workers with real copies, real boards and reports."""

import importlib
import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig

from vllm_hicache.checked_calls import check_of
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.device_blocks import PoolReferences
from vllm_hicache.connectors.messages import ReportMetadata
from vllm_hicache.connectors.rank_checks import SchedulerChecks, WorkerChecks, look_interval_s
from vllm_hicache.connectors.worker_side import WorkerSide
from vllm_hicache.fetch import FetchPolicy
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import CopyOp, Direction, StepPlan
from vllm_hicache.planner import Planner
from vllm_hicache.planner_options import PlannerOptions
from vllm_hicache.progress_board import BoardReader, ProgressBoard

pytestmark = pytest.mark.vllm

DOCUMENT = Path(__file__).parents[2] / "docs" / "debugging.md"
MARKED = {"_agree", "bind", "_submit", "take_failed_requests", "_publish"}
ROWS = np.array([[0, 0, 1, 0], [1, 0, 2, 0]], dtype=np.int32)
OPTIONS = PlannerOptions(
    page_size=64,
    block_size=32,
    num_host_slots=4,
    page_bytes=(4096,) * 4,
    eviction="lru",
    fetch=FetchPolicy("timeout", 1.0, 0.0, 0, 0.05, 10.0),
    persist_timeout_s=30.0,
    sync_load_max_s=0.0,
    defer_max_blocks=1000,
    shares_device_pages=True,
)


def config(folder: Path, mode: str = "report", **options: object) -> HiCacheConfig:
    given: dict[str, object] = {"rank_consensus": mode}
    if mode != "off":
        given |= {"rank_consensus_folder": str(folder), **options}
    return HiCacheConfig.parse(given)


class Copies:
    """Copies of granules that fail where a row names a block that does not exist."""

    NUM_BLOCKS = 8

    def save(self, copies: tuple[np.ndarray, ...], host: tuple[torch.Tensor, ...]) -> None:
        if copies[0][:, 2].max() >= self.NUM_BLOCKS:
            raise IndexError("no such block")

    load = save


@pytest.fixture
def make_side() -> Iterator[Callable[..., WorkerSide]]:
    """Worker sides that copy as in an engine; only the KV cache beneath is missing."""
    from vllm_hicache.host_pool import HostPool
    from vllm_hicache.transfer import CopyEngine

    sides: list[WorkerSide] = []

    def make(worker_id: int, settings: HiCacheConfig) -> WorkerSide:
        parallel = ParallelConfig()
        parallel.rank = worker_id
        side = WorkerSide(VllmConfig(parallel_config=parallel), None, settings)
        side.pool = HostPool(4, [4096])
        side._board = ProgressBoard()
        if side._checks is not None:
            side._checks.start(side._board)
        side.engine = CopyEngine(
            Copies(), side.pool, publish=side._publish, device=torch.device("cpu")
        )
        sides.append(side)
        return side

    yield make
    for side in sides:
        board = side._board
        side.shutdown()
        board.close()


def run(side: WorkerSide, plan: StepPlan) -> ReportMetadata:
    """One step as vLLM runs it; its copies are waited for."""
    side.bind(plan)
    side.start_load()
    side.finish_step()
    side.take_failed_requests()
    side.take_failed_blocks()
    for way, ops in ((Direction.SAVE, plan.saves), (Direction.LOAD, plan.loads)):
        if ops and side.engine is not None:
            assert side.engine.wait(way, ops[-1].op_id, 10)
    report = side.report()
    assert report is not None
    return report


def aggregated(reports: list[ReportMetadata]) -> ReportMetadata:
    """As vLLM brings them: each through a pickle, then joined one by one."""
    arrived = [pickle.loads(pickle.dumps(report)) for report in reports]
    return reduce(lambda one, other: one.aggregate(other), arrived)


class Four:
    """TP 2 x PP 2, and the scheduler's part of the checker."""

    def __init__(self, make_side, folder: Path, mode: str = "report", **options: object) -> None:
        settings = config(folder, mode, **options)
        self.folder = folder
        self.metrics = Metrics()
        self.sides = [make_side(i, settings) for i in range(4)]
        self.boards = {}
        for side in self.sides:
            reader = BoardReader.open(side._board.path, side._board.token)
            assert reader is not None
            self.boards[side.worker_id] = reader
        parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
        planner = Planner(OPTIONS, PoolReferences(), self.metrics, link=None, namespace="n")
        checks = SchedulerChecks.create(settings, parallel, self.boards, planner, self.metrics)
        assert checks is not None
        self.checks = checks

    def step(self, plan: StepPlan, *, received: dict[int, StepPlan] | None = None) -> None:
        self.checks.sent(plan)
        reports = [run(side, (received or {}).get(side.worker_id, plan)) for side in self.sides]
        self.checks.absorb(aggregated(reports))

    def counted(self) -> dict[str, float]:
        return {k: v for k, v in self.metrics.totals().items() if "rank_div" in k and v}

    def close(self) -> None:
        self.checks.close()
        for board in self.boards.values():
            board.close()


@pytest.fixture
def make_four(make_side, tmp_path) -> Iterator[Callable[..., Four]]:
    made: list[Four] = []

    def make(**options: object) -> Four:
        made.append(Four(make_side, tmp_path, **options))
        return made[-1]

    yield make
    for four in made:
        four.close()


def plan(number: int, *, block: int = 1, failed: tuple[str, ...] = ()) -> StepPlan:
    rows = ROWS.copy()
    rows[0, 2] = block
    return StepPlan(
        number, loads=(CopyOp(number, ROWS),), saves=(CopyOp(number, rows),), failed_requests=failed
    )


# Off ---------------------------------------------------------------------------------------------


def test_off_there_is_no_wrapper_no_thread_and_no_event(make_side, tmp_path):
    side = make_side(0, config(tmp_path, "off"))
    assert side._checks is None
    assert not MARKED & vars(side).keys()
    for name in MARKED:
        function = vars(WorkerSide)[name]
        assert getattr(side, name).__func__ is function
        assert not hasattr(function, "__wrapped__")
        assert function.__code__.co_filename.endswith("worker_side.py")
    report = run(side, plan(1))
    assert report.events is None
    assert aggregated([report, report]).events is None
    assert not [t for t in threading.enumerate() if t.name in ("hicache-pulse", "hicache-stalls")]
    assert SchedulerChecks.create(config(tmp_path, "off"), None, {}, None, Metrics()) is None


def test_off_is_the_default():
    assert HiCacheConfig.parse({}).rank_consensus == "off"


def test_one_side_with_the_checker_leaves_another_one_without(make_side, tmp_path):
    checked_side = make_side(0, config(tmp_path))
    plain_side = make_side(1, config(tmp_path, "off"))
    assert vars(checked_side).keys() >= MARKED
    assert plain_side.bind.__func__ is vars(WorkerSide)["bind"]


# On ----------------------------------------------------------------------------------------------


def test_workers_that_do_the_same_do_not_diverge(make_four, caplog):
    four = make_four()
    for number in range(1, 30):
        four.step(plan(number, failed=("r",) if number % 5 == 0 else ()))
    assert four.counted() == {}
    assert list(four.folder.iterdir()) == []
    streams = four.checks.consensus._streams
    names = {"plans", "start save", "start load", "finish save", "finish load"}
    assert names | {"take_failed_requests"} == set(streams)


def test_another_plan_on_one_worker_is_named(make_four, caplog):
    four = make_four()
    four.step(plan(1))
    four.step(plan(2), received={2: plan(2, block=3)})
    text = next(r.getMessage() for r in caplog.records if "Found rank" in r.getMessage())
    first = "Found rank divergence (arguments) at step 2 in bind: worker 2 (tp 0, pp 1, cp 0)"
    assert text.splitlines()[0] == first


def test_a_copy_that_fails_on_one_worker_is_shown_and_is_no_divergence(make_four, caplog):
    four = make_four()
    four.sides[1].engine._copy[Direction.SAVE] = fail
    four.step(plan(1))
    assert four.boards[1].read().failed_saves == (1,)
    assert four.counted() == {}
    assert "Found rank" not in caplog.text
    four.step(plan(2), received={3: plan(2, failed=("x",))})
    record = json.loads(next(four.folder.iterdir()).read_text())
    by_worker = record["last_events"]["worker 1 (tp 1, pp 0, cp 0)"]
    failed = [e["not_compared"] for e in by_worker if e["stream"] == "finish save"]
    assert failed[0] == {"is_ok": False}


def fail(copy_list: np.ndarray) -> None:
    raise OSError("told to fail")


def test_another_answer_of_one_worker_is_a_result(make_four, caplog):
    four = make_four()
    four.step(plan(1))
    side = four.sides[0]
    bind = side.bind

    def bind_and_lose(p: StepPlan) -> None:
        bind(p)
        side._plan = None

    side.bind = bind_and_lose
    four.step(plan(2, failed=("r",)))
    assert "(result) at step 2 in take_failed_requests: worker 0 (tp 0," in caplog.text
    assert four.counted() == {"rank_divergences/result": 1}


def test_a_hook_that_is_called_twice_on_one_worker_is_order(make_four, caplog):
    four = make_four()
    four.step(plan(1))
    four.sides[3].take_failed_requests()
    four.step(plan(2))
    four.step(plan(3))
    assert "(order) at step 1 in take_failed_requests: worker 3 (tp 1, pp 1" in caplog.text


# Stalls ------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_whose_pulse_stops_is_named_while_the_scheduler_does_nothing(make_four, caplog):
    four = make_four(rank_consensus_stall_s=1.0)
    four.step(plan(1))
    wait_for(lambda: all(board.signs()[0] > 2 for board in four.boards.values()))
    four.sides[1]._checks._is_closed.set()  # the pulse ends, and nobody has said goodbye
    wait_for(lambda: "Found rank stall" in caplog.text)
    text = next(r.getMessage() for r in caplog.records if "Found rank" in r.getMessage())
    assert "worker 1 (tp 1, pp 0, cp 0): no sign of life" in text.splitlines()[0]
    four.step(plan(2))
    assert four.counted() == {"rank_divergences/stall": 1}


def test_workers_that_end_as_they_should_are_not_missed(make_four, caplog):
    four = make_four(rank_consensus_stall_s=0.5)
    four.step(plan(1))
    run(four.sides[0], plan(2))  # the last step of some only
    for side in four.sides:
        side.shutdown()
    time.sleep(1.5)
    assert "Found rank" not in caplog.text


def test_a_worker_that_does_not_begin_a_step_is_named(make_four, caplog):
    four = make_four(rank_consensus_stall_s=1.0)
    four.step(plan(1))
    for side in four.sides[:3]:
        run(side, plan(2))
    wait_for(lambda: "Found rank stall" in caplog.text)
    assert "at step 2: worker 3 (tp 1, pp 1, cp 0): step 2 was not begun" in caplog.text


def test_threads_end_with_their_side(make_four):
    four = make_four()
    checks: WorkerChecks = four.sides[0]._checks
    four.sides[0].shutdown()
    assert not checks._pulse.is_alive()
    four.checks.close()
    assert not four.checks._thread.is_alive()


def test_signs_are_left_several_times_in_each_deadline(tmp_path):
    assert look_interval_s(config(tmp_path, rank_consensus_stall_s=0.8)) == pytest.approx(0.1)
    assert look_interval_s(config(tmp_path, rank_consensus_stall_s=600)) == 1.0


# Marks -------------------------------------------------------------------------------------------


def test_the_guide_has_a_row_for_every_call_that_workers_mark():
    marks = {name: check_of(f) for name, f in vars(WorkerSide).items() if check_of(f) is not None}
    assert marks.keys() == MARKED
    rows = dict(re.findall(r"^\| `([^`]+)` \| `(\w+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert rows == {check.stream or name: name for name, check in marks.items()}


def test_virtual_ranks_mark_what_real_workers_mark(monkeypatch):
    """The unit tests of the checker rely on it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "core" / "ranks" / "support"))
    virtual = importlib.import_module("virtual_ranks").VirtualRank
    same = {"bind": "bind", "start": "_submit", "finish": "_publish"}
    same["take_failed_requests"] = "take_failed_requests"
    for theirs, ours in same.items():
        assert check_of(getattr(virtual, theirs)) == check_of(getattr(WorkerSide, ours))

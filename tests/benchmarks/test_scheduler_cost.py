"""The cost of scheduler hooks: independent of the context, small beside vLLM's block hashing."""

import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from vllm_hicache.connectors.page_sizes import DECODE_SAVE_TOKENS

pytestmark = [pytest.mark.services, pytest.mark.vllm]

PAGE = 16
SHORT, LONG = 2_000, 200_000
LONG_LIST_BYTES = 8 * LONG // PAGE  # one copied list of pages or blocks


class Effort:
    """Function calls and the largest allocation of a rig's hooks, step by step."""

    def __init__(self, rig: Any) -> None:
        self.calls = 0
        self.peak_bytes = 0
        self.counts_calls = True
        for name in ("build_connector_meta", "update_connector_output", "get_kv_connector_stats"):
            connector = rig.scheduler.connector
            setattr(connector, name, self._observed(getattr(connector, name)))

    def _observed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def count(frame: object, event: str, argument: object) -> None:
            self.calls += event in ("call", "c_call")

        def observed(*arguments: Any) -> Any:
            if self.counts_calls:
                sys.setprofile(count)
                try:
                    return hook(*arguments)
                finally:
                    sys.setprofile(None)
            tracemalloc.start()
            try:
                return hook(*arguments)
            finally:
                self.peak_bytes = max(self.peak_bytes, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()

        return observed


@pytest.fixture
def open_rig(tmp_path) -> Iterator[Callable[..., Any]]:
    from vllm_hicache.benchmarks.scheduler_rig import RigOptions, SchedulerRig

    rigs = []

    def open_one(num_tokens: int, page_size: int = PAGE) -> Any:
        options = RigOptions(
            folder=tmp_path / str(num_tokens),
            max_tokens=num_tokens + 1024,
            num_requests=4,
            num_tokens=num_tokens + 1024,
            block_size=16,
            page_size=page_size,
            batched_tokens=16384,
            num_workers=1,
            has_storage=False,
        )
        rigs.append(SchedulerRig(options))
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.__exit__()


def _efforts(rig: Any, num_tokens: int, *, counts_calls: bool) -> dict[bool, list[int]]:
    """Whether a decode step of a prompt of this length saves pages -> effort of such steps."""
    request = rig.new_request(f"long-{counts_calls}", list(range(num_tokens)), 700)
    rig.scheduler.add_request(request)
    while request.num_computed_tokens < num_tokens:
        rig.step()
    effort = Effort(rig)
    effort.counts_calls = counts_calls
    found: dict[bool, list[int]] = {}
    for _ in range(2 * DECODE_SAVE_TOKENS + 8):
        effort.calls = effort.peak_bytes = 0
        step = rig.step()
        found.setdefault(step.num_pages > 0, []).append(
            effort.calls if counts_calls else effort.peak_bytes
        )
    assert found.keys() == {False, True}
    return found


def test_a_step_makes_as_many_calls_in_a_long_context_as_in_a_short_one(open_rig):
    short = _efforts(open_rig(SHORT), SHORT, counts_calls=True)
    long = _efforts(open_rig(LONG), LONG, counts_calls=True)
    assert median(long[0]) == median(short[0])
    # A parent is found by binary search: a few more comparisons.
    assert median(long[1]) <= 1.2 * median(short[1])


def test_a_step_copies_nothing_as_long_as_the_context(open_rig):
    long = _efforts(open_rig(LONG), LONG, counts_calls=False)
    assert max(long[0]) < LONG_LIST_BYTES / 8
    assert max(long[1]) < LONG_LIST_BYTES / 4


def test_arrival_takes_at_most_a_third_of_vllms_block_hashing(open_rig):
    rig = open_rig(LONG, page_size=256)
    ratios = []
    for i in range(5):
        request = rig.new_request(f"arrival-{i}", list(range(i, i + LONG)), 1)
        rig.clock.take()
        rig.scheduler.add_request(request)
        rig.scheduler.connector.get_num_new_matched_tokens(request, 0)
        seconds, _ = rig.clock.take()
        assert rig.hashing_s > 0
        ratios.append(sum(seconds.values()) / rig.hashing_s)
        rig.abort(request)
    assert median(ratios) <= 1 / 3


def test_the_benchmark_tells_every_kind_of_step_and_writes_them(tmp_path, monkeypatch, capsys):
    from vllm_hicache.benchmarks import scheduler_cost

    sizes = "--prompt 6000 --running 4 --short-prompt 256 --steps 300 --arrivals 2 --page-size 256"
    arguments = [*sizes.split(), "--batched-tokens", "2048", "--storage", "none"]
    monkeypatch.setattr(sys, "argv", ["scheduler_cost.py", *arguments, "--out", str(tmp_path)])
    assert scheduler_cost.main() == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "scheduler_cost.json").read_text())
    kinds = {"adds nothing", "completes one page", "prefills a chunk"}
    assert record["steps"].keys() == kinds
    assert all(kind in printed for kind in kinds)
    # 4 requests of 300 steps at pages of 256 tokens, and the long one.
    steps = Counter({kind: found["steps"] for kind, found in record["steps"].items()})
    assert steps["completes one page"] in range(4, 11)
    assert steps["adds nothing"] + steps["completes one page"] <= 300
    assert record["machine"]["cores"] >= 1
    assert record["commit"]
    assert record["arrival_s"]["vllm hashing"] > 0


@pytest.mark.parametrize(
    ("idle_us", "hooks_s", "expected"),
    [(199.0, 0.033, 0), (201.0, 0.033, 1), (199.0, 0.034, 1), (float("nan"), 0.034, 2)],
)
def test_a_missed_target_is_told(idle_us, hooks_s, expected):
    from vllm_hicache.benchmarks import scheduler_cost

    kinds = {scheduler_cost.NOTHING: {"median_us": idle_us}}
    arrival = {"hooks": hooks_s, "vllm hashing": 0.1}
    assert len(scheduler_cost.misses(kinds, arrival)) == expected


def test_the_checkers_benchmark_compares_both_modes_and_writes_them(tmp_path, monkeypatch, capsys):
    from vllm_hicache.benchmarks import rank_consensus_cost

    arguments = "--running 2 --short-prompt 256 --steps 40 --page-size 64 --workers 2 --step-ms 10"
    options = [*arguments.split(), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["rank_consensus_cost.py", *options])
    assert rank_consensus_cost.main() == 0
    record = json.loads((tmp_path / "rank_consensus_cost.json").read_text())
    assert record["hooks_us"].keys() == record["scheduler_us"].keys() == {"off", "report"}
    assert record["message_bytes"] > 100
    assert "of a step of 10 ms" in capsys.readouterr().out

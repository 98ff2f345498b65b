"""Virtual workers that diverge on purpose, each class, and what the checker says of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from virtual_ranks import (
    VirtualRank,
    VirtualRanks,
    ask_twice,
    at_step,
    change_rows,
    change_rows_after_bind,
    lose_failures,
    messages,
    skip_first_save,
    skip_plan,
)

from vllm_hicache.errors import RankDivergence
from vllm_hicache.plan import Direction
from vllm_hicache.rank_events import Event
from vllm_hicache.rank_places import places
from vllm_hicache.rank_stall import Stall, StallWatch, WorkerSigns

DOCUMENT = Path(__file__).parents[3] / "docs" / "debugging.md"
TOPOLOGIES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 2), (8, 4, 2)]
CLASSES = [
    (skip_plan, "order", "bind"),
    (skip_first_save, "order", "start"),
    (ask_twice, "order", "take_failed_requests"),
    (change_rows, "arguments", "bind"),
    (change_rows_after_bind, "arguments", "start"),
    (lose_failures, "result", "take_failed_requests"),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_workers_at_any_pace_with_failing_copies_do_not_diverge(topology, seed, tmp_path, caplog):
    tp, pp, cp = topology
    ranks = VirtualRanks(tmp_path, tp, pp, cp, seed=seed)
    ranks.run_at_random(12 if tp < 8 else 4)
    assert ranks.counted() == {}
    assert messages(caplog) == []
    assert list(tmp_path.iterdir()) == []
    assert ranks.next_op[Direction.SAVE] > 1
    assert ranks.next_op[Direction.LOAD] > 1


@pytest.mark.parametrize(("run", "kind", "call"), CLASSES)
@pytest.mark.parametrize("topology", [(2, 2, 1), (4, 2, 2)], ids=str)
def test_the_class_the_call_the_step_and_the_worker_of_a_divergence_are_named(
    run, kind, call, topology, tmp_path, caplog
):
    tp, pp, cp = topology
    odd = tp * pp * cp - 2
    ranks = VirtualRanks(tmp_path, tp, pp, cp, wrong={odd: at_step(3, run)})
    for _ in range(6):
        ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    ranks.settle()
    first = messages(caplog)[0].splitlines()[0]
    place = f"worker {odd} (tp {odd % tp}, pp {odd // (tp * cp)}, cp {odd // tp % cp})"
    assert first == f"Found rank divergence ({kind}) at step 3 in {call}: {place}"
    assert ranks.counted()[kind] >= 1


@pytest.mark.parametrize(("run", "kind", "call"), CLASSES)
def test_a_divergence_is_found_among_workers_at_any_pace(run, kind, call, tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, seed=5, wrong={3: at_step(4, run)})

    def plan_of(**_given):
        return VirtualRanks.new_plan(ranks, saves=2, loads=1, failed=["r"])

    ranks.new_plan = plan_of
    ranks.run_at_random(10)
    first = messages(caplog)[0].splitlines()[0]
    assert first.startswith(f"Found rank divergence ({kind}) at step 4 in {call}: worker 3 ")


@pytest.mark.parametrize(("run", "kind", "call"), CLASSES)
def test_checking_goes_on_after_a_divergence_and_finds_the_next_one(
    run, kind, call, tmp_path, caplog
):
    ranks = VirtualRanks(tmp_path, wrong={1: at_step(2, run)})
    for _ in range(4):
        ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    ranks.settle()
    told, counted = len(messages(caplog)), ranks.counted()
    assert told >= 1
    for _ in range(3):
        ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    assert ranks.counted() == counted
    ranks.wrong = {2: at_step(ranks.number + 1, run)}
    ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    ranks.settle()
    assert ranks.counted()[kind] > counted[kind]
    assert len(messages(caplog)) == told  # of the same class and call: counted, not told again


def test_the_first_of_several_divergent_events_is_told_first(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, wrong={3: at_step(2, change_rows)})
    for _ in range(3):
        ranks.step(ranks.new_plan(saves=1))
    calls = [re.match(r".* in (\w+):", text).group(1) for text in messages(caplog)]
    assert calls == ["bind", "start"]


def skip_saves(rank, plan):
    rank.bind(plan)
    rank.take_failed_requests()


def test_a_last_copy_that_is_missing_is_found_with_the_next_one(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, wrong={3: at_step(2, skip_saves)})
    for number in range(1, 8):
        ranks.step(ranks.new_plan(saves=int(number in (2, 6))))
    first = messages(caplog)[0].splitlines()[0]
    assert first == "Found rank divergence (order) at step 2 in start: worker 3 (tp 1, pp 1, cp 0)"


def test_the_earlier_step_is_told_first_even_when_it_is_found_later(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, wrong={3: at_step(2, skip_saves), 1: at_step(4, change_rows)})
    for number in range(1, 5):
        ranks.step(ranks.new_plan(saves=int(number in (2, 4))))
    told = [text.splitlines()[0] for text in messages(caplog)]
    assert "(order) at step 2 in start: worker 3" in told[0]
    assert "(order) at step 2 in finish: worker 3" in told[1]
    assert "(arguments) at step 4 in bind: worker 1" in told[2]


def test_all_workers_that_got_another_plan_than_was_sent_are_named(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, 2, 1, wrong=dict.fromkeys((0, 1), at_step(1, change_rows)))
    ranks.step(ranks.new_plan(saves=1))
    text = messages(caplog)[0]
    assert "in bind: no side has a majority" not in text
    assert text.startswith("Found rank divergence (arguments) at step 1 in bind: worker 0 ")
    assert "worker 1 (tp 1, pp 0, cp 0)" in text.splitlines()[0]
    assert "  scheduler: step 1 bind(" in text


def test_of_two_workers_that_differ_neither_is_blamed(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, 2, 1, wrong={1: at_step(1, lose_failures)})
    ranks.step(ranks.new_plan(failed=["r"]))
    first = messages(caplog)[0].splitlines()[0]
    assert "in take_failed_requests: no side has a majority among worker 0 " in first


def test_each_worker_has_a_line_with_its_arguments_and_results(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, wrong={3: at_step(1, lose_failures)})
    ranks.step(ranks.new_plan(failed=["r7"]))
    lines = messages(caplog)[0].splitlines()
    assert lines[1] == (
        "  worker 0 (tp 0, pp 0, cp 0): step 1 take_failed_requests() -> result=['r7']"
    )
    assert lines[4] == "  worker 3 (tp 1, pp 1, cp 0): step 1 take_failed_requests() -> result=[]"


def test_the_file_holds_the_last_events_of_all_workers_and_of_the_scheduler(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, num_events=5, wrong={1: at_step(9, ask_twice)})
    for _ in range(10):
        decided = (("result.number", ranks.number + 1),)
        ranks.consensus.decisions.begin(Event(0, "p", "plan_step", False, (), (), decided, ()))
        ranks.step(ranks.new_plan(saves=1))
    (path,) = re.findall(r"last events of all: (\S+)", messages(caplog)[0])
    assert Path(path).stat().st_mode & 0o077 == 0
    record = json.loads(Path(path).read_text())
    assert record["class"] == "order"
    assert record["step"] == 9
    assert record["differing"] == ["worker 1 (tp 1, pp 0, cp 0)"]
    last = record["last_events"]
    assert len(last) == 5
    assert {len(events) for events in last.values()} == {5}
    decided = [e["result"].get("result.number") for e in last["scheduler"]]
    assert decided == [None, 9, None, 10, None]
    assert [e["call"] for e in last["scheduler"]][-2:] == ["plan_step", "bind"]
    worker = last["worker 2 (tp 0, pp 1, cp 0)"]
    assert [e["call"] for e in worker][-2:] == ["take_failed_requests", "finish"]
    assert worker[-1]["not_compared"] == {"is_ok": True}


def test_a_file_that_cannot_be_written_is_told_and_hides_nothing(tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    ranks = VirtualRanks(tmp_path / "taken", wrong={1: at_step(1, ask_twice)})
    ranks.step(ranks.new_plan())
    ranks.settle()
    text = messages(caplog)[0]
    assert text.startswith("Found rank divergence (order)")
    assert "last events of all: not written" in text


# Modes -------------------------------------------------------------------------------------------


def test_raise_stops_the_scheduler_with_the_first_line(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, mode="raise", wrong={2: at_step(1, change_rows)})
    with pytest.raises(RankDivergence, match=r"\(arguments\) at step 1 in bind: worker 2 "):
        ranks.step(ranks.new_plan(saves=1))
    assert messages(caplog)[0].startswith("Found rank divergence (arguments)")


def test_report_does_not_stop_anything(tmp_path):
    ranks = VirtualRanks(tmp_path, mode="report", wrong={2: at_step(1, change_rows)})
    ranks.step(ranks.new_plan(saves=1))
    assert ranks.stopped == []


def test_abort_ends_the_process_after_the_log(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, mode="abort", wrong={2: at_step(1, change_rows)})
    ranks.step(ranks.new_plan(saves=1))
    assert ranks.stopped == ["process"]
    assert messages(caplog)[0].startswith("Found rank divergence (arguments)")


def test_abort_ends_a_real_process_with_its_own_status(tmp_path):
    program = (
        "import logging, sys, threading, time\n"
        "from vllm_hicache.rank_consensus import *\n"
        "from vllm_hicache.rank_places import places\n"
        "from vllm_hicache.rank_stall import Stall\n"
        "logging.basicConfig()\n"
        "options = ConsensusOptions('abort', 8, sys.argv[1])\n"
        "checker = RankConsensus(options, places(2, 1), Metrics())\n"
        "threading.Thread(target=checker.report_stall, args=(Stall((1,), 3, 'x'), {})).start()\n"
        "time.sleep(60)\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 70
    assert "Found rank stall at step 3: worker 1 (tp 1, pp 0, cp 0): x" in run.stderr


SIGNS = {i: WorkerSigns(5, 7, 7 - (i == 1), 0, 0) for i in range(4)}
STALL = Stall((1,), 7, "no sign of life of the process for 60 s")


@pytest.mark.parametrize("mode", ["report", "raise"])
def test_a_stall_is_told_at_once_and_raised_when_the_scheduler_comes_back(mode, tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, mode=mode)
    ranks.step(ranks.new_plan(saves=1))
    ranks.consensus.report_stall(STALL, SIGNS)
    text = messages(caplog)[0]
    assert text.startswith(f"Found rank stall at step 7: worker 1 (tp 1, pp 0, cp 0): {STALL.why}")
    assert "  worker 1 (tp 1, pp 0, cp 0): step 7 begun, 6 ended" in text
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["class"] == "stall"
    assert record["stopped"] == ["worker 1 (tp 1, pp 0, cp 0)"]
    assert all(record["last_events"][name] for name in record["signs"])
    if mode == "raise":
        with pytest.raises(RankDivergence, match="Found rank stall at step 7: worker 1 "):
            ranks.step(ranks.new_plan())
    else:
        ranks.step(ranks.new_plan())
    assert ranks.counted() == {"stall": 1}


# Reports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_report_is_told_and_is_no_divergence(seed, tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, seed=seed)
    ranks.run_at_random(4)
    ranks.send(ranks.new_plan(saves=2, loads=2))
    ranks.run_next(2)
    ranks.ranks[2].report()  # is lost
    ranks.run_at_random(4)
    assert ranks.counted() == {}
    lost = [r.getMessage() for r in caplog.records if "was lost" in r.getMessage()]
    assert len(lost) == 1
    assert "a report of worker 2 (tp 0, pp 1, cp 0) was lost" in lost[0]


@pytest.mark.parametrize(("run", "kind", "call"), CLASSES)
def test_a_divergence_after_a_lost_report_is_found(run, kind, call, tmp_path, caplog):
    ranks = VirtualRanks(tmp_path)
    ranks.send(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    for i in range(4):
        ranks.run_next(i)
    ranks.ranks[2].report()  # is lost
    ranks.absorb(0, 1, 3)
    for _ in range(2):
        ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    ranks.wrong = {3: at_step(4, run)}
    ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    ranks.step(ranks.new_plan(saves=2, loads=1, failed=["r"]))
    ranks.settle()
    assert ranks.counted()[kind] >= 1
    assert f"({kind}) at step 4 in {call}: worker 3 " in messages(caplog)[0]


def test_a_report_that_comes_twice_counts_once(tmp_path):
    ranks = VirtualRanks(tmp_path, 2, 1)
    ranks.send(ranks.new_plan(saves=1))
    ranks.run_next(0)
    ranks.run_next(1)
    batches = {rank.worker_id: rank.report() for rank in ranks.ranks}
    ranks.consensus.absorb(batches, batches.keys())
    ranks.consensus.absorb(batches, batches.keys())
    ranks.settle()
    assert ranks.counted() == {}


def test_a_worker_without_events_is_named_once_and_left_out(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path, wrong={1: at_step(2, change_rows)})
    for _ in range(3):
        ranks.send(ranks.new_plan(saves=1))
        for i in range(4):
            ranks.run_next(i)
        batches = {i: ranks.ranks[i].report() for i in range(3)}
        ranks.consensus.absorb(batches, range(4))
    silent = [r.getMessage() for r in caplog.records if "sends no events" in r.getMessage()]
    assert len(silent) == 1
    assert "worker 3 (tp 1, pp 1, cp 0)" in silent[0]
    text = messages(caplog)[0]
    assert "at step 2 in bind: worker 1 (tp 1, pp 0, cp 0)" in text
    assert ranks.counted() == {"arguments": 2}


def test_what_waits_to_be_compared_is_gone_when_all_have_done_it(tmp_path):
    ranks = VirtualRanks(tmp_path)
    ranks.run_at_random(30)
    ranks.settle()
    waiting = {
        name: [len(queue) for queue in stream._queues]
        for name, stream in ranks.consensus._streams.items()
    }
    assert set(waiting) == {
        "plans",
        "start save",
        "start load",
        "finish save",
        "finish load",
        "take_failed_requests",
    }
    assert not any(any(lengths) for lengths in waiting.values())


# Outcomes ----------------------------------------------------------------------------------------


def test_a_copy_that_fails_on_one_worker_is_no_divergence(tmp_path, caplog):
    ranks = VirtualRanks(tmp_path)
    ranks.send(ranks.new_plan(saves=1, loads=1))
    for i, rank in enumerate(ranks.ranks):
        ranks.run_next(i)
        rank.finish_next(Direction.SAVE, is_ok=i != 1)
        rank.finish_next(Direction.LOAD, is_ok=i != 2)
    ranks.absorb()
    ranks.settle()
    assert messages(caplog) == []
    assert ranks.counted() == {}


# Guide -------------------------------------------------------------------------------------------


def example(folder: Path, caplog) -> str:
    """The divergence of the guide: one worker receives another plan than the three others."""
    ranks = VirtualRanks(folder, wrong={3: at_step(12, change_rows)})
    for _ in range(12):
        ranks.step(ranks.new_plan(saves=1))
    return messages(caplog)[0]


def example_stall(folder: Path, caplog) -> str:
    """Worker 1 is stopped before step 13; worker 0 waits for it, and the second stage for both."""
    watch = StallWatch(places(2, 2), deadline_s=60)
    for second in range(62):
        signs = {i: WorkerSigns(second, 12, 12, 12, 3) for i in range(4)}
        signs[0] = signs[0]._replace(steps_begun=13)
        signs[1] = signs[1]._replace(pulse=0)
        stall = watch.look(signs, float(second))
        if stall is not None:
            VirtualRanks(folder).consensus.report_stall(stall, signs)
    (said,) = messages(caplog)
    return said


@pytest.mark.parametrize("make", [example, example_stall])
def test_the_guide_shows_what_the_checker_really_says(make, tmp_path, caplog):
    said = make(tmp_path, caplog)
    said = re.sub(r"\S+/hicache-ranks-\w+\.json", "/tmp/hicache-ranks-k3v9x2.json", said)
    blocks = re.findall(r"```text\n(.*?)\n```", DOCUMENT.read_text(), re.DOTALL)
    assert said in blocks, said


def test_the_guide_lists_every_call_that_workers_mark():
    from vllm_hicache.checked_calls import check_of

    marked = [name for name in vars(VirtualRank) if check_of(vars(VirtualRank)[name]) is not None]
    assert len(marked) == 4
    streams = set(re.findall(r"^\| `([^`]+)` \| `", DOCUMENT.read_text(), re.MULTILINE))
    named = {check_of(vars(VirtualRank)[name]).stream or name for name in marked}
    assert named <= streams

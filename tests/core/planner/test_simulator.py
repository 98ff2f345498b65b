"""The simulator: fresh stories, old ones that once failed, and what it tells of itself."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from vllm_hicache.simulate import faults
from vllm_hicache.simulate.faults import Result, main, run_all, run_seeds, trace
from vllm_hicache.simulate.past_failures import PAST_FAILURES
from vllm_hicache.simulate.required import FAULTS, FULL_SEEDS, FULL_STEPS, TRANSITIONS, too_rare
from vllm_hicache.storage_link import WorldAnswer

STEPS = 100
SEEDS_PER_TEST = 35
FIRST_SEED = int.from_bytes(os.urandom(5), "little")
"""New stories at every push; a failure prints the command that repeats it."""


def told(result: Result) -> list[str]:
    return [f"{failure.command}\n    {failure.what}" for failure in result.failures]


@pytest.mark.parametrize("part", range(4))
def test_no_fresh_story_breaks_a_promise(part):
    first = FIRST_SEED + part * SEEDS_PER_TEST
    result = run_seeds(range(first, first + SEEDS_PER_TEST), STEPS)
    assert told(result) == []
    assert result.num_steps == SEEDS_PER_TEST * STEPS
    assert result.num_checked > result.num_steps


@pytest.mark.parametrize("past", PAST_FAILURES, ids=lambda past: f"seed{past.seed}")
def test_a_story_that_once_failed_passes_now(past):
    assert told(run_seeds([past.seed], past.steps)) == []


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_a_million_steps_over_ten_thousand_seeds_break_no_promise():
    result = run_all(0, FULL_SEEDS, FULL_STEPS // FULL_SEEDS, os.cpu_count() or 1)
    assert told(result) == []
    assert (result.num_seeds, result.num_steps) == (FULL_SEEDS, FULL_STEPS)
    assert too_rare(result.counts) == []


def test_a_seed_tells_the_same_story_in_every_process():
    program = (
        "from vllm_hicache.simulate.faults import trace\n"
        "for seed in (3, 4, 5, 6): print('\\n'.join(trace(seed, 100, 10**6)[0]))"
    )
    stories = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-P", "-c", program]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        stories.append(run.stdout)
    assert stories[0] == stories[1]
    assert stories[0].count("arrives with") > 10


def test_processes_side_by_side_find_the_same_as_one():
    assert run_all(40, 4, 50, jobs=2).counts == run_all(40, 4, 50, jobs=1).counts


def test_a_violation_is_printed_with_the_command_that_shows_it(monkeypatch, capsys):
    monkeypatch.setattr(faults, "PAST_FAILURES", ())
    monkeypatch.setattr(WorldAnswer, "agreed", property(lambda self: max(self.progress)))
    assert main(["--seeds", "20", "--steps", "2000", "--first-seed", "0"]) == 1
    printed = capsys.readouterr().out
    command = next(line for line in printed.splitlines() if "--trace" in line)
    assert "should hold" in printed
    arguments = command.split("faults ")[1].split()
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "should hold" in shown
    assert "arrives with" in shown
    assert "Script(world=" in shown


def test_a_seed_without_a_fault_says_so(capsys):
    assert main(["--seed", "7"]) == 0
    assert capsys.readouterr().out == "seed 7: no rule was broken\n"


def test_a_run_prints_every_fault_and_transition_and_its_speed(capsys):
    assert main(["--seeds", "4", "--steps", "200", "--fresh"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}\n" in printed for name in (*FAULTS, *TRANSITIONS))
    assert "200 steps over 4 seeds" in printed
    assert "0 violations" in printed


def test_a_full_run_that_did_too_little_fails_and_says_what_was_rare(monkeypatch, capsys):
    monkeypatch.setattr(faults, "FULL_STEPS", 40)
    monkeypatch.setattr(faults, "FULL_SEEDS", 4)
    assert main(["--seeds", "4", "--steps", "40"]) == 3
    assert "fewer than 1,000 times: aborted while loading" in capsys.readouterr().out


def test_what_happened_often_enough_is_not_rare():
    enough = Counter(dict.fromkeys((*FAULTS, *TRANSITIONS), 1000))
    assert too_rare(enough) == []
    enough["resets"] -= 1
    assert too_rare(enough) == ["resets"]


def test_a_trace_is_as_long_as_asked_for():
    lines, failure = trace(9, 100, last_lines=10)
    assert failure is None
    assert len(lines) == 11  # the circumstances come first

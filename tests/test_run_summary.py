"""The closing of a run: an unlisted skip, a dead part or an empty run is never green."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).with_name("run_summary.py")
CONFTEST = Path(__file__).with_name("conftest.py")
PASSED = {"test": "tests/test_a.py::test_one", "outcome": "passed", "reason": ""}
FAILED = {"test": "tests/test_a.py::test_one", "outcome": "failed", "reason": ""}
SKIPPED = {"test": "tests/test_a.py::test_two[x]", "outcome": "skipped", "reason": "no redis"}
FINISHED = {"exit_status": 0, "seconds": 1.5}


def _close(tmp_path, *logs, allowed="", report=False, again=None):
    paths = []
    for number, lines in enumerate(logs):
        paths.append(tmp_path / f"part{number}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "allowed.txt").write_text(allowed)
    options = ["--allowed", tmp_path / "allowed.txt"]
    options += ["--report", tmp_path / "report.md"] if report else []
    if again is not None:
        (tmp_path / "again.jsonl").write_text("".join(json.dumps(line) + "\n" for line in again))
        options += ["--again", tmp_path / "again.jsonl"]
    command = [sys.executable, SCRIPT, *options, *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_passing_run_is_green_and_closes_like_pytest(tmp_path):
    run = _close(tmp_path, [PASSED, FINISHED], [PASSED, FINISHED])
    assert run.returncode == 0
    assert run.stdout.splitlines()[-1] == "====== 2 passed in 3.00s ======"


def test_an_unlisted_skip_fails_the_run(tmp_path):
    run = _close(tmp_path, [PASSED, SKIPPED, FINISHED], allowed="tests/test_b.py::*: not this one")
    assert run.returncode == 1
    assert "skipped without leave: tests/test_a.py::test_two[x] (no redis)" in run.stdout


def test_the_slowest_files_are_told_over_all_parts(tmp_path):
    first = FINISHED | {"files": {"tests/test_a.py": 4.0, "tests/test_b.py": 5.0}}
    second = FINISHED | {"files": {"tests/test_a.py": 2.0}}
    run = _close(tmp_path, [PASSED, first], [PASSED, second], report=True)
    told = run.stdout.partition("slowest files")[2]
    assert told.index("6.0 tests/test_a.py") < told.index("5.0 tests/test_b.py")
    assert "| tests/test_a.py | 6 |" in (tmp_path / "report.md").read_text()


def test_the_report_has_a_row_for_each_fault_that_was_measured(tmp_path):
    episode = {"fault": "redis killed", "p99_s": 0.771, "control_p99_s": 0.5}
    episode |= {"recovery_s": 13.26, "num_requests": 250}
    (tmp_path / "fault-episodes.jsonl").write_text(json.dumps(episode) + "\n")
    assert _close(tmp_path, [PASSED, FINISHED], report=True).returncode == 0
    assert "| redis killed | 250 | 0.77 | 0.50 | 13.3 |" in (tmp_path / "report.md").read_text()


def test_a_listed_skip_is_shown_with_its_reason(tmp_path):
    allowed = "# comment\n\ntests/test_a.py::test_two*: one box has no redis\n"
    run = _close(tmp_path, [PASSED, SKIPPED, FINISHED], allowed=allowed)
    assert run.returncode == 0
    assert "test_two[x]: no redis [one box has no redis]" in run.stdout
    assert "1 passed, 1 skipped" in run.stdout


def test_leave_for_one_reason_is_no_leave_for_another(tmp_path):
    allowed = "tests/test_a.py::test_two* (needs a CUDA device): CPU machines have none\n"
    run = _close(tmp_path, [PASSED, SKIPPED, FINISHED], allowed=allowed)
    assert run.returncode == 1
    reason = allowed.replace("needs a CUDA device", "no redis")
    assert _close(tmp_path, [PASSED, SKIPPED, FINISHED], allowed=reason).returncode == 0


def test_a_listed_skip_without_a_reason_is_refused(tmp_path):
    run = _close(tmp_path, [PASSED, FINISHED], allowed="tests/test_a.py::test_two: \n")
    assert run.returncode == 1
    assert "allowed.txt:1" in run.stderr


def test_a_failure_fails_the_run_even_after_the_test_passed(tmp_path):
    run = _close(tmp_path, [PASSED, FAILED, {"exit_status": 1, "seconds": 1.0}])
    assert run.returncode == 1
    assert "1 failed in" in run.stdout


def test_what_failed_and_passes_when_run_again_is_green_and_told_as_both(tmp_path):
    first = [{"commit": "abc123"}, FAILED, {"exit_status": 1, "seconds": 1.0}]
    again = [{"commit": "def456"}, PASSED, FINISHED]
    run = _close(tmp_path, first, again=again, report=True)
    assert run.returncode == 0
    report = (tmp_path / "report.md").read_text()
    assert "| 1 | 0 | 0 | 1 | abc123 |" in report
    told = "Failed in that run, and passed when run again on def456:\n\n- tests/test_a.py::test_one"
    assert told in report


def test_what_fails_again_or_is_not_run_again_stays_red(tmp_path):
    first = [FAILED, {"exit_status": 1, "seconds": 1.0}]
    for again in ([FAILED, {"exit_status": 1, "seconds": 1.0}], [FINISHED]):
        run = _close(tmp_path, first, again=again, report=True)
        assert run.returncode == 1
        assert "failed: tests/test_a.py::test_one" in run.stdout


@pytest.mark.parametrize(
    "dead",
    [[PASSED], [PASSED, {"exit_status": 3, "seconds": 1.0}], [{"exit_status": 5, "seconds": 0}]],
    ids=["killed", "internal error", "nothing collected"],
)
def test_a_part_that_did_not_reach_its_end_fails_the_run(tmp_path, dead):
    run = _close(tmp_path, [PASSED, FINISHED], dead)
    assert run.returncode == 1
    assert "part1: ended with pytest status" in run.stdout


def test_a_missing_log_fails_the_run(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path / "absent.jsonl"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "absent: ended with pytest status None" in run.stdout


def test_a_run_in_which_nothing_passed_is_not_green(tmp_path):
    run = _close(tmp_path, [SKIPPED, FINISHED], allowed="tests/*: all of them")
    assert run.returncode == 1
    assert "no test passed" in run.stdout


def test_the_report_holds_date_commit_counts_and_skips(tmp_path):
    _close(tmp_path, [{"commit": "abc123"}, PASSED, SKIPPED, FINISHED], report=True)
    report = (tmp_path / "report.md").read_text()
    assert re.search(r"\| date \| \d{4}-\d\d-\d\d \d\d:\d\d UTC \|", report)
    assert "| part0 | 1 | 0 | 1 | 2 | abc123 |" in report
    assert "test_two[x]: no redis [NOT ALLOWED]" in report
    assert "## Not green" in report


def test_the_result_log_holds_every_outcome_of_a_real_run(tmp_path):
    (tmp_path / "conftest.py").write_bytes(CONFTEST.read_bytes())
    (tmp_path / "test_skipped_module.py").write_text(
        "import pytest\npytest.importorskip('no_such_module')\n"
    )
    (tmp_path / "test_outcomes.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): raise ValueError\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_cannot_start(broken): pass\n"
        "def test_leaves(): pytest.skip('the reason')\n"
        "@pytest.mark.xfail(reason='known')\ndef test_expected(): raise ValueError\n"
    )
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", tmp_path, "--result-log", log, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seen = {line["test"]: (line["outcome"], line["reason"]) for line in lines[1:-1]}
    reason = seen.pop("test_skipped_module.py")[1]
    assert "could not import 'no_such_module'" in reason
    assert seen == {
        "test_outcomes.py::test_passes": ("passed", ""),
        "test_outcomes.py::test_fails": ("failed", ""),
        "test_outcomes.py::test_cannot_start": ("failed", ""),
        "test_outcomes.py::test_leaves": ("skipped", "the reason"),
        "test_outcomes.py::test_expected": ("xfailed", "known"),
    }, run.stdout
    assert lines[-1]["exit_status"] == 1

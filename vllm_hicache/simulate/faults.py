"""Run stories with faults: ``python -m vllm_hicache.simulate.faults --steps N --seeds M``.

A seed that breaks a promise is printed with the command that shows its last steps.
"""

import argparse
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from vllm_hicache.errors import HiCacheError
from vllm_hicache.simulate.past_failures import PAST_FAILURES
from vllm_hicache.simulate.required import (
    FAULTS,
    FULL_SEEDS,
    FULL_STEPS,
    MIN_TIMES,
    TRANSITIONS,
    too_rare,
)
from vllm_hicache.simulate.story import Story

DEFAULT_STEPS = 100
"""Steps of a story that is run alone."""
SEEDS_PER_BATCH = 50
LAST_LINES = 60
EXIT_VIOLATION, EXIT_TOO_RARE = 1, 3
BROKEN = (HiCacheError, AssertionError, LookupError)
"""What a broken promise looks like; the last comes of bookkeeping that lost something."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A story that broke a promise."""

    seed: int
    steps: int
    what: str

    @classmethod
    def of(cls, seed: int, steps: int, error: Exception) -> "Failure":
        return cls(seed, steps, f"{type(error).__name__}: {error}")

    @property
    def command(self) -> str:
        """Shows the same story again."""
        arguments = f"--seed {self.seed} --steps {self.steps} --trace"
        return f"python -m vllm_hicache.simulate.faults {arguments}"


@dataclass(slots=True)
class Result:
    """What some stories came to."""

    counts: Counter[str] = field(default_factory=Counter)
    num_seeds: int = 0
    num_steps: int = 0
    """Steps of scripts; those in which stories came to rest are not counted, but checked."""
    num_checked: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Result") -> None:
        self.counts += other.counts
        self.num_seeds += other.num_seeds
        self.num_steps += other.num_steps
        self.num_checked += other.num_checked
        self.failures += other.failures


def run_seed(seed: int, steps: int) -> Result:
    """One story. A broken promise is a failure of its seed; a crash names the seed as it passes."""
    result = Result(num_seeds=1, num_steps=steps)
    story: Story | None = None
    try:
        story = Story(seed)
        result.counts = story.run(steps)
    except BROKEN as error:
        result.failures.append(Failure.of(seed, steps, error))
    except Exception as error:
        error.add_note(Failure.of(seed, steps, error).command)
        raise
    if story is not None:
        result.num_checked = story.num_steps
    return result


def run_seeds(seeds: Sequence[int], steps: int) -> Result:
    """These stories, one after the other."""
    result = Result()
    for seed in seeds:
        result.add(run_seed(seed, steps))
    return result


def replay_past_failures() -> Result:
    """The stories that once failed, as long as they were then."""
    result = Result()
    for past in PAST_FAILURES:
        result.add(run_seed(past.seed, past.steps))
    return result


def trace(seed: int, steps: int, last_lines: int = LAST_LINES) -> tuple[list[str], Failure | None]:
    """The circumstances of a story and its last steps, and how it failed if it did."""
    lines: deque[str] = deque(maxlen=last_lines)
    story = Story(seed, lines.append)
    failure = None
    try:
        story.run(steps)
    except BROKEN as error:
        failure = Failure.of(seed, steps, error)
    return [str(story.first_script), *lines], failure


def _batches(first: int, num_seeds: int) -> Iterator[range]:
    for start in range(first, first + num_seeds, SEEDS_PER_BATCH):
        yield range(start, min(start + SEEDS_PER_BATCH, first + num_seeds))


def run_all(first: int, num_seeds: int, steps: int, jobs: int) -> Result:
    """All stories, on ``jobs`` processes."""
    result = Result()
    batches = list(_batches(first, num_seeds))
    if jobs <= 1:
        parts = map(run_seeds, batches, [steps] * len(batches))
        for part in parts:
            result.add(part)
        return result
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for part in pool.map(run_seeds, batches, [steps] * len(batches)):
            result.add(part)
    return result


def _print_counts(counts: Counter[str]) -> None:
    for title, names in (("faults", FAULTS), ("transitions", TRANSITIONS)):
        print(f"{title}:")
        for name in names:
            print(f"  {counts[name]:>11,}  {name}")
    others = sorted(counts.keys() - {*FAULTS, *TRANSITIONS})
    print("also:")
    for name in others:
        print(f"  {counts[name]:>11,}  {name}")


def _run_one(seed: int, steps: int, *, shows_trace: bool) -> int:
    lines, failure = trace(seed, steps, 10**6 if shows_trace else LAST_LINES)
    if shows_trace or failure is not None:
        print("\n".join(lines))
    print(f"seed {seed}: {failure.what if failure else 'no rule was broken'}")
    return EXIT_VIOLATION if failure else 0


def _run_many(arguments: argparse.Namespace) -> int:
    first = secrets.randbelow(2**48) if arguments.fresh else arguments.first_seed
    steps = max(1, arguments.steps // arguments.seeds)
    print(f"seeds {first} to {first + arguments.seeds - 1}, {steps} steps each", flush=True)
    started = time.monotonic()
    result = replay_past_failures()
    past, num_past = result.failures, result.num_seeds
    result = run_all(first, arguments.seeds, steps, arguments.jobs)
    seconds = time.monotonic() - started
    _print_counts(result.counts)
    print(
        f"{result.num_steps:,} steps over {result.num_seeds:,} seeds and "
        f"{result.num_checked - result.num_steps:,} more to come to rest, all checked, "
        f"{num_past} past failures replayed, in {seconds:,.0f} s: "
        f"{result.num_steps / seconds:,.0f} steps/s"
    )
    failures = past + result.failures
    print(f"{len(failures)} violations")
    for failure in failures[:20]:
        print(f"seed {failure.seed}: {failure.what}\n  {failure.command}")
    if failures:
        return EXIT_VIOLATION
    is_full = result.num_steps >= FULL_STEPS and result.num_seeds >= FULL_SEEDS
    rare = too_rare(result.counts) if is_full else []
    if rare:
        print(f"fewer than {MIN_TIMES:,} times: {', '.join(rare)}")
        return EXIT_TOO_RARE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_hicache.simulate.faults", description=__doc__
    )
    parser.add_argument(
        "--steps", type=int, help="of all stories together; with --seed, of that one"
    )
    parser.add_argument("--seeds", type=int, default=FULL_SEEDS, help="number of stories")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="draw the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="run this story alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every step")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 after a violation, or 3 where a full run did not do enough."""
    arguments = _parser().parse_args(argv)
    if arguments.seed is not None:
        steps = arguments.steps or DEFAULT_STEPS
        return _run_one(arguments.seed, steps, shows_trace=arguments.trace)
    arguments.steps = arguments.steps or arguments.seeds * DEFAULT_STEPS
    return _run_many(arguments)


if __name__ == "__main__":
    sys.exit(main())

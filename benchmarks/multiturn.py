"""``hicache bench multiturn``: conversations that share system prompts, many at once.

Every arm's engine holds the same conversations: groups that share a system prompt, turns that
append the model's own answer and the next message. ``--concurrency`` clients each take the turn
that waits longest, without time to think. By default the device holds a quarter of the KV and
host memory all of it.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_hicache.benchmarks.answer_statistics import summarise, summary_tables, without_gaps
from vllm_hicache.benchmarks.arm_runs import Task, run_arms
from vllm_hicache.benchmarks.bench_report import publish
from vllm_hicache.benchmarks.common_options import (
    Sizes,
    add_engine_options,
    plan_engines,
    print_plans,
    work_folder,
)
from vllm_hicache.benchmarks.conversations import Conversations
from vllm_hicache.benchmarks.model_shapes import vocab_size_of

NAME = "multiturn"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of the workload; the defaults are 64 GiB of KV with ``--shape llama-8b``."""
    add_engine_options(parser)
    add_workload_options(parser)
    parser.add_argument("--concurrency", type=int, default=32, help="turns under way at once")


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """What ``conversations_of`` reads, but for ``--seed``."""
    add = parser.add_argument
    add("--groups", type=int, default=4, help="system prompts")
    add("--conversations", type=int, default=8, help="of each group")
    add("--turns", type=int, default=10, help="of each conversation")
    add("--system-tokens", type=int, default=8192)
    add("--user-tokens", type=int, default=1024, help="new ones of each turn")
    add("--answer-tokens", type=int, default=512, help="of each turn")


def conversations_of(options: argparse.Namespace, vocab_size: int) -> Conversations:
    """The workload that the options describe."""
    return Conversations(
        groups=options.groups,
        per_group=options.conversations,
        turns=options.turns,
        system_tokens=options.system_tokens,
        user_tokens=options.user_tokens,
        answer_tokens=options.answer_tokens,
        vocab_size=vocab_size,
        seed=options.seed,
    )


def run(options: argparse.Namespace) -> int:
    """Measure all arms; 1 when one of them gave no result though it could run here."""
    with work_folder() as folder:
        work = conversations_of(options, vocab_size_of(options, folder))
        sizes = Sizes(work.longest_tokens, work.distinct_tokens, options.concurrency)
        plans = plan_engines(options, sizes, folder)
        if options.dry_run:
            return print_plans(plans, {"workload": asdict(work)})
        task = Task.of(
            options, NAME, {"conversations": asdict(work), "concurrency": options.concurrency}
        )
        outcome = run_arms(plans, task, folder)
    summary = summarise(outcome.results, "conversation", options.seed)
    findings = {
        "workload": {
            **asdict(work),
            "concurrency": options.concurrency,
            "distinct_tokens": work.distinct_tokens,
        },
        "plans": [plan.as_json() for plan in plans],
        "summary": summary,
        "results": without_gaps(outcome.results),
    }
    publish(NAME, outcome, findings, summary_tables(summary), options.out, plot)
    return int(outcome.has_failed)


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw a record."""
    from vllm_hicache.benchmarks.answer_plots import plot_answers

    plot_answers(path, record, "turn", "turn")

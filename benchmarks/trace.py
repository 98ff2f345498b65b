"""``hicache bench trace``: replays a trace of requests whose prompts share prefixes.

The format is that of the published Mooncake traces: a JSON object a line with ``timestamp`` in
ms, ``input_length``, ``output_length`` and ``hash_ids``, one for each 512 tokens of the prompt.
Every request is sent at its time, whatever still runs.
"""

import argparse
from dataclasses import asdict, astuple
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
from vllm_hicache.benchmarks.model_shapes import vocab_size_of
from vllm_hicache.benchmarks.trace_file import (
    TracePrompts,
    TraceRequest,
    distinct_tokens,
    read_trace,
    reusable_tokens,
    scale,
)
from vllm_hicache.errors import ConfigError

NAME = "trace"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which trace, how much of it, how fast and how long."""
    add_engine_options(parser)
    add = parser.add_argument
    add("trace", type=Path, help="file, one JSON object a line")
    add("--limit", type=int, help="take so many requests from the start")
    add("--time-scale", type=float, default=1.0, help="play it so many times as fast")
    add("--length-scale", type=float, default=1.0, help="on prompts and answers")
    add("--max-tokens", type=int, help="leave out requests that are longer, answer included")
    add("--concurrency", type=int, default=256, help="requests that the engine runs at once")
    add("--warm-up", type=int, default=4, help="requests that are not counted")


def requests_of(options: argparse.Namespace) -> tuple[list[TraceRequest], int, int]:
    """(requests, tokens of a block, how many were left out as too long)."""
    if options.time_scale <= 0 or options.length_scale <= 0:
        raise ConfigError("--time-scale and --length-scale must be above 0")
    scaled, block_tokens = scale(
        read_trace(options.trace, options.limit),
        time_scale=options.time_scale,
        length_scale=options.length_scale,
    )
    limit = options.max_tokens
    kept = [r for r in scaled if limit is None or r.input_tokens + r.output_tokens <= limit]
    if not kept:
        raise ConfigError(f"no request of {options.trace} has at most {limit} tokens")
    return kept, block_tokens, len(scaled) - len(kept)


def run(options: argparse.Namespace) -> int:
    """Measure all arms; 1 when one of them gave no result though it could run here."""
    requests, block_tokens, num_left_out = requests_of(options)
    with work_folder() as folder:
        prompts = TracePrompts(block_tokens, vocab_size_of(options, folder), options.seed)
        sizes = Sizes(
            longest=max(r.input_tokens + r.output_tokens for r in requests),
            distinct=distinct_tokens(requests, block_tokens),
            concurrency=options.concurrency,
        )
        plans = plan_engines(options, sizes, folder)
        workload = _describe(options, requests, block_tokens, sizes)
        if options.dry_run:
            return print_plans(plans, {"workload": workload})
        work = {
            "requests": [astuple(request) for request in requests],
            "prompts": asdict(prompts),
            "warm_up": options.warm_up,
        }
        outcome = run_arms(plans, Task.of(options, NAME, work), folder)
    if num_left_out:
        outcome.not_measured[f"{num_left_out} requests"] = (
            f"longer than --max-tokens {options.max_tokens}"
        )
    summary = summarise(outcome.results, "number", options.seed)
    findings = {
        "workload": workload,
        "plans": [plan.as_json() for plan in plans],
        "summary": summary,
        "results": without_gaps(outcome.results),
    }
    tables = [*summary_tables(summary), _ceiling(workload)]
    publish(NAME, outcome, findings, tables, options.out, plot)
    return int(outcome.has_failed)


def _describe(
    options: argparse.Namespace, requests: list[TraceRequest], block_tokens: int, sizes: Sizes
) -> dict[str, Any]:
    prompt_tokens = sum(request.input_tokens for request in requests)
    return {
        "trace": options.trace.name,
        "requests": len(requests),
        "time_scale": options.time_scale,
        "length_scale": options.length_scale,
        "block_tokens": block_tokens,
        "duration_s": requests[-1].arrival_s - requests[0].arrival_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(request.output_tokens for request in requests),
        "distinct_tokens": sizes.distinct,
        "reusable_share": reusable_tokens(requests, block_tokens) / prompt_tokens,
    }


def _ceiling(workload: dict[str, Any]) -> str:
    share = workload["reusable_share"]
    return f"A cache that keeps everything would serve {share:.1%} of the prompt tokens."


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw a record."""
    from vllm_hicache.benchmarks.answer_plots import plot_answers

    plot_answers(path, record, "due_s", "time of the request [s]")

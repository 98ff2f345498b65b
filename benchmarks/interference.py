"""``hicache bench interference``: what saving, restoring and files cost requests that decode.

A wave is so many requests with fresh prompts, all at once. Their tokens are timed while all of
them decode, alone and while stored prompts are restored beside them. Each engine's first wave
is not counted. Against an engine without a connector; the arm hicache+file writes to files
during its waves and restores from them.
"""

import argparse
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_hicache.benchmarks.arm_runs import Outcome, Task, run_arms
from vllm_hicache.benchmarks.arms import FILE_ARM, LABELS
from vllm_hicache.benchmarks.bench_report import publish
from vllm_hicache.benchmarks.bootstrap import STATISTICS, statistics
from vllm_hicache.benchmarks.common_options import (
    Sizes,
    add_engine_options,
    plan_engines,
    print_plans,
    work_folder,
)
from vllm_hicache.benchmarks.model_shapes import vocab_size_of
from vllm_hicache.benchmarks.run_record import table
from vllm_hicache.benchmarks.waves import QUIET, RESTORING, Waves
from vllm_hicache.errors import ConfigError

NAME = "interference"
Figures = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Sizes of the waves and of what is restored beside them."""
    add_engine_options(parser)
    parser.set_defaults(vs=f"none,{FILE_ARM}")
    add = parser.add_argument
    add("--concurrency", default="1,16,64", help="requests of a wave, several with commas")
    add("--waves", type=int, default=3, help="counted ones of each kind in each engine")
    add("--prompt-tokens", type=int, default=512, help="of each request of a wave")
    add("--answer-tokens", type=int, default=256, help="of each request of a wave")
    add("--seen", type=int, default=8, help="stored prompts that are restored during a wave")
    add("--seen-tokens", type=int, default=8192, help="of each of them")


def waves_of(options: argparse.Namespace, vocab_size: int) -> Waves:
    """What the options describe, for an engine without a connector."""
    try:
        concurrencies = tuple(int(word) for word in options.concurrency.split(","))
    except ValueError:
        raise ConfigError(f"--concurrency takes numbers, got {options.concurrency!r}") from None
    if min(concurrencies) < 1:
        raise ConfigError("--concurrency must be 1 or more")
    return Waves(
        concurrencies=concurrencies,
        waves=options.waves,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.answer_tokens,
        seen=options.seen,
        seen_tokens=options.seen_tokens,
        vocab_size=vocab_size,
        seed=options.seed,
        restores=False,
        from_files=False,
    )


def sizes_of(waves: Waves) -> Sizes:
    """The device holds a wave and what is restored beside it, host memory twice as much."""
    most = max(waves.concurrencies)
    wave = most * (waves.prompt_tokens + waves.output_tokens)
    restored = waves.seen * waves.seen_tokens
    longest = max(waves.prompt_tokens + waves.output_tokens, waves.seen_tokens + 1)
    return Sizes(longest, 2 * (wave + restored), most + 1)


def run(options: argparse.Namespace) -> int:
    """Measure all arms; 1 when one of them gave no result though it could run here."""
    with work_folder() as folder:
        waves = waves_of(options, vocab_size_of(options, folder))
        sizes = sizes_of(waves)
        # A restore is measured, not whether it pays.
        options.arm_options = ['hicache={"skip_slow_loads": false}', *options.arm_options]
        plans = plan_engines(options, sizes, folder, device_tokens=sizes.distinct // 2)
        if options.dry_run:
            return print_plans(plans, {"workload": asdict(waves)})
        by_arm = {
            plan.arm: {"restores": bool(plan.connector), "from_files": plan.arm == FILE_ARM}
            for plan in plans
        }
        outcome = run_arms(plans, Task.of(options, NAME, asdict(waves), by_arm), folder)
    if "none" in outcome.results:
        what = f"{RESTORING} of {LABELS['none']}"
        outcome.not_measured[what] = "it has nothing to restore from"
    summary = summarise_waves(outcome)
    findings = {
        "workload": asdict(waves),
        "plans": [plan.as_json() for plan in plans],
        "summary": summary,
        "results": _without_gaps(outcome),
    }
    publish(NAME, outcome, findings, [wave_table(summary)], options.out, plot)
    return int(outcome.has_failed)


def summarise_waves(outcome: Outcome) -> list[Figures]:
    """One line for each concurrency, load and arm; ``*_ratio`` is over no connector's."""
    waves: defaultdict[tuple[int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for arm, passes in outcome.results.items():
        for result in passes:
            for wave in result["waves"]:
                waves[wave["concurrency"], wave["load"], arm].append(wave)
    found = {key: _figures(group) for key, group in sorted(waves.items(), key=_order)}
    for (concurrency, _, _), figures in found.items():
        alone = found.get((concurrency, QUIET, "none"))
        if alone is None:
            continue
        for name in ("mean", "p50"):
            gap = f"inter_token_{name}_s"
            figures[f"inter_token_{name}_ratio"] = figures[gap] / alone[gap]
        rates = figures["output_tokens_per_s"], alone["output_tokens_per_s"]
        figures["output_ratio"] = rates[0] / rates[1]
    names = ("concurrency", "load", "arm")
    return [{**dict(zip(names, key, strict=True)), **value} for key, value in found.items()]


def _order(item: tuple[tuple[int, str, str], object]) -> tuple[int, bool, bool, str]:
    concurrency, load, arm = item[0]
    return concurrency, load != QUIET, arm != "none", arm


def _figures(waves: list[dict[str, Any]]) -> Figures:
    gaps = np.concatenate([wave["gaps_s"] for wave in waves])
    cached: defaultdict[str, int] = defaultdict(int)
    for wave in waves:
        for source, tokens in wave["cached"].items():
            cached[source] += tokens
    named = zip(STATISTICS, statistics(gaps), strict=True)
    return {
        "waves": len(waves),
        **{f"inter_token_{name}_s": float(value) for name, value in named},
        "output_tokens_per_s": sum(wave["output_tokens"] for wave in waves)
        / sum(wave["wall_s"] for wave in waves),
        "restored_prompts": sum(wave["restored_prompts"] for wave in waves),
        "cached_tokens": dict(cached),
    }


def wave_table(summary: list[Figures]) -> str:
    """A row for each line of the summary."""
    rows = [
        [
            f"{found['concurrency']} {found['load']}",
            found["arm"],
            *(f"{found[f'inter_token_{name}_s'] * 1e3:,.2f}" for name in STATISTICS),
            *(_percent(found.get(f"inter_token_{name}_ratio")) for name in ("mean", "p50")),
            f"{found['output_tokens_per_s']:,.0f}",
            _percent(found.get("output_ratio")),
            " ".join(f"{source} {n:,}" for source, n in found["cached_tokens"].items()) or "-",
        ]
        for found in summary
    ]
    header = ["requests, load", "arm", *(f"gap {name} ms" for name in STATISTICS)]
    header += ["mean of none's", "p50 of none's", "output tokens/s", "of none's"]
    header += ["restored tokens"]
    return table(header, rows)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _without_gaps(outcome: Outcome) -> dict[str, Any]:
    return {
        arm: [
            [{key: v for key, v in wave.items() if key != "gaps_s"} for wave in result["waves"]]
            for result in passes
        ]
        for arm, passes in outcome.results.items()
    }


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw a record."""
    from vllm_hicache.benchmarks.wave_plot import plot_waves

    plot_waves(path, record)

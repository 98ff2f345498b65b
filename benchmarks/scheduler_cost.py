"""What HiCacheConnector costs vLLM's scheduler, step by step, without an engine.

    python benchmarks/scheduler_cost.py --check
    python benchmarks/scheduler_cost.py --workers 8 --storage none --out results/

One request with a prompt of 1,000,000 tokens arrives while 64 others decode. Timed are all hooks
of the scheduler's side: at arrival (beside vLLM's own block hashing of the same prompt), in steps
that prefill a chunk of it, in decode steps that complete one page, and in those that complete none.
With --check the exit status is 1 where a target is missed: 200 microseconds (median) in a step that
adds nothing, and a third of vLLM's block hashing at arrival.
"""

import argparse
import gc
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.benchmarks.scheduler_rig import RigOptions, SchedulerRig, Step

IDLE_TARGET_S = 200e-6
ARRIVAL_TARGET = 1 / 3
VOCABULARY = 500
NOTHING, ONE_PAGE, PREFILL = "adds nothing", "completes one page", "prefills a chunk"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=1_000_000, help="tokens of the long prompt")
    parser.add_argument("--running", type=int, default=64, help="requests that decode meanwhile")
    parser.add_argument("--short-prompt", type=int, default=4096, help="tokens of each of those")
    parser.add_argument("--steps", type=int, default=512, help="decode steps to measure")
    parser.add_argument("--arrivals", type=int, default=5, help="long prompts that arrive")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--workers", type=int, default=1, help="tensor-parallel workers")
    parser.add_argument("--storage", choices=("file", "none"), default="file")
    parser.add_argument("--rank-consensus", choices=("off", "report"), default="off")
    parser.add_argument("--out", type=Path, help="folder for scheduler_cost.json")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    return parser.parse_args(arguments)


def rig_options(options: argparse.Namespace, folder: Path) -> RigOptions:
    num_output = _num_output(options)
    per_request = options.short_prompt + options.page_size + num_output
    return RigOptions(
        folder=folder,
        max_tokens=max(options.prompt, options.short_prompt) + options.page_size + num_output,
        num_requests=options.running + 1,
        num_tokens=options.prompt + options.running * per_request + num_output,
        block_size=options.block_size,
        page_size=options.page_size,
        batched_tokens=options.batched_tokens,
        num_workers=options.workers,
        has_storage=options.storage == "file",
        rank_consensus=options.rank_consensus,
    )


def _num_output(options: argparse.Namespace) -> int:
    """Enough for every step: no request may end while others are measured."""
    total = options.prompt + options.running * (options.short_prompt + options.page_size)
    return 2 * options.steps + 8 * total // options.batched_tokens + 64


def random_prompt(random: np.random.Generator, length: int) -> list[int]:
    return random.integers(0, VOCABULARY, length).tolist()


def start_running(rig: SchedulerRig, options: argparse.Namespace) -> None:
    """Admit the short requests. Their lengths differ by 4 tokens, so that at most one of them
    completes a page in a step as long as there are at most page_size / 4 of them."""
    random = np.random.default_rng(0)
    for i in range(options.running):
        length = options.short_prompt + 4 * i % options.page_size
        request = rig.new_request(f"short-{i}", random_prompt(random, length), _num_output(options))
        rig.scheduler.add_request(request)
    step = rig.step()
    while step.num_running < options.running or step.num_tokens > options.running:
        step = rig.step()


def measure_arrivals(
    rig: SchedulerRig, options: argparse.Namespace
) -> tuple[list[dict[str, float]], object]:
    """Let the long prompt arrive several times; all but the last leave at once."""
    random = np.random.default_rng(1)
    arrivals: list[dict[str, float]] = []
    while True:
        prompt = random_prompt(random, options.prompt)
        gc.collect()
        request = rig.new_request(f"long-{len(arrivals)}", prompt, _num_output(options))
        hashing_s = rig.hashing_s
        rig.clock.take()
        rig.scheduler.add_request(request)
        rig.scheduler.connector.get_num_new_matched_tokens(request, 0)
        seconds, _ = rig.clock.take()
        arrivals.append({**seconds, "hooks": sum(seconds.values()), "vllm hashing": hashing_s})
        if len(arrivals) >= options.arrivals:
            return arrivals, request
        rig.abort(request)
        rig.step()


def measure_steps(
    rig: SchedulerRig, options: argparse.Namespace, request: Any
) -> dict[str, list[Step]]:
    """Prefill the long prompt beside the running requests, then let all of them decode."""
    steps: dict[str, list[Step]] = defaultdict(list)
    everyone = options.running + 1
    while request.num_computed_tokens < options.prompt:
        step = rig.step()
        if step.num_tokens > 2 * everyone:
            steps[PREFILL].append(step)
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it is up
    for _ in range(options.steps):
        step = rig.step()
        if step.num_running != everyone or step.num_tokens != everyone:
            raise SystemExit(f"not a decode step of {everyone} requests: {step}")
        kind = {0: NOTHING, 1: ONE_PAGE}.get(step.num_pages)
        if kind is not None:
            steps[kind].append(step)
    gc.unfreeze()
    return steps


def summary(steps: list[Step]) -> dict[str, object]:
    """Microseconds of one kind of step."""
    seconds = [step.hooks_s for step in steps]
    hooks = sorted({name for step in steps for name in step.hooks})
    return {
        "steps": len(steps),
        "median_us": median(seconds) * 1e6,
        "p99_us": float(np.percentile(seconds, 99)) * 1e6,
        "max_us": max(seconds) * 1e6,
        "cpu_median_us": median(step.hooks_cpu_s for step in steps) * 1e6,
        "scheduler_median_us": median(step.scheduler_s for step in steps) * 1e6,
        "pages_median": median(step.num_pages for step in steps),
        "median_us_by_hook": {
            name: median(step.hooks.get(name, 0.0) for step in steps) * 1e6 for name in hooks
        },
    }


def misses(kinds: dict[str, dict[str, Any]], arrival: dict[str, float]) -> list[str]:
    """The targets that were missed, in words."""
    found = []
    idle_us = float(kinds[NOTHING]["median_us"]) if NOTHING in kinds else float("nan")
    if not idle_us < IDLE_TARGET_S * 1e6:
        found.append(f"a step that adds nothing takes {idle_us:.0f} us, target {200} us")
    ratio = arrival["hooks"] / arrival["vllm hashing"]
    if not ratio <= ARRIVAL_TARGET:
        found.append(f"arrival takes {ratio:.2f} of vLLM's block hashing, target 1/3")
    return found


def report(
    options: argparse.Namespace, kinds: dict[str, dict[str, object]], arrival: dict[str, float]
) -> str:
    rows = [
        [
            kind,
            *(str(found[key]) for key in ("steps", "pages_median")),
            *(f"{found[key]:.0f}" for key in ("median_us", "cpu_median_us", "p99_us", "max_us")),
            f"{found['scheduler_median_us']:.0f}",
        ]
        for kind, found in kinds.items()
    ]
    header = [
        "a step that",
        "steps",
        "pages",
        "hooks us",
        "cpu us",
        "p99 us",
        "max us",
        "vLLM + hooks us",
    ]
    hooks_ms, hashing_ms = arrival["hooks"] * 1e3, arrival["vllm hashing"] * 1e3
    return (
        f"{options.prompt:,} tokens, {options.running} running, {options.workers} workers, "
        f"pages of {options.page_size}, blocks of {options.block_size}, storage {options.storage}\n"
        f"{table(header, rows)}\n"
        f"arrival: {hooks_ms:.1f} ms in hooks, {hashing_ms:.1f} ms in vLLM's block hashing "
        f"({hooks_ms / hashing_ms:.2f})"
    )


def main() -> int:
    options = parse_options()
    with (
        tempfile.TemporaryDirectory(prefix="hicache-cost-") as folder,
        SchedulerRig(rig_options(options, Path(folder))) as rig,
    ):
        start_running(rig, options)
        arrivals, request = measure_arrivals(rig, options)
        steps = measure_steps(rig, options, request)
    kinds = {kind: summary(steps[kind]) for kind in (NOTHING, ONE_PAGE, PREFILL) if steps[kind]}
    arrival = {key: median(a.get(key, 0.0) for a in arrivals) for key in arrivals[0]}
    record = run_record()
    print(describe(record))
    print(report(options, kinds, arrival))
    missed = misses(kinds, arrival)
    if options.out is not None:
        numbers = {"steps": kinds, "arrival_s": arrival, "missed": missed}
        write_json(options.out / "scheduler_cost.json", {**record, **numbers})
    for miss in missed if options.check else ():
        print(f"MISSED: {miss}", file=sys.stderr)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())

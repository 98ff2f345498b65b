"""What the rank-consensus checker costs vLLM's scheduler: two schedulers, one with it, in turn.

    python benchmarks/rank_consensus_cost.py
    python benchmarks/rank_consensus_cost.py --workers 8 --step-ms 20 --out results/

Both decode the same requests in one process, step by step in turn, so that a busy machine slows
both alike. Told are microseconds a step in the hooks of the scheduler's side and what a worker adds
to its step and its report. With a real step's time in --step-ms the share of it is told, too.
"""

import argparse
import gc
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.benchmarks.scheduler_cost import rig_options, start_running
from vllm_hicache.benchmarks.scheduler_rig import SchedulerRig, SilentSide, Step
from vllm_hicache.plan import CopyOp, StepPlan

MODES = ("off", "report")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=64, help="requests that decode")
    parser.add_argument("--short-prompt", type=int, default=4096, help="tokens of each of those")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps to measure")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4, help="tensor-parallel workers")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a real step")
    parser.add_argument("--out", type=Path, help="folder for rank_consensus_cost.json")
    options = parser.parse_args(arguments)
    options.prompt, options.batched_tokens, options.storage = 1, 16384, "none"
    return options


def measure(options: argparse.Namespace) -> dict[str, list[Step]]:
    """Steps of both schedulers, in turn."""
    steps: dict[str, list[Step]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        rigs = {}
        for mode in MODES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-cost-")))
            options.rank_consensus = mode
            rigs[mode] = stack.enter_context(SchedulerRig(rig_options(options, folder)))
            start_running(rigs[mode], options)
        gc.collect()
        gc.freeze()
        for _ in range(options.steps):
            for mode, rig in rigs.items():
                steps[mode].append(rig.step())
        gc.unfreeze()
    return steps


def worker_costs(repeats: int = 2000) -> dict[str, float]:
    """Recording and packing on a worker, in a step with a save."""
    rows = np.zeros((16, 4), np.int32)
    side, plans = SilentSide(), [StepPlan(n, saves=(CopyOp(n, rows),)) for n in range(1, repeats)]
    started = time.perf_counter()
    batches = [side.execute(plan) for plan in plans]
    recorded = time.perf_counter()
    return {
        "worker_us": (recorded - started) / len(plans) * 1e6,
        "message_bytes": len(batches[-1]),
    }


def main() -> int:
    options = parse_options()
    steps = measure(options)
    costs = worker_costs()
    hooks = {mode: median(step.hooks_cpu_s for step in steps[mode]) * 1e6 for mode in MODES}
    whole = {mode: median(step.scheduler_s for step in steps[mode]) * 1e6 for mode in MODES}
    record = run_record()
    print(describe(record))
    rows = [[mode, f"{hooks[mode]:.0f}", f"{whole[mode]:.0f}"] for mode in MODES]
    print(table(["rank_consensus", "hooks us", "vLLM + hooks us"], rows))
    added = hooks["report"] - hooks["off"]
    share = added / (options.step_ms * 1e3)
    print(
        f"{options.workers} workers, {options.running} running: hooks +{added:.0f} us a step, "
        f"{share:.2%} of a step of {options.step_ms:g} ms; "
        f"vLLM + hooks {whole['report'] / whole['off'] - 1:+.1%}\n"
        f"a worker: {costs['worker_us']:.0f} us and {costs['message_bytes']} bytes for a step "
        "with a save"
    )
    if options.out is not None:
        numbers = {"hooks_us": hooks, "scheduler_us": whole, "share": share, **costs}
        write_json(options.out / "rank_consensus_cost.json", {**record, **numbers})
    return 0


if __name__ == "__main__":
    sys.exit(main())

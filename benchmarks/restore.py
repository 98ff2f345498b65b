"""Time to first token of a prompt that is computed, on the device, in host memory, or in files.

    python benchmarks/restore.py --out results/
    python benchmarks/restore.py --shape llama-8b --dtype bfloat16 --lengths 8192,32768,65536 \
        --block-size 16 --connector hicache,native,none --out results/

Every repetition takes a prompt of fresh random tokens four times: cold; again, while vLLM's own
prefix cache holds it; again, after that cache was dropped; and after host memory was dropped, too.
Each answer must have taken its tokens from the expected tier, as vLLM itself counts them; else the
exit status is 1. The first repetition of each length warms up and is not counted.

Without --model or --shape, a tiny model with random weights is written; it runs on a CPU in a
minute and shows the shape of the result only. --shape has weights without meaning, for timing.
Files are read through the page cache of the system unless --drop-page-cache is given.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under python -P

from restore_plan import ARMS, RestorePlan, plan_restore
from run_record import describe, run_record, table, write_json

Result = dict[str, Any]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or name of a model; default: a tiny one is written")
    add("--shape", choices=("llama-8b",), help="shape of a model, with dummy weights")
    add("--connector", default="hicache", help=f"one or several of {','.join(ARMS)}")
    add("--lengths", default="512,2048,8192", help="prompt tokens, several with commas")
    add("--repeat", type=int, default=5, help="counted repetitions of each length")
    add("--block-size", type=int, default=32, help="vLLM's tokens per block")
    add("--page-size", type=int, default=256, help="tokens of a page")
    add("--dtype", default="auto")
    add("--host-memory", help="of the connector; default: three times the longest prompt")
    add("--device-kv-bytes", type=int, help="default: twice the longest prompt")
    add("--storage", help="folder of the stored pages, or none; default: a temporary one")
    add("--drop-page-cache", action="store_true", help="read files from the disk itself")
    add("--load-mode", choices=("auto", "sync", "async"), default="auto")
    add("--prefetch-policy", default="wait_complete", help="option of the connector")
    add("--max-batched-tokens", type=int, help="option of vLLM")
    add("--enforce-eager", action="store_true", help="option of vLLM")
    add("--native-options", type=json.loads, default={}, help="more options of vLLM's connector")
    add("--out", type=Path, help="folder for restore.json and restore.png")
    add("--dry-run", action="store_true", help="print what would run")
    options = parser.parse_args(arguments)
    options.arms = options.connector.split(",")
    if not set(options.arms) <= set(ARMS):
        parser.error(f"--connector is one or several of {','.join(ARMS)}")
    if options.model and options.shape:
        parser.error("--model and --shape exclude one another")
    options.lengths = [int(length) for length in options.lengths.split(",")]
    return options


def set_environment() -> None:
    """Before vLLM is imported: the engine runs in this process; on a CPU without its traps."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def measure(plan: RestorePlan) -> list[Result]:
    """All lengths in one engine."""
    from restore_engine import TimedEngine

    engine = TimedEngine(plan)
    results = []
    try:
        for length in plan.lengths:
            samples = [engine.repetition(length, number) for number in range(plan.repeat + 1)]
            for tier in plan.tiers:
                counted = [asdict(sample[tier]) for sample in samples[1:]]
                results.append(_result(plan, engine.bytes_per_token, length, tier, counted))
    finally:
        engine.shutdown()
    return results


def _result(
    plan: RestorePlan, bytes_per_token: int, length: int, tier: str, samples: list[Result]
) -> Result:
    ttft_s = median(sample["seconds"] for sample in samples)
    num_tokens = median(sum(sample["cached"].values()) for sample in samples)
    expected = plan.expected(length, tier)
    wrong = [s["cached"] for s in samples if not plan.is_expected(s["cached"], length, tier)]
    return {
        "connector": plan.arm,
        "length": length,
        "tier": tier,
        "ttft_s": ttft_s,
        "cached_tokens": num_tokens,
        "expected": expected,
        "wrong": wrong,
        "restored_bytes": num_tokens * bytes_per_token,
        "gb_per_s": num_tokens * bytes_per_token / ttft_s / 1e9,
        "copy_gb_per_s": _rate(samples, "copied_bytes", "copy_s"),
        "fetch_gb_per_s": _rate(samples, "fetched_bytes", "fetch_s"),
        "samples": samples,
    }


def _rate(samples: list[Result], num_bytes: str, seconds: str) -> float:
    rates = [s[num_bytes] / s[seconds] / 1e9 for s in samples if s[num_bytes] and s[seconds]]
    return median(rates) if rates else 0.0


def measure_in_child(arm: str, folder: Path) -> list[Result]:
    """One arm of several in a process of its own, which leaves the next one a clean device."""
    command = [sys.executable, *sys.argv, "--connector", arm, "--out", str(folder / arm)]
    subprocess.run(command, check=False)
    path = folder / arm / "restore.json"
    if not path.exists():
        print(f"the arm {arm} ended without a result", file=sys.stderr)
        return []
    return json.loads(path.read_text())["results"]


def report(results: list[Result]) -> str:
    """One row per connector, length and tier; speed-up is against the same connector's cold."""
    cold = {(r["connector"], r["length"]): r["ttft_s"] for r in results if r["tier"] == "cold"}
    rows = []
    for found in results:
        speed_up = cold[found["connector"], found["length"]] / found["ttft_s"]
        is_restore = found["tier"] in ("host restore", "file restore")
        rows.append(
            [
                found["connector"],
                f"{found['length']:,}",
                found["tier"],
                f"{found['ttft_s'] * 1e3:,.1f}",
                f"{speed_up:.1f}x",
                f"{found['cached_tokens']:,.0f}",
                f"{found['gb_per_s']:.2f}" if is_restore else "",
                f"{found['copy_gb_per_s']:.2f}" if found["copy_gb_per_s"] else "",
                f"{found['fetch_gb_per_s']:.2f}" if found["fetch_gb_per_s"] else "",
                "WRONG" if found["wrong"] else "ok",
            ]
        )
    header = ["connector", "prompt", "tier", "TTFT ms", "speed-up", "cached", "GB/s"]
    return table([*header, "copy GB/s", "fetch GB/s", "hits"], rows)


def write_plot(path: Path, results: list[Result], title: str) -> None:
    try:
        from restore_plot import plot_restore
    except ModuleNotFoundError as error:
        print(f"no plot: {error.name} is missing (pip install matplotlib)", file=sys.stderr)
        return
    plot_restore(path, results, title)


def run(options: argparse.Namespace, folder: Path) -> list[Result]:
    if len(options.arms) > 1:
        return [result for arm in options.arms for result in measure_in_child(arm, folder)]
    plan = plan_restore(options, options.arms[0], folder)
    set_environment()
    return measure(plan)


def main() -> int:
    options = parse_options()
    folder = Path(tempfile.mkdtemp(prefix="hicache-restore-"))
    try:
        if options.dry_run:
            plans = [asdict(plan_restore(options, arm, folder)) for arm in options.arms]
            print(json.dumps(plans, indent=1, default=str))
            return 0
        results = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = run_record()
    print(describe(record))
    print(report(results))
    print("TTFT is the median; GB/s: restored bytes over TTFT, over the copy, over the fetch.")
    if options.out is not None:
        write_json(options.out / "restore.json", {**record, "results": results})
        write_plot(options.out / "restore.png", results, describe(record))
    is_complete = {result["connector"] for result in results} == set(options.arms)
    return int(not is_complete or any(result["wrong"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

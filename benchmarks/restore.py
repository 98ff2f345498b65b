"""``hicache bench restore``: time to first token by prompt length and tier, one request at a time.

    hicache bench restore --out results/
    hicache bench restore --shape llama-8b --lengths 8192,32768,65536 --block-size 16 \
        --vs native,simple,none --evict-by prompts --out results/

Every repetition takes a prompt of fresh random tokens four times: cold; again, while vLLM's own
prefix cache holds it; again, after that cache was dropped, or after other prompts took its place
(--evict-by prompts); and after host memory was dropped, too. Each answer must have taken its
tokens from the expected tier, as vLLM itself counts them; else the exit status is 1. The first
repetition of each length warms up and is not counted.

Without --model or --shape, a tiny shape runs, on a CPU in a minute, and shows the form of the
result only. Shapes have weights without meaning, for timing. Files are read through the page
cache of the system unless --drop-page-cache is given.
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

from vllm_hicache.benchmarks.arms import LABELS, parse_arms, why_not
from vllm_hicache.benchmarks.bench_report import not_measured_lines, write_plot
from vllm_hicache.benchmarks.command import run_benchmark
from vllm_hicache.benchmarks.model_shapes import SHAPES
from vllm_hicache.benchmarks.restore_plan import ARMS, RestorePlan, plan_restore
from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.errors import ConfigError

Result = dict[str, Any]
RawRates = dict[str, float]
"""What -> GB/s without any engine."""


NAME = "restore"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Model, lengths, arms, and how tiers are emptied."""
    add = parser.add_argument
    add("--model", help="folder or name of a model; default: --shape tiny")
    add("--shape", choices=tuple(SHAPES), help="shape of a model, with weights without meaning")
    add("--connector", default="hicache", help="the first arms, several with commas")
    add("--vs", default="", metavar="ARMS", help=f"further ones, of {','.join(ARMS)}")
    add("--lengths", default="512,2048,8192", help="prompt tokens, several with commas")
    add("--repeat", type=int, default=5, help="counted repetitions of each length")
    add("--seed", type=int, default=0, help="of all prompts")
    add("--block-size", type=int, default=32, help="vLLM's tokens per block")
    add("--page-size", type=int, default=256, help="tokens of a page")
    add("--dtype", default="auto")
    add("--host-memory", help="of the connector; default: three times the longest prompt")
    add("--device-kv-bytes", type=int, help="default: twice the longest prompt")
    add("--evict-by", choices=("reset", "prompts"), default="reset", help="empties the device")
    add("--storage", help="folder of the stored pages, or none; default: a temporary one")
    add("--drop-page-cache", action="store_true", help="read files from the disk itself")
    add("--load-mode", choices=("auto", "sync", "async", "layerwise"), default="auto")
    add("--prefetch-policy", default="wait_complete", help="option of the connector")
    add("--max-batched-tokens", type=int, help="option of vLLM")
    add("--enforce-eager", action="store_true", help="option of vLLM")
    add("--native-options", type=json.loads, default={}, help="more options of vLLM's connector")
    add("--hicache-options", type=json.loads, default={}, help="more options of this connector")
    add("--out", type=Path, help="folder for restore.json and restore.png")
    add("--dry-run", action="store_true", help="print what would run")


def check_options(options: argparse.Namespace) -> None:
    """Work out arms and lengths; ``ConfigError`` says what cannot be."""
    options.arms = parse_arms(",".join(filter(None, (options.connector, options.vs))))
    if not set(options.arms) <= {*ARMS, "lmcache"}:
        raise ConfigError(f"restore takes one or several of {','.join(ARMS)}, lmcache")
    if options.model and options.shape:
        raise ConfigError("--model and --shape exclude one another")
    try:
        options.lengths = [int(length) for length in options.lengths.split(",")]
    except ValueError:
        raise ConfigError(f"--lengths takes numbers, got {options.lengths!r}") from None


def set_environment() -> None:
    """Before vLLM is imported: the engine runs in this process; on a CPU without its traps."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def measure(plan: RestorePlan) -> tuple[list[Result], RawRates]:
    """All lengths in one engine; then what the machine itself can do."""
    from vllm_hicache.benchmarks.raw_rates import file_read_gb_per_s, pinned_copy_gb_per_s
    from vllm_hicache.benchmarks.restore_engine import TimedEngine

    engine = TimedEngine(plan)
    results = []
    try:
        for length in plan.lengths:
            samples = [engine.repetition(length, number) for number in range(plan.repeat + 1)]
            for tier in plan.tiers:
                counted = [asdict(sample[tier]) for sample in samples[1:]]
                results.append(_result(plan, engine.bytes_per_token, length, tier, counted))
                _tell(results[-1])
    finally:
        engine.shutdown()
    raw = {"pinned copy": pinned_copy_gb_per_s()}
    if plan.storage is not None:
        drops = plan.drops_page_cache
        raw["file read"] = file_read_gb_per_s(plan.storage, drops_page_cache=drops)
    return results, {name: rate for name, rate in raw.items() if rate is not None}


def _tell(result: Result) -> None:
    """At once, so that a run that is cut off has said what it had."""
    ms = ", ".join(f"{sample['seconds'] * 1e3:,.1f}" for sample in result["samples"])
    text = f"{result['connector']}, {result['length']:,} tokens, {result['tier']}: {ms} ms"
    print(text, file=sys.stderr, flush=True)


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


def measure_in_child(options: argparse.Namespace, arm: str, folder: Path) -> dict[str, Any]:
    """One arm of several in a process of its own, which leaves the next one a clean device."""
    module = "vllm_hicache.benchmarks.restore"
    one = ("--connector", arm, "--vs", "", "--out", str(folder / arm))
    command = [sys.executable, "-P", "-m", module, *options.arguments, *one]
    subprocess.run(command, check=False)
    path = folder / arm / "restore.json"
    if not path.exists():
        print(f"the arm {arm} ended without a result", file=sys.stderr)
        return {"results": [], "raw_gb_per_s": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def why_not_here(arm: str) -> str:
    """Why an arm is left out; empty where it is not."""
    if arm == "lmcache":
        return "its imports break an engine in the process of its client (multiturn measures it)"
    return why_not(arm)


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


def raw_line(raw: RawRates) -> str:
    """What copies and fetches are to be compared with."""
    rates = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in raw.items())
    return f"The machine itself, in this run: {rates or 'not measured'}."


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw the results of a record."""
    from vllm_hicache.benchmarks.restore_plot import plot_restore

    plot_restore(path, record["results"], describe(record))


def run(options: argparse.Namespace) -> int:
    """Measure all arms; 1 where a hit was not the expected one, or an arm gave no result."""
    check_options(options)
    folder = Path(tempfile.mkdtemp(prefix="hicache-restore-"))
    try:
        if options.dry_run:
            arms = [arm for arm in options.arms if arm in ARMS]
            plans = [asdict(plan_restore(options, arm, folder)) for arm in arms]
            print(json.dumps(plans, indent=1, default=str))
            return 0
        return _measure_arms(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_arms(options: argparse.Namespace, folder: Path) -> int:
    reasons = {arm: why_not_here(arm) for arm in options.arms}
    able = [arm for arm, reason in reasons.items() if not reason]
    if len(options.arms) == 1 and able:
        set_environment()
        results, raw = measure(plan_restore(options, able[0], folder))
        record = run_record()
    else:
        records = [measure_in_child(options, arm, folder) for arm in able]
        results = [result for found in records for result in found["results"]]
        raw = {name: rate for found in records for name, rate in found["raw_gb_per_s"].items()}
        record = run_record()
        record["machine"] = next((r["machine"] for r in records if r["results"]), record["machine"])
    missing = set(able) - {result["connector"] for result in results}
    reasons |= dict.fromkeys(missing, "its engine ended without a result")
    not_measured = {LABELS[arm]: reason for arm, reason in reasons.items() if reason}
    print(describe(record))
    print(report(results))
    print("TTFT is the median; GB/s: restored bytes over TTFT, over the copy, over the fetch.")
    print(raw_line(raw))
    print(not_measured_lines(not_measured))
    if options.out is not None:
        about = {"benchmark": NAME, "raw_gb_per_s": raw, "not_measured": not_measured}
        record |= {**about, "results": results}
        write_json(options.out / "restore.json", record)
        write_plot(options.out / "restore.png", record, plot)
    return int(bool(missing) or any(result["wrong"] for result in results))


if __name__ == "__main__":
    sys.exit(run_benchmark(NAME, sys.argv[1:]))

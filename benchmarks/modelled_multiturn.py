"""Many conversations at once in modelled time: real schedulers, without a GPU, in seconds.

    python benchmarks/modelled_multiturn.py --out results/
    python benchmarks/modelled_multiturn.py --arms native,hicache --host-memory 40GiB

vLLM's real scheduler and the real scheduler side of each connector hold conversations of the size
of an H200. What a step and a copy take comes from a few constants (``device_model.py``), and the
clock jumps from one to the next. That shows what rules of scheduling do to a crowd of requests; it
measures neither a device nor a worker. Each arm runs in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_hicache.benchmarks.arms import (
    CONNECTORS,
    ConnectorSizes,
    connector_options,
    parse_arms,
    parse_more_options,
)
from vllm_hicache.benchmarks.common_options import check_counts
from vllm_hicache.benchmarks.conversations import Conversations
from vllm_hicache.benchmarks.model_shapes import LLAMA_8B, kv_bytes_per_token
from vllm_hicache.benchmarks.multiturn import add_workload_options, conversations_of
from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.errors import ConfigError
from vllm_hicache.quantities import parse_bytes

MODELLED = ("none", "native", "simple", "hicache")
SPARE_TOKENS = 64
Result = dict[str, Any]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arms", default=",".join(MODELLED), help="in this order, with commas")
    add_workload_options(parser)
    parser.set_defaults(turns=6, user_tokens=2432, answer_tokens=128)
    add("--think-s", type=_seconds, default=0.0, help="from an answer to the next turn")
    add("--device-kv-bytes", type=_size, default="16GiB", metavar="SIZE")
    add("--host-memory", type=_size, default="64GiB", metavar="SIZE", help="of each arm")
    add("--link-gb-per-s", type=_rate, default=53.0, help="each direction; measured: 51 to 54")
    add("--block-size", type=int, default=16, help="vLLM's tokens per block")
    add(
        "--page-size",
        type=int,
        help="tokens of a page; default: what the connector chooses",
    )
    add("--max-batched-tokens", type=int, default=8192, help="of a step")
    add(
        "--arm-options",
        action="append",
        default=[],
        metavar="ARM={JSON}",
        help="more options of an arm's connector; may be repeated",
    )
    add("--seed", type=int, default=0, help="of all prompts")
    add("--out", type=Path, help="folder for modelled_multiturn.json")
    options = parser.parse_args(arguments)
    try:
        options.plans = make_plans(options)
    except ConfigError as error:
        parser.error(str(error))
    return options


def workload_of(options: argparse.Namespace) -> Conversations:
    """All at once: there are as many clients as conversations."""
    return conversations_of(options, LLAMA_8B["vocab_size"])


def make_plans(options: argparse.Namespace) -> list[Result]:
    """One engine for each arm, as ``VirtualPlan`` takes them: equal but for the connector."""
    check_counts(options)
    work, arms = workload_of(options), parse_arms(options.arms)
    more = parse_more_options(options.arm_options)
    others = [arm for arm in (*arms, *more) if arm not in MODELLED]
    if others:
        raise ConfigError(f"the arms here are {','.join(MODELLED)}; not {','.join(others)}")
    longest = work.longest_tokens + SPARE_TOKENS
    if longest > LLAMA_8B["max_position_embeddings"]:
        raise ConfigError(f"the longest request needs {longest:,} tokens, more than the model has")
    if longest * kv_bytes_per_token(LLAMA_8B, "auto") > options.device_kv_bytes:
        raise ConfigError(
            f"--device-kv-bytes {options.device_kv_bytes:,} is too small for the longest request"
        )
    sizes = ConnectorSizes(
        host_bytes=options.host_memory,
        page_size=options.page_size,
        storage=None,
        more_options=more,
    )
    return [
        {
            "arm": arm,
            "connector": CONNECTORS[arm],
            "connector_options": connector_options(arm, sizes),
            "device_bytes": options.device_kv_bytes,
            "host_bytes": options.host_memory,
            "link_bytes_per_s": options.link_gb_per_s * 1e9,
            "block_size": options.block_size,
            "batched_tokens": options.max_batched_tokens,
            "longest_tokens": longest,
            "num_requests": work.num_conversations,
        }
        for arm in arms
    ]


def run_arms(options: argparse.Namespace) -> tuple[dict[str, Result], dict[str, str]]:
    """Arm -> what it gave, and arm -> why it gave nothing. One that fails ends no other."""
    work = asdict(workload_of(options))
    tasks = [
        {"plan": plan, "conversations": work, "think_s": options.think_s} for plan in options.plans
    ]
    results, failures = {}, {}
    with tempfile.TemporaryDirectory(prefix="hicache-model-") as name:
        folder = Path(name)
        (folder / "tasks.json").write_text(json.dumps(tasks))
        module = "vllm_hicache.benchmarks.virtual_arm"
        subprocess.run(
            [sys.executable, "-P", "-m", module, str(folder / "tasks.json"), name],
            # The order of sets of names would differ from run to run.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=False,
        )
        for number, plan in enumerate(options.plans):
            path = folder / f"{number}.json"
            found = json.loads(path.read_text()) if path.exists() else {"failure": "it died"}
            if "failure" in found:
                failures[plan["arm"]] = found["failure"]
            else:
                results[plan["arm"]] = found
    return results, failures


def report(results: dict[str, Result]) -> str:
    """One line for each arm."""
    header = ["arm", "wall s", "TTFT mean s", "p50", "p90", "inter-token ms", "tokens/s"]
    header += ["device", "host", "computed", "again", "preempted", "loaded GB", "saved GB"]
    rows = []
    for arm, found in results.items():
        shares = (found[f"{name}_tokens"] for name in ("device", "host", "computed"))
        rows.append(
            [
                arm,
                f"{found['wall_s']:.2f}",
                *(f"{found[f'ttft_{name}_s']:.2f}" for name in ("mean", "p50", "p90")),
                f"{found['inter_token_mean_s'] * 1e3:.1f}",
                f"{found['output_tokens'] / found['wall_s']:.0f}",
                *(f"{share / found['prompt_tokens']:.1%}" for share in shares),
                f"{found['again_tokens']:,}",
                str(found["preemptions"]),
                *(f"{found[f'{name}_bytes'] / 1e9:.1f}" for name in ("loaded", "saved")),
            ]
        )
    return table(header, rows)


def _size(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdigit() else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _seconds(text: str) -> float:
    return _number(text, least=0.0)


def _rate(text: str) -> float:
    return _number(text, least=0.001)


def _number(text: str, *, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least {least:g}, got {text}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where an arm gave no result."""
    options = parse_options(arguments)
    results, failures = run_arms(options)
    record = run_record()
    print(describe(record))
    print(report(results))
    for arm, reason in failures.items():
        print(f"{arm} gave no result: {reason}", file=sys.stderr)
    if options.out is not None:
        findings = {
            "workload": {**asdict(workload_of(options)), "think_s": options.think_s},
            "plans": options.plans,
            "results": results,
            "failures": failures,
        }
        write_json(options.out / "modelled_multiturn.json", {**record, **findings})
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

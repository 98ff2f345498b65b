"""What the connector, and its rank-consensus checker, cost a real engine that never has a hit.

    python benchmarks/engine_cost.py
    python benchmarks/engine_cost.py --shape llama-8b --dtype bfloat16 --block-size 16 \
        --tensor-parallel-size 2 --prompt 1024 --output 256 --requests 32 --rounds 2 --out results/

Three arms, each engine in a process of its own, the rounds in turn: without a connector, with it,
and with the checker in mode report. A wave is so many requests with prompts of fresh random tokens,
all at once; the first of each engine warms up. Told are the time of a wave, that until all have
their first token, and the median step after it. Everything computed is saved to host memory
meanwhile.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from vllm_hicache.benchmarks.restore import set_environment
from vllm_hicache.benchmarks.restore_plan import plan_restore
from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json

ARMS = ("none", "hicache", "checked")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or name of a model; default: a tiny one is written")
    add("--shape", choices=("llama-8b",), help="shape of a model, with dummy weights")
    add("--dtype", default="auto")
    add("--block-size", type=int, default=32, help="vLLM's tokens per block")
    add("--page-size", type=int, default=256, help="tokens of a page")
    add("--tensor-parallel-size", type=int, default=1)
    add("--prompt", type=int, default=512, help="tokens of each prompt")
    add("--output", type=int, default=64, help="tokens of each answer")
    add("--requests", type=int, default=8, help="at once")
    add("--waves", type=int, default=3, help="counted ones of each engine")
    add("--rounds", type=int, default=2, help="engines of each arm")
    add("--enforce-eager", action="store_true", help="option of vLLM")
    add("--out", type=Path, help="folder for engine_cost.json")
    add("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.model and options.shape:
        parser.error("--model and --shape exclude one another")
    # What plan_restore asks for besides: room for a wave on the device, and for three in host.
    options.lengths = [options.requests * (options.prompt + options.output + options.page_size)]
    options.host_memory = options.device_kv_bytes = options.max_batched_tokens = None
    options.storage, options.load_mode, options.prefetch_policy = "none", "auto", "timeout"
    options.evict_by, options.seed, options.hicache_options = "reset", 0, {}
    options.repeat, options.drop_page_cache, options.native_options = options.waves, False, {}
    return options


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """One engine; its waves, the first left out."""
    set_environment()
    arm = "none" if options.arm == "none" else "hicache"
    plan = plan_restore(options, arm, folder)
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if arm == "hicache":
        checks = {"rank_consensus": "report"} if options.arm == "checked" else {}
        transfer = KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={**plan.connector_options, **checks},
        )
    tp = options.tensor_parallel_size
    engine = {**plan.engine, "tensor_parallel_size": tp, "max_num_seqs": options.requests}
    llm = LLM(**engine, kv_transfer_config=transfer)
    random = np.random.default_rng(0)
    parameters = SamplingParams(
        max_tokens=options.output, temperature=0, ignore_eos=True, detokenize=False
    )
    waves = []
    for wave in range(options.waves + 1):
        shape = (options.requests, options.prompt)
        prompts = random.integers(0, plan.vocab_size, shape).tolist()
        waves.append(run_wave(llm.llm_engine, wave, prompts, parameters))
    llm.llm_engine.engine_core.shutdown()
    return waves[1:]


def run_wave(engine: Any, wave: int, prompts: list[list[int]], parameters: Any) -> dict[str, float]:
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{wave} {i}", {"prompt_token_ids": prompt}, parameters)
    begun: set[str] = set()
    steps: list[float] = []
    last, first_tokens, left = started, 0.0, len(prompts)
    while left:
        outputs = engine.step()
        now = time.perf_counter()
        if len(begun) == left == len(prompts):
            steps.append(now - last)
        last = now
        begun.update(output.request_id for output in outputs)
        if len(begun) == len(prompts) and not first_tokens:
            first_tokens = now - started
        left -= sum(output.finished for output in outputs)
    return {
        "wave_s": last - started,
        "first_tokens_s": first_tokens,
        "step_s": median(steps),
    }


def measure_in_child(options: argparse.Namespace, arm: str, folder: Path) -> list[dict[str, float]]:
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, *sys.argv, "--arm", arm, "--out", str(out)]
    subprocess.run(command, check=False)
    if not out.exists():
        raise SystemExit(f"the arm {arm} ended without a result")
    found: list[dict[str, float]] = json.loads(out.read_text())
    return found


def report(results: dict[str, list[dict[str, float]]]) -> str:
    """Medians over all waves, and what each arm takes longer than the engine alone."""
    rows = []
    for arm in ARMS:
        row = [arm]
        for name in ("wave_s", "first_tokens_s", "step_s"):
            own, alone = (median(w[name] for w in results[a]) for a in (arm, ARMS[0]))
            row += [f"{own * 1e3:,.2f}", f"{(own / alone - 1) * 100:+.2f} %"]
        rows.append(row)
    columns = ["wave ms", "", "first tokens ms", "", "step ms", ""]
    return table(["arm", *columns], rows)


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="hicache-engine-cost-") as name:
        folder = Path(name)
        if options.arm:
            options.out.write_text(json.dumps(measure(options, folder)))
            return 0
        results: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for _ in range(options.rounds):
            for arm in ARMS:
                results[arm] += measure_in_child(options, arm, folder)
    record = run_record()
    print(describe(record))
    print(report(results))
    if options.out is not None:
        write_json(options.out / "engine_cost.json", {**record, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())

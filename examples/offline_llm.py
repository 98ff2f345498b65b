"""The Python `LLM` API with storage: `python examples/offline_llm.py`.

Two engines, each in a process of its own, answer the same prompts. The second finds the pages of
the first in storage. Exit status 1: it does not, or it says something else.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

STOCK = "\n".join(f"Shelf {n} holds {n * 37 % 91 + 5} boxes of part {n * 7919}." for n in range(60))
QUESTIONS = ("Which shelf holds the most boxes?", "Which one holds the fewest?", "How many?")
PATIENCE = {"exists_timeout_s": 10, "operation_timeout_s": 60, "shutdown_grace_s": 30}
PAGE_TOKENS = 64


def answer(model: str, storage: str) -> tuple[list[str], int, dict[str, int]]:
    """Answers of a new engine, the tokens of all prompts, and where cached ones came from."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    on_cpu = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
    transfer = KVTransferConfig(
        kv_connector="HiCacheConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "host_memory": "256MiB",
            "storage": {"url": storage, **PATIENCE},
            "page_size": PAGE_TOKENS,
            "min_object_bytes": 1,  # pages of the tiny model are tiny
            "skip_slow_loads": False,  # and it computes faster than it loads
            "prefetch_policy": "wait_complete",
        },
    )
    llm = LLM(
        model=model,
        max_model_len=4096,
        disable_log_stats=False,  # for get_metrics
        kv_transfer_config=transfer,
        **({} if torch.cuda.is_available() else on_cpu),
    )
    prompts = [f"{STOCK}\n{question}" for question in QUESTIONS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    metrics = [metric for metric in llm.get_metrics() if metric.name.endswith("cached_by_source")]
    cached = {metric.labels["source"]: metric.value for metric in metrics if metric.value}
    llm.llm_engine.engine_core.shutdown()
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return [output.outputs[0].text for output in outputs], num_tokens, cached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name; a tiny random one unless given")
    parser.add_argument("--storage", help="storage URL; a temporary folder unless given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model, storage = options.model or f"{folder}/tiny", options.storage or f"file://{folder}/kv"
        if not options.model:
            subprocess.run([sys.executable, Path(__file__).with_name("tiny_model.py"), model])
        runs = []
        for name in ("first", "second"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                runs.append(process.submit(answer, model, storage).result())
            print(f"{name} engine: {runs[-1][1]} prompt tokens, cached: {runs[-1][2]}", flush=True)
    (said, num_tokens, _), (again, _, cached) = runs
    is_hit = sum(cached.values()) >= num_tokens - 2 * PAGE_TOKENS * len(said) and "disk" in cached
    print(f"the same answers: {said == again}; restored: {bool(is_hit)}")
    return 0 if said == again and is_hit else 1


if __name__ == "__main__":
    sys.exit(main())

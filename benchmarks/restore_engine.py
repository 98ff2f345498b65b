"""A vLLM engine in this process whose tiers can be dropped one by one, for `restore.py`."""

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from vllm_hicache.benchmarks.answers import CACHED
from vllm_hicache.benchmarks.engine_session import pause_without_work
from vllm_hicache.benchmarks.page_cache import drop_page_cache
from vllm_hicache.benchmarks.restore_plan import RestorePlan
from vllm_hicache.plan import Direction

if TYPE_CHECKING:
    from collections.abc import Callable

SETTLE_S = 300.0
"""Longest wait for copies and files of one prompt."""
FILLER_TOKENS = 8192
"""Longest of the prompts that push others out of the device."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    seconds: float
    """From the call to the first token."""
    cached: dict[str, int]
    """Source -> prompt tokens that were not computed, as vLLM counts them."""
    copied_bytes: float
    """Host to device; 0 where the connector does not say."""
    copy_s: float
    fetched_bytes: float
    """Storage to host."""
    fetch_s: float


class TimedEngine:
    """One engine with one connector, or with none."""

    def __init__(self, plan: RestorePlan) -> None:
        self._plan = plan
        transfer = KVTransferConfig(
            kv_connector=plan.connector,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=plan.connector_options,
        )
        self._llm = LLM(**plan.engine, kv_transfer_config=transfer if plan.connector else None)
        self._core: Any = self._llm.llm_engine.engine_core.engine_core
        pause_without_work(self._core)
        self._parameters = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, detokenize=False
        )
        self._fillers = np.random.default_rng((plan.seed, 0))
        caches = self._core.scheduler.kv_cache_config
        block_bytes = caches.kv_cache_tensors[0].size // caches.num_blocks
        self.bytes_per_token: int = block_bytes // plan.block_size

    def repetition(self, length: int, number: int) -> dict[str, Sample]:
        """One fresh prompt from every tier of the plan, in their order."""
        random = np.random.default_rng((self._plan.seed, length, number))
        prompt = random.integers(0, self._plan.vocab_size, length).tolist()
        prepare: dict[str, Callable[[], None]] = {
            "cold": self.settle,
            "device hit": self.settle,
            "host restore": self.drop_device,
            "file restore": self.drop_host,
        }
        samples = {}
        for tier in self._plan.tiers:
            prepare[tier]()
            samples[tier] = self._answer(prompt)
        return samples

    def _answer(self, prompt: list[int]) -> Sample:
        before = self._counters()
        gc.collect()
        started = time.perf_counter()
        self._generate(prompt)
        seconds = time.perf_counter() - started
        self.settle()
        after = self._counters()
        grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
        return Sample(
            seconds=seconds,
            cached={
                key.partition("/")[2]: int(value)
                for key, value in grown.items()
                if key.startswith(CACHED) and value
            },
            copied_bytes=grown.get("copied_bytes", 0.0),
            copy_s=grown.get("copy_s", 0.0),
            fetched_bytes=grown.get("vllm:hicache_fetched_bytes", 0.0),
            fetch_s=grown.get("vllm:hicache_fetch_seconds", 0.0),
        )

    def _generate(self, prompt: list[int]) -> None:
        self._llm.generate([{"prompt_token_ids": prompt}], self._parameters, use_tqdm=False)

    def settle(self) -> None:
        """Step until no copy runs; wait until every page that can be is in storage."""
        deadline = time.monotonic() + SETTLE_S
        while self._core.scheduler.has_requests():
            self._llm.llm_engine.step()
            self._check(deadline, "copies")
        planner = self._planner()
        while planner is not None and planner.persists is not None and planner.persists.num_running:
            planner.settle_storage(time.monotonic())
            time.sleep(0.001)
            self._check(deadline, "writes to storage")

    def drop_device(self) -> None:
        """Empty vLLM's own prefix cache, or fill all of it with other prompts."""
        if not self._plan.evicts_by_prompts:
            self._reset(reset_connector=False)
            return
        caches = self._core.scheduler.kv_cache_config
        length = min(FILLER_TOKENS, max(self._plan.lengths))
        for _ in range(-(-caches.num_blocks * self._plan.block_size // length)):
            prompt = self._fillers.integers(0, self._plan.vocab_size, length).tolist()
            self._generate(prompt)
            self.settle()

    def drop_host(self) -> None:
        """Empty vLLM's prefix cache and host memory; files stay."""
        self._reset(reset_connector=True)
        if self._plan.drops_page_cache and self._plan.storage is not None:
            drop_page_cache(self._plan.storage)

    def _reset(self, *, reset_connector: bool) -> None:
        deadline = time.monotonic() + SETTLE_S
        self.settle()
        while not self._llm.reset_prefix_cache(reset_connector=reset_connector):
            self._check(deadline, "blocks that are still referenced")
            self.settle()

    def _check(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {SETTLE_S:.0f} s for {what}")

    def _planner(self) -> Any:
        connector = self._core.scheduler.connector
        return connector.scheduler_side.planner if self._plan.arm == "hicache" else None

    def _counters(self) -> dict[str, float]:
        """vLLM's cumulative counters, and the bytes and busy seconds of copies to the device."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = metric.sum if hasattr(metric, "sum") else getattr(metric, "value", None)
            if value is not None:
                label = metric.labels.get("source", "")
                key = f"{metric.name}/{label}" if label else metric.name
                found[key] = found.get(key, 0.0) + value
        planner = self._planner()
        if planner is not None:
            found["copied_bytes"] = found["vllm:hicache_loaded_bytes"]
            found["copy_s"] = planner.join.busy_seconds(Direction.LOAD)
        elif "vllm:kv_offload_load_bytes" in found:
            found["copied_bytes"] = found["vllm:kv_offload_load_bytes"]
            found["copy_s"] = found["vllm:kv_offload_load_time"]
        return found

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

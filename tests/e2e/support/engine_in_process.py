"""A real vLLM engine whose scheduler lives in this process: asked, stepped, inspected and ended.

Workers live here too (one of them), or in processes of their own (TP, PP). One at a time.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import few_cores
import numpy as np

from vllm_hicache.audit import audit
from vllm_hicache.planner import Planner
from vllm_hicache.tiers import SlotOwner

PAGE = 64
BLOCK = 32
VOCABULARY = 256
POISON, POISON_BYTE = 300.0, 77
KV_TOLERANCE = 1e-4
"""Keys and values are about 1; computed in other chunks they differ by 1e-6."""
HEADER_BYTES = 4096
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
OPTIONS: Mapping[str, object] = {
    "host_memory": "96MiB",
    "page_size": PAGE,
    "skip_slow_loads": False,  # the models here compute faster than anything can be loaded
}
STORAGE_OPTIONS: Mapping[str, object] = {
    "min_object_bytes": 1,
    "prefetch_policy": "wait_complete",
    "prefetch_min_tokens": 1,
}
"""Options of the connector under which every page is stored and waited for."""
SETTINGS: Mapping[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}
"""vLLM's options, unless a test has others."""
PATIENCE = {"operation_timeout_s": 60, "connect_timeout_s": 60}
"""On a busy machine a late answer is no miss here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Chosen tokens, the log-probabilities of the best three at each place, vLLM's cached count."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    @property
    def said(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.tokens, self.logprobs


def prompt_of(seed: object, num_tokens: int) -> list[int]:
    """Token ids that share no page with those of another seed."""
    source = random.Random(str(seed))
    return [source.randrange(VOCABULARY) for _ in range(num_tokens)]


def device_hit(num_tokens: int, block: int = BLOCK) -> int:
    """What vLLM's own cache gives: whole blocks, and one token at least is computed."""
    return (num_tokens - 1) // block * block


def restored_hit(num_tokens: int, page: int = PAGE, block: int = BLOCK) -> int:
    """What host or storage gives: whole pages, within the same limit."""
    granule = max(page, block)
    return min(num_tokens // granule * granule, device_hit(num_tokens, block))


def assert_same(some: Sequence[Answer], others: Sequence[Answer], within: float = 0.0) -> None:
    """Tokens equal, log-probabilities equal or at most ``within`` apart.

    Restored and device hits compute the same chunks, so that they are equal bit for bit; a cold
    answer comes of other chunks and differs by rounding.
    """
    assert [answer.tokens for answer in some] == [answer.tokens for answer in others]
    assert largest_difference(some, others) <= within


def largest_difference(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    pairs = zip(some, others, strict=True)
    return max(
        (
            abs(one - other)
            for a, b in pairs
            for one, other in zip(a.logprobs, b.logprobs, strict=True)
        ),
        default=0.0,
    )


class Engine:
    """One engine with the connector. ``storage`` is a folder or a table of options, ``extra``
    are further options of ours, the others are vLLM's."""

    def __init__(
        self,
        model: Path,
        storage: Path | Mapping[str, object] | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        if "worker_cls" in options:
            few_cores.fork_workers()
        import cpu_queues  # noqa: F401 (readers of queues in this process nap)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        stored: dict[str, object] = {}
        if storage is not None:
            table = storage if isinstance(storage, Mapping) else {"url": f"file://{storage}"}
            stored = {"storage": {**PATIENCE, **table}, **STORAGE_OPTIONS}
        self.llm = LLM(
            model=str(model),
            kv_transfer_config=KVTransferConfig(
                kv_connector="HiCacheConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={**OPTIONS, **stored, **(extra or {})},
            ),
            **{**SETTINGS, **options},
        )
        self.first_free_blocks = self.free_blocks

    # Inside --------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def side(self) -> Any:
        return self.scheduler.connector.scheduler_side

    @property
    def planner(self) -> Planner:
        return self.side.planner

    @property
    def worker_side(self) -> Any:
        """Of the worker in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def page_bytes(self) -> int:
        """Of all workers together."""
        return sum(self.planner.options.page_bytes)

    def cached_blocks(self, prompt: Any, num_tokens: int) -> list[int]:
        """Blocks in which vLLM's own cache holds the first tokens of a prompt, now."""
        request_id = self.add("look", prompt)
        blocks, found = self.scheduler.kv_cache_manager.get_computed_blocks(
            self.scheduler.requests[request_id]
        )[:2]
        self.abort([request_id])
        assert found >= num_tokens, f"{found} tokens are cached, {num_tokens} are wanted"
        return blocks.get_block_ids()[0][: num_tokens // self.planner.options.block_size]

    def device_kv(self, block_ids: Sequence[int]) -> np.ndarray:
        """Numbers in these device blocks: [layers, blocks, ...]. The worker lives here."""
        caches = self._device_caches()
        return np.stack([cache[block_ids].float().cpu().numpy().copy() for cache in caches])

    def _device_caches(self) -> Sequence[Any]:
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner.kv_caches

    def assert_kv_is_right(
        self, prompt: Sequence[int], num_tokens: int, tolerance: float = KV_TOLERANCE
    ) -> None:
        """Each cached block holds the KV of its own tokens: what computing them again gives.

        Answers alone do not tell: attention does not mind in which order it sees its keys.
        """
        np.testing.assert_allclose(*self.cached_and_computed(prompt, num_tokens), atol=tolerance)

    def cached_and_computed(self, prompt: Sequence[int], num_tokens: int) -> list[np.ndarray]:
        """KV of the cached blocks of ``num_tokens``, and what computing them again gives."""
        salted = {"prompt_token_ids": list(prompt), "cache_salt": "computed for comparison"}
        self.ask([salted], max_tokens=1)
        pair = [self.device_kv(self.cached_blocks(p, num_tokens)) for p in (prompt, salted)]
        assert pair[0].shape[1] == num_tokens // self.planner.options.block_size > 0
        return pair

    # Questions -----------------------------------------------------------------------------------

    def ask(
        self, prompts: Sequence[Any], *, max_tokens: int = 8, lora: Any = None, **params: Any
    ) -> list[Answer]:
        """Answers of all prompts at once; a prompt is a list of token ids or vLLM's dictionary."""
        outputs = self.generate(prompts, max_tokens=max_tokens, lora=lora, **params)
        return [answer_of(output, output.outputs[0]) for output in outputs]

    def generate(
        self, prompts: Sequence[Any], *, max_tokens: int = 8, lora: Any = None, **params: Any
    ) -> list[Any]:
        asked = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        settings = sampling(max_tokens=max_tokens, **params)
        return self.llm.generate(asked, settings, lora_request=lora, use_tqdm=False)

    def ask_each(self, prompts: Sequence[Any], **params: Any) -> list[Answer]:
        """One prompt after the other, so that the chunks do not depend on the neighbours."""
        return [self.ask([prompt], **params)[0] for prompt in prompts]

    def add(self, request_id: str, prompt: Any, *, max_tokens: int = 8, **params: Any) -> str:
        """Queue a request without running a step; vLLM's own id of it, as ``abort`` wants it."""
        asked = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        settings = sampling(max_tokens=max_tokens, **params)
        return self.llm.llm_engine.add_request(request_id, asked, settings)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.llm.llm_engine.abort_request(list(request_ids), internal=True)

    def step(self) -> list[Any]:
        return self.llm.llm_engine.step()

    def reset_device(self) -> None:
        """Drop vLLM's own prefix cache, as ``POST /reset_prefix_cache`` does; see ``poison``."""
        assert self.llm.reset_prefix_cache()
        self.poison()

    def reset_all(self) -> None:
        """Drop vLLM's prefix cache and the connector's."""
        assert self.llm.reset_prefix_cache(reset_connector=True)
        self.poison()

    def poison(self) -> None:
        """Overwrite all device blocks, so that a load that copies nothing is seen."""
        if self.planner.join.world_size == 1:
            for cache in self._device_caches():
                cache.fill_(POISON if cache.is_floating_point() else POISON_BYTE)

    # Rest ----------------------------------------------------------------------------------------

    def settle(self, timeout_s: float = 60.0) -> None:
        """Step until nothing runs: no request, no copy, no fetch, no persist."""
        deadline = time.monotonic() + timeout_s
        while self._is_active():
            assert time.monotonic() < deadline, f"not idle in {timeout_s} s: {self.running()}"
            if self.scheduler.has_requests():
                self.step()
            else:
                time.sleep(0.001)

    def poll_storage(self) -> None:
        """Take what storage processes said, as every step does."""
        self.side._settle_storage()

    def _is_active(self) -> bool:
        self.poll_storage()
        return self.scheduler.has_requests() or any(self.running().values())

    def running(self) -> dict[str, int]:
        planner = self.planner
        running = {"saves": planner.saves.num_running, "loads": planner.loads.num_running}
        if planner.prefetcher is not None and planner.persists is not None:
            running["queries"] = planner.prefetcher.num_querying
            running["fetches"] = planner.prefetcher.num_reading
            running["persists"] = planner.persists.num_running
        return running

    def assert_idle_and_clean(self) -> None:
        """Nothing of any request is left: no block, pin, slot, operation or ledger entry."""
        self.settle()
        assert self.problems() == []

    def problems(self) -> list[str]:
        planner, blocks = self.planner, self.side._blocks
        problems = audit(planner, is_idle=True, num_held_blocks=blocks.num_held)
        expected = {
            "free device blocks": (self.free_blocks, self.first_free_blocks),
            "held device blocks": (blocks.num_held, 0),
            "pinned host pages": (planner.host.num_pinned, 0),
            "slots of operations": (planner.host.slots.count(SlotOwner.OPERATION), 0),
            "used slots": (planner.host.slots.num_used, len(planner.host.index)),
            "requests of the connector": (len(self.side._requests), 0),
            "requests of vLLM": (len(self.scheduler.requests), 0),
        }
        differing = [f"{k}: {a}, expected {b}" for k, (a, b) in expected.items() if a != b]
        return problems + differing

    # Numbers -------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """The connector's own totals since the engine's start."""
        return dict(self.side.metrics.totals())

    def published(self) -> dict[str, float]:
        """Counters as Prometheus shows them: vLLM's own and ours. All of vLLM's labels kept but
        those that name the engine."""
        found = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                labels = {k: v for k, v in metric.labels.items() if k not in _ENGINE_LABELS}
                inner = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
                found[f"{metric.name}{{{inner}}}" if inner else metric.name] = metric.value
        return found

    def wait_for(self, counter: str, value: float, timeout_s: float = 10.0) -> None:
        """Storage processes tell their totals once a second. The caller looks what it came to."""
        deadline = time.monotonic() + timeout_s
        while self.counters()[counter] < value and time.monotonic() < deadline:
            self.poll_storage()
            time.sleep(0.01)

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


_ENGINE_LABELS = ("engine", "model_name")


def sampling(**params: Any) -> Any:
    """Greedy, with log-probabilities, to the last token, unless told otherwise."""
    from vllm import SamplingParams

    defaults = {"temperature": 0, "logprobs": 3, "detokenize": False, "ignore_eos": True}
    return SamplingParams(**(defaults | params))


def answer_of(request: Any, output: Any) -> Answer:
    places = output.logprobs or []
    return Answer(
        tokens=tuple(output.token_ids),
        logprobs=tuple(entry.logprob for place in places for _, entry in sorted(place.items())),
        cached=request.num_cached_tokens or 0,
    )


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


_running: list[Engine] = []


@contextmanager
def running(
    model: Path, storage: Path | Mapping[str, object] | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine that is stopped, whatever happened."""
    assert not _running, "vLLM's worker state is one per process: one engine at a time"
    with _environment():
        try:
            engine = Engine(model, storage, **options)
        except BaseException:
            _forget_refused()
            raise
        _running.append(engine)
        try:
            yield engine
        finally:
            _running.clear()
            engine.stop()


@contextmanager
def _environment() -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _forget_refused() -> None:
    """An engine that did not start stops nothing: without this no other would start here."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def step_until(engine: Engine, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        engine.step()

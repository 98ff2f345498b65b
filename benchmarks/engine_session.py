"""One vLLM engine that answers many clients at once, and the times of every token it gives.

The engine runs in a process of its own, as under ``vllm serve``; or in this one, which starts
sooner and is what the tests use.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import get_metrics_snapshot

from vllm_hicache.benchmarks.answers import Answer, RunFailed
from vllm_hicache.benchmarks.engine_plan import EnginePlan

logger = logging.getLogger(__name__)

AS_SERVED = UsageContext.OPENAI_API_SERVER
"""vLLM's defaults are those of ``vllm serve``, such as the tokens of a step."""
SETTLE_S = 300.0
"""Longest wait for blocks that are still referenced, or for files."""
_POLL_S = 0.02
_QUIET_S = 1.0
"""Files that did not change for so long are taken to be all that will be written."""
_STATS_S = 0.1
"""The front end counts a step's hits shortly after it hands out the step's tokens."""


class _Engine(Protocol):
    """What both kinds of engines offer."""

    def outputs(
        self, request_id: str, prompt: list[int], parameters: SamplingParams
    ) -> AsyncIterator[Any]: ...

    async def reset(self, *, reset_connector: bool) -> bool: ...

    def shutdown(self) -> None: ...


class EngineSession:
    """An engine with the connector of one arm, or with none."""

    def __init__(self, plan: EnginePlan) -> None:
        transfer = KVTransferConfig(
            kv_connector=plan.connector or None,
            kv_role="kv_both" if plan.connector else None,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=plan.connector_options,
        )
        arguments = AsyncEngineArgs(
            **plan.engine, kv_transfer_config=transfer if plan.connector else None
        )
        self._engine: _Engine
        self._engine = _Stepped(arguments) if plan.in_process else _OwnProcess(arguments)
        self._storage = plan.storage
        self._num_requests = 0

    async def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        """Send one prompt and take exactly ``num_tokens`` tokens."""
        parameters = SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._num_requests += 1
        arrivals: list[float] = []
        counts: list[int] = []
        token_ids: list[int] = []
        num_cached = 0
        submitted = time.perf_counter()
        async for output in self._engine.outputs(str(self._num_requests), prompt, parameters):
            new = output.outputs[0].token_ids
            if new:
                arrivals.append(time.perf_counter())
                counts.append(len(new))
                token_ids += new
            num_cached = max(num_cached, output.num_cached_tokens or 0)
        if len(token_ids) != num_tokens:
            raise RunFailed(f"{num_tokens} tokens were asked for, {len(token_ids)} came")
        return Answer(submitted, tuple(arrivals), tuple(counts), tuple(token_ids), num_cached)

    async def drop_device(self) -> None:
        """Empty vLLM's own prefix cache; nothing may be running."""
        await self._reset(reset_connector=False)

    async def drop_host(self) -> None:
        """Empty vLLM's prefix cache and host memory, once all files are written; they stay."""
        await self._wait_for_files()
        await self._reset(reset_connector=True)

    async def _reset(self, *, reset_connector: bool) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not await self._engine.reset(reset_connector=reset_connector):
            if time.monotonic() > deadline:
                raise RunFailed(f"waited {SETTLE_S:.0f} s for blocks that are still referenced")
            await asyncio.sleep(_POLL_S)

    async def _wait_for_files(self) -> None:
        if self._storage is None:
            return
        deadline = time.monotonic() + SETTLE_S
        seen, since = -1, time.monotonic()
        while time.monotonic() < since + _QUIET_S:
            if (found := stored_bytes(self._storage)) != seen:
                seen, since = found, time.monotonic()
            if time.monotonic() > deadline:
                raise RunFailed(f"waited {SETTLE_S:.0f} s for files")
            await asyncio.sleep(_POLL_S)

    async def counters(self) -> dict[str, float]:
        """Cumulative counters of vLLM and the connector, by name or ``name/label``: the label is
        the source or the reason."""
        await asyncio.sleep(_STATS_S)
        found: dict[str, float] = {}
        for metric in get_metrics_snapshot():
            value = metric.sum if hasattr(metric, "sum") else getattr(metric, "value", None)
            if value is not None:
                label = metric.labels.get("source", "") or metric.labels.get("reason", "")
                key = f"{metric.name}/{label}" if label else metric.name
                found[key] = found.get(key, 0.0) + value
        return found

    def shutdown(self) -> None:
        """End the engine; its process is gone afterwards."""
        self._engine.shutdown()


class _OwnProcess:
    """vLLM's asynchronous front end."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self._llm = AsyncLLM.from_engine_args(arguments, usage_context=AS_SERVED)

    async def outputs(
        self, request_id: str, prompt: list[int], parameters: SamplingParams
    ) -> AsyncIterator[Any]:
        asked = {"prompt_token_ids": prompt}
        async for output in self._llm.generate(asked, parameters, request_id):
            yield output

    async def reset(self, *, reset_connector: bool) -> bool:
        return bool(await self._llm.reset_prefix_cache(reset_connector=reset_connector))

    def shutdown(self) -> None:
        self._llm.shutdown()
        del self._llm  # now, not while the interpreter goes down


class _Stepped:
    """An engine of this process; a task steps it while there are requests."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self._engine = LLMEngine.from_engine_args(arguments, usage_context=AS_SERVED)
        self._core: Any = self._engine.engine_core.engine_core
        pause_without_work(self._core)
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def outputs(
        self, request_id: str, prompt: list[int], parameters: SamplingParams
    ) -> AsyncIterator[Any]:
        queue = self._queues[request_id] = asyncio.Queue()
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, parameters)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())
        is_finished = False
        while not is_finished:
            output = await queue.get()
            if isinstance(output, Exception):
                raise output
            is_finished = output.finished
            yield output
        del self._queues[request_id]

    async def _step_while_busy(self) -> None:
        while self._engine.has_unfinished_requests():
            try:
                outputs = self._engine.step()
            except Exception as error:  # every client hears of it
                logger.exception("the engine failed")
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            for output in outputs:
                self._queues[output.request_id].put_nowait(output)
            await asyncio.sleep(0)

    async def reset(self, *, reset_connector: bool) -> bool:
        deadline = time.monotonic() + SETTLE_S
        while self._core.scheduler.has_requests() and time.monotonic() < deadline:
            self._engine.step()
        return bool(self._engine.reset_prefix_cache(reset_connector=reset_connector))

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()


def pause_without_work(core: Any) -> None:
    """Let a step without work end with a pause of 1 ms, as in a server's engine process: copy
    threads of this process get no turn otherwise."""
    post_step = core.post_step

    def post_step_and_pause(model_executed: bool) -> None:
        post_step(model_executed)
        if not model_executed and core.scheduler.has_requests():
            time.sleep(0.001)

    core.post_step = post_step_and_pause


def stored_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; those that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total

"""The loop of vLLM's engine in virtual time: its real scheduler, two batches in flight."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_hicache.benchmarks.device_model import IDLE_S, LAUNCH_S, HostLink, step_s
from vllm_hicache.benchmarks.virtual_clock import VirtualClock
from vllm_hicache.benchmarks.virtual_scheduler import VirtualPlan, make_scheduler, token_bytes
from vllm_hicache.benchmarks.virtual_workers import Launch
from vllm_hicache.tiers import Direction

BATCHES_IN_FLIGHT = 2
ANSWER_TOKEN = 7
"""Of every answer; what comes before makes its KV another one."""


@dataclass(slots=True)
class VirtualAnswer:
    """One request: moments of its tokens, and where its prompt came from, all in tokens."""

    prompt_tokens: int
    answer_tokens: int
    asked_s: float
    token_times: list[float]
    device_tokens: int = 0
    host_tokens: int = 0
    computed_tokens: int = 0
    """Of the prompt, as vLLM says; what is computed again is not counted again."""
    scheduled_tokens: int = 0
    """All that the device computed for it, its answer included."""
    preemptions: int = 0
    is_done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.asked_s

    @property
    def again_tokens(self) -> int:
        """Computed a second time: one where the whole prompt was there, more after preemptions."""
        # The last token of an answer is not computed.
        return self.scheduled_tokens - self.computed_tokens - (self.answer_tokens - 1)


@dataclass(slots=True)
class _Batch:
    output: SchedulerOutput
    sampled: list[list[int]]
    report: KVConnectorOutput | None
    end_s: float


class VirtualEngine:
    """An engine whose device and link are only computed. Its clock is the caller's, who has it
    replace ``time.monotonic`` as long as the engine lives."""

    def __init__(self, plan: VirtualPlan, clock: VirtualClock, folder: Path) -> None:
        self._clock = clock
        self.link = HostLink(plan.link_bytes_per_s)
        self.scheduler, self._worker = make_scheduler(plan, folder, self.link)
        hash_name = self.scheduler.vllm_config.cache_config.prefix_caching_hash_algo
        hash_fn = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_fn)
        self._hash_blocks = get_request_block_hasher(plan.block_size, hash_fn)
        self._batches: deque[_Batch] = deque()
        self._free_s = clock.now_s
        self._answers: dict[str, VirtualAnswer] = {}
        self.num_steps = 0
        self.busy_s = 0.0
        """Of the device."""
        self.stalled_s = 0.0
        """Forwards waited so long for copies."""

    @property
    def has_work(self) -> bool:
        return bool(self._batches) or self.scheduler.has_requests()

    def ask(self, prompt: list[int], answer_tokens: int, asked_s: float) -> VirtualAnswer:
        """Hand in a request that was sent at ``asked_s``; its answer grows with the steps."""
        name = f"request-{len(self._answers)}"
        parameters = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
        request = Request(name, prompt, parameters, None, block_hasher=self._hash_blocks)
        answer = VirtualAnswer(len(prompt), answer_tokens, asked_s, [])
        self._answers[name] = answer
        self.scheduler.add_request(request)
        return answer

    def step(self) -> None:
        """Launch a batch while fewer than two are in flight, else take the oldest one's output."""
        has_computed = False
        if self.scheduler.has_requests():
            has_computed = self._launch()
            is_room_left = len(self._batches) < BATCHES_IN_FLIGHT
            if is_room_left and (has_computed or self.scheduler.has_requests()):
                self._rest(has_computed)
                return
        if self._batches:
            self._take_output(self._batches.popleft())
        self._rest(has_computed)

    def finish(self) -> None:
        """Step until nothing is left to do, what frees blocks late included."""
        while self.has_work:
            self.step()

    def drop_device(self) -> None:
        """Forget the device's prefix cache, as a reset of an idle engine does."""
        self.finish()
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("device blocks are still referenced")

    def totals(self) -> dict[str, float]:
        """What has grown since the start, by name."""
        return {
            "device_busy_s": self.busy_s,
            "stalled_s": self.stalled_s,
            "steps": self.num_steps,
            "loaded_bytes": self.link.num_bytes[Direction.LOAD],
            "saved_bytes": self.link.num_bytes[Direction.SAVE],
        }

    def check_end(self) -> None:
        """Raises RuntimeError where a request or a device block is still held."""
        pool = self.scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one stands for nothing
        if self.has_work or self.scheduler.requests or held:
            raise RuntimeError(
                f"the engine ends with {len(self.scheduler.requests)} requests, "
                f"{len(self._batches)} batches and {held} device blocks held"
            )

    def close(self) -> None:
        self.scheduler.shutdown()
        self._worker.close()

    def _launch(self) -> bool:
        clock, worker = self._clock, self._worker
        worker.advance(clock.now_s)
        output = self.scheduler.schedule()
        self.num_steps += 1
        clock.now_s += LAUNCH_S
        launch = Launch(clock.now_s, max(clock.now_s, self._free_s))
        metadata = output.kv_connector_metadata
        start_s = launch.free_s
        if metadata is not None:
            start_s = worker.before_forward(metadata, launch)
        self.stalled_s += start_s - launch.free_s
        rows, sampled = self._rows(output)
        needed_s = step_s(rows, token_bytes()) if rows else 0.0
        end_s = start_s + needed_s
        self.busy_s += needed_s
        report = None
        if metadata is not None:
            worker.after_forward(metadata, launch, end_s)
            worker.advance(clock.now_s)
            report = worker.report(metadata, launch)
        if rows:
            self._free_s = end_s
        # Without a forward, there is an output once whatever was waited for is done.
        returned_s = end_s if rows or start_s > launch.free_s else clock.now_s
        self._batches.append(_Batch(output, sampled, report, returned_s))
        return bool(rows)

    def _rows(self, output: SchedulerOutput) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """(new tokens, tokens before) and the sampled tokens of each request of a batch."""
        rows, sampled = [], []
        for name, num_new in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            rows.append((num_new, request.num_computed_tokens - num_new))
            sampled.append([] if request.is_prefill_chunk else [ANSWER_TOKEN])
            self._answers[name].scheduled_tokens += num_new
        for name in output.preempted_req_ids or ():
            self._answers[name].preemptions += 1
        return rows, sampled

    def _take_output(self, batch: _Batch) -> None:
        self._clock.wait_until(batch.end_s)
        self._worker.advance(self._clock.now_s)
        names = list(batch.output.num_scheduled_tokens)
        model_output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=batch.sampled,
            kv_connector_output=batch.report,
        )
        outputs = self.scheduler.update_from_output(batch.output, model_output)
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._note(output)

    def _note(self, output: Any) -> None:
        answer = self._answers[output.request_id]
        answer.token_times += [self._clock.now_s] * len(output.new_token_ids)
        sources = output.prefill_stats
        if sources is not None:
            answer.device_tokens = sources.num_local_cached_tokens
            answer.host_tokens = sources.num_external_cached_tokens
            answer.computed_tokens = sources.num_computed_tokens
        answer.is_done = output.finish_reason is not None

    def _rest(self, has_computed: bool) -> None:
        if not has_computed and self.scheduler.has_requests():
            self._clock.now_s += IDLE_S

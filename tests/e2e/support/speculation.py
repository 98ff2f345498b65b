"""What a drafter did: the ids that it proposed step by step, and how many of them were accepted.

The engine's scheduler lives in this process, and vLLM hands it every step's proposals.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_in_process import ENVIRONMENT, SETTINGS, Answer, answer_of, sampling

DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@dataclass(frozen=True, slots=True)
class Run:
    """Answers to some prompts, what was proposed for each of them, and the accepted part."""

    answers: tuple[Answer, ...]
    proposals: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each prompt the ids of each step."""
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.answers]

    @property
    def cached(self) -> list[int]:
        return [answer.cached for answer in self.answers]


class Drafter:
    """Watches the drafter of one engine, with a connector or without."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._proposed: dict[str, list[tuple[int, ...]]] = {}
        self._handed = self._scheduler.update_draft_token_ids
        self._scheduler.update_draft_token_ids = self._update

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler

    def _update(self, drafts: Any) -> None:
        for request_id, ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self._proposed.setdefault(request_id, []).append(tuple(map(int, ids)))
        self._handed(drafts)

    def ask(self, prompts: Sequence[Any], *, max_tokens: int = 40) -> Run:
        """All prompts at once; a prompt is a list of token ids or vLLM's dictionary."""
        self._proposed.clear()
        before = self._counts()
        asked = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        outputs = self._llm.generate(
            asked, sampling(max_tokens=max_tokens, logprobs=None), use_tqdm=False
        )
        after = self._counts()
        # Inner ids end in "-<random>" and begin with the place of the prompt.
        by_place = sorted(self._proposed.items(), key=lambda item: int(item[0].split("-")[0]))
        return Run(
            answers=tuple(answer_of(output, output.outputs[0]) for output in outputs),
            proposals=tuple(tuple(steps) for _, steps in by_place),
            drafted=after[DRAFTED] - before[DRAFTED],
            accepted=after[ACCEPTED] - before[ACCEPTED],
        )

    def ask_each(self, prompts: Sequence[Any], **params: Any) -> Run:
        """One prompt after the other, so that no step depends on the neighbours."""
        runs = [self.ask([prompt], **params) for prompt in prompts]
        return Run(
            answers=tuple(answer for run in runs for answer in run.answers),
            proposals=tuple(steps for run in runs for steps in run.proposals),
            drafted=sum(run.drafted for run in runs),
            accepted=sum(run.accepted for run in runs),
        )

    def _counts(self) -> dict[str, int]:
        counts = dict.fromkeys((DRAFTED, ACCEPTED), 0)
        for metric in self._llm.get_metrics():
            if metric.name in counts:
                counts[metric.name] += int(metric.value)
        return counts

    # The worker lives in this process -------------------------------------------------------------

    @property
    def _runner(self) -> Any:
        return self._core.model_executor.driver_worker.worker.model_runner

    @property
    def vllm_config(self) -> Any:
        return self._runner.vllm_config

    @property
    def kv_cache_config(self) -> Any:
        return self._runner.kv_cache_config

    @property
    def layers(self) -> list[str]:
        """Names of the drafter's layers, as the drafter itself counts them."""
        return sorted(self._runner.drafter._draft_attn_layer_names)

    def forget(self) -> None:
        """Zeros in place of all draft state on the device; the target's KV is left alone."""
        layers = self._runner.compilation_config.static_forward_context
        for name in self.layers:
            layers[name].kv_cache.zero_()


@contextmanager
def drafting(
    model: Path, speculation: dict[str, object] | None, **options: Any
) -> Iterator[Drafter]:
    """An engine without connector that speculates (or not), stopped whatever happened."""
    saved = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    import cpu_queues  # noqa: F401 (readers of queues in this process nap)
    from vllm import LLM

    llm = LLM(model=str(model), speculative_config=speculation, **{**SETTINGS, **options})
    try:
        yield Drafter(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

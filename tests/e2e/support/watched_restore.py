"""Prompts asked cold and again, with the bytes of their device blocks and the hooks of each step.

A specification has ``model``, ``storage``, ``options`` (vLLM's), ``lengths``, ``extra``, and
``phases``: ``NAME``, or ``reset:NAME`` to drop vLLM's own cache before it. A child that begins
warm has ``said``, too.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine_in_process import Answer, Engine, answer_of, difference, prompt_of, running
from hook_spy import distinct, spying_hooks
from restore_child import as_list, published, wait_for_reads, wait_for_writes

TURN_TOKENS, NUM_SAID, NUM_REPEATED = 60, 24, 16
"""A prompt, the tokens of its answer, and those of them that the next turn repeats: the first
page ends among them, so that it is written by decoding, token by token or draft by draft."""
ANSWER = NUM_SAID - NUM_REPEATED
"""Tokens of every other answer."""


def answer(specification: Mapping[str, Any]) -> dict[str, Any]:
    return run_life(specification, specification["said"])


def run_life(specification: Mapping[str, Any], said: Sequence[int] = ()) -> dict[str, Any]:
    """One engine. ``said`` is the answer of an engine before, if it is not asked cold."""
    model, storage = Path(specification["model"]), specification["storage"]
    options = {**specification["options"], "max_model_len": 1024}
    with (
        spying_hooks() as steps,
        running(model, storage, extra=specification["extra"], **options) as engine,
        counting_batches(engine) as batches,
        noting_proposals(engine) as proposed,
    ):
        phases = []
        for phase in specification["phases"]:
            action, _, name = phase.rpartition(":")
            if action == "reset":
                engine.reset_device()
            phases.append(run_phase(engine, name, specification["lengths"], said, proposed))
            said = said or phases[-1]["said"]
        wait_for_writes(engine)
        runner = _runner(engine)
        return {
            "phases": phases,
            "problems": engine.problems(),
            "hooks": distinct(steps),
            "most_batches": max(batches),
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "page_bytes": engine.page_bytes,
            "pools": _pools(engine),
            "counters": engine.counters(),
            "said": said,
        }


@contextmanager
def counting_batches(engine: Engine) -> Iterator[list[int]]:
    """How many batches are in flight with each that is scheduled, itself counted."""
    scheduler, core = engine.scheduler, engine.llm.llm_engine.engine_core.engine_core
    schedule = scheduler.schedule
    seen: list[int] = []

    def schedule_and_count(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        if output.total_num_scheduled_tokens:
            seen.append(len(core.batch_queue or ()) + 1)
        return output

    with patch.object(scheduler, "schedule", schedule_and_count):
        yield seen


@contextmanager
def noting_proposals(engine: Engine) -> Iterator[list[list[int]]]:
    """The ids that were proposed, step by step, but for those behind a part of a prompt, which
    vLLM drops. With asynchronous scheduling nobody is told; the V2 runner keeps the ids."""
    scheduler, states = engine.scheduler, getattr(_runner(engine), "req_states", None)
    update = scheduler.update_draft_token_ids
    seen: list[list[int]] = []

    def update_and_note(drafts: Any) -> None:
        for request_id, ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_prefill_chunk:
                if states is not None:
                    ids = states.draft_tokens[states.req_id_to_index[request_id]]
                seen.append([int(token) for token in ids])
        update(drafts)

    with patch.object(scheduler, "update_draft_token_ids", update_and_note):
        yield seen


def run_phase(
    engine: Engine,
    name: str,
    lengths: Sequence[int],
    said: Sequence[int],
    proposed: list[list[int]],
) -> dict[str, Any]:
    """Ask each prompt once, then the one whose answer, or next turn, decides what was decoded."""
    before, seen, drafts = engine.counters(), published(engine), _drafts(engine)
    proposed.clear()
    asked = [ask(engine, prompt_of(f"runner {n}", n), ANSWER) for n in lengths]
    alike = list(proposed)
    turn = prompt_of("turn", TURN_TOKENS)
    if said:
        asked.append(ask(engine, turn + list(said[:NUM_REPEATED]), ANSWER))
    else:
        asked.append(ask(engine, turn, NUM_SAID))
    engine.settle()
    wait_for_reads(engine)
    return {
        "name": name,
        "answers": [as_list(answer) for answer, _ in asked],
        "blocks": [blocks for _, blocks in asked],
        "said": list(asked[-1][0].tokens),
        "proposed": alike,
        "drafts": difference(_drafts(engine), drafts),
        "counters": difference(engine.counters(), before),
        "published": difference(published(engine), seen),
    }


def ask(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[Answer, list[dict[int, str]]]:
    """The answer, and a digest of each device block of each KV cache group, by its place."""
    engine.add("asked", prompt, max_tokens=max_tokens)
    block_ids: tuple[list[int], ...] = ()
    while True:
        outputs = [output for output in engine.step() if output.finished]
        for request in engine.scheduler.running:
            block_ids = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if outputs:
            return answer_of(outputs[0], outputs[0].outputs[0]), _digests(engine, block_ids)


def _digests(engine: Engine, block_ids: tuple[list[int], ...]) -> list[dict[int, str]]:
    layers = _runner(engine).vllm_config.compilation_config.static_forward_context
    found = []
    for group, ids in zip(engine.scheduler.kv_cache_config.kv_cache_groups, block_ids, strict=True):
        caches = [layers[name].kv_cache for name in group.layer_names]
        # Block 0 stands for one that the request no longer has.
        found.append({place: _digest(caches, i) for place, i in enumerate(ids) if i})
    return found


def _digest(caches: list[Any], block_id: int) -> str:
    rows = b"".join(cache[block_id].float().cpu().numpy().tobytes() for cache in caches)
    return hashlib.sha256(rows).hexdigest()[:16]


def _runner(engine: Engine) -> Any:
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def _pools(engine: Engine) -> dict[str, dict[str, Any]]:
    """What the worker says of its part of a page: bytes, objects, and how their names end."""
    return {
        one.pool.name: {
            "digest": one.pool.digest,
            "reach": one.pool.reach,
            "page_bytes": one.layout.page_bytes,
            "objects": len(one.layout.shards),
        }
        for one in engine.worker_side.pools
    }


def _drafts(engine: Engine) -> dict[str, float]:
    counted = engine.published()
    kinds = ("draft_tokens", "accepted_tokens")
    return {kind: counted.get(f"vllm:spec_decode_num_{kind}", 0.0) for kind in kinds}

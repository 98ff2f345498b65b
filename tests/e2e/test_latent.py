"""Latent attention (MLA): one row a token and layer, equal on all tensor-parallel workers.

On a CPU vLLM turns its own prefix cache off for latents, and its kernel for a known prefix answers
otherwise than the one for a cold prompt. So rows are compared with those that were computed.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import topology_steps
from child_process import run_child, workers
from engine_in_process import (
    HEADER_BYTES,
    KV_TOLERANCE,
    OPTIONS,
    PAGE,
    STORAGE_OPTIONS,
    Engine,
    answer_of,
    assert_same,
    difference,
    prompt_of,
    restored_hit,
    running,
)
from model_results import note_restored
from tiny_latent import LATENT, NUM_LAYERS, ROPE, write_latent
from tiny_latent_experts import write_latent_experts

from vllm_hicache.connectors.model_geometry import model_geometry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 16
"""vLLM takes no other for latents on a CPU."""
ENGINE = {"block_size": BLOCK, "attention_backend": "CPU_MLA"}
"""Named, since on a CPU with AMX vLLM would take a kernel that has no float32, whatever the model's
type."""
LENGTHS = (PAGE - 1, PAGE, PAGE + 1, 350, 600)
PAGE_BYTES = PAGE * NUM_LAYERS * (LATENT + ROPE) * 4
EXTRA = {"fixed_weights": True, "storage_layer_partition": 1}
"""An object a layer, so that two workers share the writing: two layers and one."""


@pytest.fixture(
    scope="module", params=["DeepSeek-V2", pytest.param("DeepSeek-V3", marks=pytest.mark.full)]
)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path], family: str) -> Path:
    """Both have rows of one shape; V3's are followed by experts, which all workers share."""
    llama = tiny_llama()
    if family == "DeepSeek-V2":
        return write_latent(llama.parent / "latent", llama)
    return write_latent_experts(llama.parent / "latent-experts", llama)


def expected(n: int) -> int:
    return restored_hit(n, PAGE, BLOCK)


def rows_of(engine: Engine, prompt: Any, num_tokens: int) -> tuple[Any, np.ndarray]:
    """The answer, and the rows of the prompt's first tokens as they lie on the device."""
    engine.add("rows", prompt)
    manager, block_ids = engine.scheduler.kv_cache_manager, []
    while True:
        outputs = [output for output in engine.step() if output.finished]
        for request in engine.scheduler.running:
            block_ids = manager.get_block_ids(request.request_id)[0]
        if outputs:
            rows = engine.device_kv(block_ids[: num_tokens // BLOCK])
            return answer_of(outputs[0], outputs[0].outputs[0]), rows


def namespace_of_doctor(model: Path, storage: str) -> str:
    """What ``hicache doctor`` computes from the configuration alone."""
    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**OPTIONS, **STORAGE_OPTIONS, **EXTRA, "storage": storage},
    }
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    return model_geometry(str(model), json.dumps(transfer), arguments).namespace.digest


def test_rows_come_back_from_host_and_files_as_they_were_computed(
    family: str, model: Path, tmp_path: Path
) -> None:
    prompts = [prompt_of(f"latent {n}", n) for n in LENGTHS]
    hits = [expected(n) for n in LENGTHS]
    with running(model, tmp_path / "store", extra=EXTRA, **ENGINE) as engine:
        assert engine.page_bytes == PAGE_BYTES
        found = []
        for reset in (engine.poison, engine.reset_device, engine.reset_all):
            reset()
            before = engine.counters()
            found.append([rows_of(engine, p, hits[i]) for i, p in enumerate(prompts)])
            engine.settle()
            counted = difference(engine.counters(), before)
        engine.assert_idle_and_clean()
        namespace = engine.planner.namespace
    assert namespace_of_doctor(model, f"file://{tmp_path}/store") == namespace
    cold, host, file = found
    assert [answer.cached for answer, _ in cold] == [0] * len(LENGTHS)
    assert [answer.cached for answer, _ in host] == hits
    assert [answer.cached for answer, _ in file] == hits
    assert counted["served_tokens/storage"] == sum(hits)
    assert_same([answer for answer, _ in file], [answer for answer, _ in host])
    for (_, computed), (_, loaded), (_, fetched) in zip(cold, host, file, strict=True):
        assert np.array_equal(computed, loaded)
        assert np.array_equal(computed, fetched)
    note_restored(family)


@pytest.fixture(scope="module")
def store(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(family)


@pytest.fixture(scope="module")
def chain(model: Path, store: Path) -> list[Mapping[str, Any]]:
    """One worker writes; two read that, write, and read their own."""
    records = []
    for name, tp, reads in (("one", 1, []), ("two", 2, ["one", "two"])):
        options, env = workers(tp, 1) if tp > 1 else ({}, {})
        specification = {
            "model": str(model),
            "storage": {"url": f"file://{store}/store", "exists_timeout_s": 30},
            "extra": EXTRA,
            "lengths": LENGTHS,
            "name": name,
            "reads": reads,
            "writes": True,
            "options": {**options, **ENGINE},
        }
        if tp == 1:
            records.append(topology_steps.answer(specification))
        else:
            records.append(run_child("topology_steps", specification, store, env))
    return records


@pytest.mark.full
def test_two_workers_read_what_one_and_what_two_wrote(
    family: str, chain: list[Mapping[str, Any]]
) -> None:
    two = chain[1]
    num_pages = sum(n // PAGE for n in LENGTHS)
    for name in ("one", "two"):
        counters = two[name]["counters"]
        assert [cached for *_, cached in two[name]["restored"]] == [expected(n) for n in LENGTHS]
        assert counters["served_tokens/storage"] == sum(expected(n) for n in LENGTHS)
        assert counters["objects_read"] == 2 * num_pages * NUM_LAYERS
        assert two[name]["restored"] == two[name]["device"]  # which is host: see above
    assert [record["problems"] for record in chain] == [[], []]
    note_restored(family, tp=2)


@pytest.mark.full
def test_one_worker_reads_what_two_wrote(
    chain: list[Mapping[str, Any]], model: Path, store: Path
) -> None:
    assert chain
    prompt = prompt_of(f"two {LENGTHS[-1]}", LENGTHS[-1])
    storage = {"url": f"file://{store}/store", "exists_timeout_s": 30}
    hit = expected(LENGTHS[-1])
    with running(model, storage, extra=EXTRA, **ENGINE) as engine:
        answer, restored = rows_of(engine, prompt, hit)
        assert answer.cached == hit == engine.counters()["served_tokens/storage"]
        salted = {"prompt_token_ids": prompt, "cache_salt": "computed for comparison"}
        _, computed = rows_of(engine, salted, hit)
        # The first layer alone: vLLM's latents of two CPU workers differ from those of one behind
        # its first attention.
        np.testing.assert_allclose(restored[0], computed[0], atol=KV_TOLERANCE)
        engine.assert_idle_and_clean()


@pytest.mark.full
def test_two_workers_write_every_object_once(chain: list[Mapping[str, Any]], store: Path) -> None:
    object_bytes = PAGE_BYTES // NUM_LAYERS
    for record in chain:
        counted = record["persisted"]
        assert counted["objects_written"] % NUM_LAYERS == 0
        assert counted["persisted_bytes"] == counted["objects_written"] * object_bytes
        written = counted["objects_written"] * (object_bytes + HEADER_BYTES)
        assert counted["bytes_written"] == written
    assert [record["page_bytes"] for record in chain] == [PAGE_BYTES, 2 * PAGE_BYTES]

"""Latent attention (MLA): one row a token and layer, equal on all tensor-parallel workers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import topology_steps
from child_process import run_child, workers
from engine_in_process import (
    HEADER_BYTES,
    PAGE,
    Answer,
    assert_same,
    difference,
    prompt_of,
    restored_hit,
    running,
)
from tiny_latent import LATENT, NUM_LAYERS, ROPE, write_latent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOLERANCE = 2e-3
BLOCK = 16
"""vLLM takes no other for latents on a CPU."""
LENGTHS = (PAGE - 1, PAGE, PAGE + 1, 350, 600)
PAGE_BYTES = PAGE * NUM_LAYERS * (LATENT + ROPE) * 4
EXTRA = {"fixed_weights": True, "storage_layer_partition": 1}
"""An object a layer, so that two workers share the writing: two layers and one."""


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path]) -> Path:
    llama = tiny_llama()
    return write_latent(llama.parent / "latent", llama)


def expected(n: int) -> int:
    return restored_hit(n, PAGE, BLOCK)


def test_cold_host_and_file_answers_are_the_same(model: Path, tmp_path: Path) -> None:
    prompts = [prompt_of(f"latent {n}", n) for n in LENGTHS]
    hits = [expected(n) for n in LENGTHS]
    with running(model, tmp_path / "store", extra=EXTRA, block_size=BLOCK) as engine:
        assert engine.page_bytes == PAGE_BYTES
        cold = engine.ask_each(prompts)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        host = engine.ask_each(prompts)
        engine.settle()
        counted = difference(engine.counters(), before)
        engine.reset_all()
        file = engine.ask_each(prompts)
        engine.assert_idle_and_clean()
    assert [a.cached for a in cold] == [0] * len(LENGTHS)
    assert [a.cached for a in host] == [a.cached for a in file] == hits
    assert counted["served_tokens/host"] == sum(hits)
    assert_same(host, cold, TOLERANCE)
    assert_same(file, host)


@pytest.fixture(scope="module")
def chain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    """One worker writes, two read that and write, one reads what the two wrote."""
    folder = tmp_path_factory.mktemp("latent")
    records = []
    for name, tp, reads, writes in (
        ("one", 1, [], True),
        ("two", 2, ["one", "two"], True),
        ("last", 1, ["two"], False),
    ):
        specification = {
            "model": str(model),
            "storage": {"url": f"file://{folder}/store", "exists_timeout_s": 30},
            "extra": EXTRA,
            "lengths": LENGTHS,
            "name": name,
            "reads": reads,
            "writes": writes,
            "options": {"block_size": BLOCK},
        }
        if tp == 1:
            records.append(topology_steps.answer(specification))
        else:
            options, env = workers(tp, 1)
            specification["options"] = {**options, "block_size": BLOCK}
            records.append(run_child("topology_steps", specification, folder, env))
    return records


def answers(record: Any) -> list[Answer]:
    return [Answer(tuple(tokens), tuple(logprobs), cached) for tokens, logprobs, cached in record]


def test_engines_of_one_and_two_workers_read_each_others_objects(
    chain: list[Mapping[str, Any]],
) -> None:
    one, two, last = chain
    for reader, writer, name in ((two, one, "one"), (two, two, "two"), (last, two, "two")):
        found = reader[name]
        restored = answers(found["restored"])
        assert [a.cached for a in restored] == [expected(n) for n in LENGTHS]
        assert found["counters"]["served_tokens/storage"] == sum(expected(n) for n in LENGTHS)
        assert_same(restored, answers(writer["cold"]), TOLERANCE)
    assert [record["problems"] for record in chain] == [[], [], []]


def test_two_workers_write_every_object_once_and_read_it_twice(
    chain: list[Mapping[str, Any]],
) -> None:
    one, two, _ = chain
    num_pages = sum(n // PAGE for n in LENGTHS)
    object_bytes = PAGE_BYTES // NUM_LAYERS + HEADER_BYTES
    for record in (one, two):
        counted = record["persisted"]
        assert counted["objects_written"] == num_pages * NUM_LAYERS
        assert counted["bytes_written"] == num_pages * NUM_LAYERS * object_bytes
        assert counted["persisted_bytes"] == num_pages * PAGE_BYTES
    assert two["page_bytes"] == 2 * PAGE_BYTES
    assert two["one"]["counters"]["objects_read"] == 2 * num_pages * NUM_LAYERS

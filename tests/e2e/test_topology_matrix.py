"""Writers x readers x storage services: what one topology stored, every aligned one restores.

A chain of engines, one after the other, on one real store: each reads what all before it wrote and
writes prompts of its own. A push has a short chain for each service, the full tier all 16 pairs on
each; there the engine of four workers starts once and reads its own after forgetting them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis_under_test
import s3_servers
import topology_steps
from child_process import run_child, workers
from engine_in_process import HEADER_BYTES, PAGE, Answer, assert_same, device_hit, restored_hit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

COLD_TOLERANCE = 1e-4
LENGTHS = (PAGE + 1, 350, 600)
"""Each has a device hit as long as a restored one, so that the chunks computed are the same."""
SHARDS_PER_PAGE = 4
"""2 of 4 layers x 1 of 2 heads: the coarsest objects that all four topologies can read."""
EXTRA = {"fleet": {"tp": [1, 2], "pp": [1, 2]}, "fixed_weights": True}
SIZES = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}


@dataclass(frozen=True, slots=True)
class Life:
    """One engine: its topology, whose prompts it reads, and whether it writes its own before."""

    name: str
    reads: Sequence[str] = ()
    writes: bool = True


WHOLE = (
    Life("tp1", ["tp1"]),
    Life("tp2", ["tp1", "tp2"]),
    Life("pp2", ["tp1", "tp2", "pp2"]),
    Life("tp2-pp2", ["tp1", "tp2", "pp2", "tp2-pp2"]),
    Life("pp2", ["tp2-pp2"], writes=False),
    Life("tp2", ["pp2", "tp2-pp2"], writes=False),
    Life("tp1", ["tp2", "pp2", "tp2-pp2"], writes=False),
)


def there_and_back(name: str) -> tuple[Life, ...]:
    """TP1 starts fastest, so that it is the other end of each pair of a push."""
    return (Life("tp1"), Life(name, ["tp1"]), Life("tp1", [name], writes=False))


CHAINS = {
    "file, tp2": there_and_back("tp2"),
    "redis, pp2": there_and_back("pp2"),
    "s3, tp1": (Life("tp1"), Life("tp1", ["tp1"], writes=False)),
    "s3, tp2-pp2": there_and_back("tp2-pp2"),
    "file, all": WHOLE,
    "redis, all": WHOLE,
    "s3, all": WHOLE,
}
IN_FULL = ("file, tp2", "s3, tp2-pp2", "file, all", "redis, all", "s3, all")
"""What a push has no time for."""
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.full] if name in IN_FULL else []) for name in CHAINS
]


@dataclass(frozen=True, slots=True)
class Cell:
    """One reader's answers to one writer's prompts."""

    writer: str
    reader: str
    cold: list[Answer]
    restored: list[Answer]
    device: list[Answer]
    counters: Mapping[str, float]
    published: Mapping[str, float]

    def __str__(self) -> str:
        moved = {key: value for key, value in self.counters.items() if value}
        return f"{self.writer} -> {self.reader}: {moved}"


@dataclass(frozen=True, slots=True)
class Run:
    chain: str
    cells: list[Cell]
    problems: list[str]
    page_bytes: set[int]


@contextmanager
def storage_service(kind: str, folder: Path) -> Iterator[dict[str, object]]:
    """The table ``storage`` of engines that share a real server, or a folder."""
    patience = {"exists_timeout_s": 30}
    if kind == "file":
        yield {"url": f"file://{folder}/store", **patience}
    elif kind == "redis":
        with redis_under_test.running(folder / "valkey") as server:
            yield {"url": server.url, **patience}
    else:
        (folder / "weed").mkdir()
        with s3_servers.seaweedfs(folder / "weed") as server:
            yield {"url": server.url("topologies"), **patience}


def run_life(life: Life, specification: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """TP1 in this process, where nothing has to be imported again, all others in a child."""
    specification = {
        **specification,
        "name": life.name,
        "writes": life.writes,
        "reads": life.reads,
    }
    if life.name == "tp1":
        return topology_steps.answer(specification | {"options": {}})
    options, env = workers(*SIZES[life.name])
    return run_child("topology_steps", specification | {"options": options}, folder, env)


def answers(record: Sequence[Any]) -> list[Answer]:
    return [Answer(tuple(tokens), tuple(logprobs), cached) for tokens, logprobs, cached in record]


@pytest.fixture(scope="module", params=PARAMETERS)
def run(
    request: pytest.FixtureRequest,
    tiny_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder = tmp_path_factory.mktemp("topologies")
    specification = {"model": str(tiny_llama()), "extra": EXTRA, "lengths": LENGTHS}
    cold: dict[str, list[Answer]] = {}
    cells, problems, page_bytes = [], [], set()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_servers.ENVIRONMENT.items():
            patch.setitem(os.environ, name, value)
        with storage_service(request.param.partition(",")[0], folder) as storage:
            for life in CHAINS[request.param]:
                record = run_life(life, {**specification, "storage": storage}, folder)
                if life.writes:
                    cold[life.name] = answers(record["cold"])
                for writer in life.reads:
                    found = record[writer]
                    asked = [answers(found[key]) for key in ("restored", "device")]
                    numbers = found["counters"], found["published"]
                    cells.append(Cell(writer, life.name, cold[writer], *asked, *numbers))
                problems += record["problems"]
                page_bytes.add(record["page_bytes"])
    return Run(request.param, cells, problems, page_bytes)


def test_the_cells_are_those_that_were_meant(run: Run) -> None:
    pairs = [(cell.writer, cell.reader) for cell in run.cells]
    if run.chain.endswith("all"):
        assert sorted(pairs) == sorted(product(SIZES, SIZES))
    else:
        other = run.chain.partition(", ")[2]
        there_and_back_again = [("tp1", other), (other, "tp1")]
        assert pairs == ([("tp1", "tp1")] if other == "tp1" else there_and_back_again)


def test_every_reader_restores_what_every_writer_stored(run: Run) -> None:
    for cell in run.cells:
        assert [a.cached for a in cell.cold] == [0] * len(LENGTHS), cell
        assert [a.cached for a in cell.restored] == [restored_hit(n) for n in LENGTHS], cell
        assert [a.cached for a in cell.device] == [device_hit(n) for n in LENGTHS], cell
        assert_same(cell.restored, cell.device)
        assert_same(cell.restored, cell.cold, COLD_TOLERANCE)


def test_our_counters_vllms_and_prometheus_agree_on_the_tokens_of_storage(run: Run) -> None:
    total = sum(restored_hit(n) for n in LENGTHS)
    for cell in run.cells:
        assert cell.counters["served_tokens/storage"] == total, cell
        assert cell.counters["served_tokens/host"] == 0, cell
        shown = cell.published
        assert shown["vllm:hicache_served_tokens{tier=storage}"] == total, cell
        assert shown["vllm:prompt_tokens_cached_by_source{source=disk}"] == total, cell
        assert shown["vllm:external_prefix_cache_hits"] == total, cell
        assert shown["vllm:prompt_tokens_by_source{source=external_kv_transfer}"] == total, cell


def test_the_bytes_that_storage_served_are_those_of_the_pages(run: Run) -> None:
    (page_bytes,) = run.page_bytes
    pages = sum(n // PAGE for n in LENGTHS)
    for cell in run.cells:
        counters = cell.counters
        assert counters["fetched_bytes"] == pages * page_bytes, cell
        assert counters["objects_read"] == pages * SHARDS_PER_PAGE, cell
        per_page = page_bytes + SHARDS_PER_PAGE * HEADER_BYTES
        assert counters["bytes_read"] == pages * per_page, cell


def test_nothing_is_left_of_any_request(run: Run) -> None:
    assert run.problems == []


@pytest.mark.full
def test_an_engine_whose_workers_hold_half_an_object_does_not_start(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Both workers compute the refusal; the engine ends instead of waiting for either."""
    options, env = workers(2, 1)
    specification = {
        "model": str(tiny_llama()),
        "storage": {"url": f"file://{tmp_path}/store"},
        "extra": {"storage_head_partition": 2},
        "options": options,
        "name": "tp2",
        "reads": [],
        "writes": True,
        "lengths": LENGTHS,
    }
    says = "heads per group must divide the model's 2 KV heads and this worker's 1, got 2"
    with pytest.raises(AssertionError, match=says):
        run_child("topology_steps", specification, tmp_path, env)
    assert not (tmp_path / "store").exists()

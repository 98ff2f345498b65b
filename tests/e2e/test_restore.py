"""Cold, device, host and file answers are the same, on every topology, and counted the same.

Each topology is one child process with two engines, one after the other, on one folder. The
first loads synchronously where it can, the second asynchronously only. The smallest run of TP2xPP2
has one engine and drops its host pages instead: eight starts of workers take too long for a push.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from child_process import run_child, workers
from engine_in_process import (
    HEADER_BYTES,
    PAGE,
    Answer,
    assert_same,
    device_hit,
    largest_difference,
    restored_hit,
)
from model_results import note_restored
from tiny_experts import write_experts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

COLD_TOLERANCE = 1e-4
"""Cold answers are computed in other chunks: the largest difference seen is 1e-5."""
BUDGET = 256
LENGTHS = (PAGE - 1, PAGE, PAGE + 1, 600, 2049)
PAIR = (700, 900)
SYNC, ASYNC = {"sync_load_max_ms": 10_000}, {"sync_load_max_ms": 0}
LIVES = (
    {"extra": SYNC, "phases": ["cold", "device", "reset:host"]},
    {"extra": ASYNC, "phases": ["file", "reset:host again"]},
)


ONE_LIFE = (
    {
        "extra": {**SYNC, "fixed_weights": True},
        "phases": ["cold", "device", "reset:host", "drop:file"],
    },
)


@dataclass(frozen=True, slots=True)
class Topology:
    """How many workers, what they are asked, and how many objects make one page."""

    tp: int
    pp: int
    shards_per_page: int
    partition: str = ""
    lengths: Sequence[int] = LENGTHS
    pair: Sequence[int] = PAIR
    lives: Sequence[Mapping[str, object]] = LIVES
    has_experts: bool = False
    """A mixture of experts instead of the dense model."""

    @property
    def options(self) -> dict[str, object]:
        return {**workers(self.tp, self.pp)[0], "max_num_batched_tokens": BUDGET}


TOPOLOGIES = {
    "tp1": Topology(1, 1, 2),
    "tp2": Topology(2, 1, 2, lengths=(PAGE - 1, PAGE + 1, 600)),
    "pp2-uneven": Topology(1, 2, 4, "3,1", lengths=(PAGE, 600)),
    "tp2-pp2-small": Topology(2, 2, 4, lengths=(PAGE + 1, 300), pair=(), lives=ONE_LIFE),
    "tp2-all": Topology(2, 1, 2),
    "pp2-all": Topology(1, 2, 4),
    "pp2-uneven-all": Topology(1, 2, 4, "3,1"),
    "tp2-pp2-all": Topology(2, 2, 4),
    "tp2-experts-all": Topology(2, 1, 2, has_experts=True),
}
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.full] if name.endswith("-all") else [])
    for name in TOPOLOGIES
]


@dataclass(frozen=True, slots=True)
class Phase:
    """What was asked once, and what it cost."""

    answers: list[Answer]
    pair: list[Answer]
    counters: Mapping[str, float]
    published: Mapping[str, float]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Phase":
        answers, pair = (
            [Answer(tuple(tokens), tuple(logprobs), cached) for tokens, logprobs, cached in each]
            for each in (record["answers"], record["pair"])
        )
        return cls(answers, pair, record["counters"], record["published"])

    @property
    def all_answers(self) -> list[Answer]:
        return self.answers + self.pair

    @property
    def cached(self) -> list[int]:
        return [answer.cached for answer in self.all_answers]


@dataclass(frozen=True, slots=True)
class Run:
    topology: Topology
    phases: Mapping[str, Phase]
    problems: list[str]
    page_bytes: list[int]

    def explain(self) -> str:
        """Every counter that moved, by phase; a lost page has left its reason in one of them."""
        moved = {
            name: {key: value for key, value in phase.counters.items() if value}
            for name, phase in self.phases.items()
        }
        return "\n".join(f"{name}: {counters}" for name, counters in moved.items())

    @property
    def prompt_lengths(self) -> list[int]:
        return [*self.topology.lengths, *self.topology.pair]

    @property
    def restored_phases(self) -> list[str]:
        return [name for name in self.phases if name not in ("cold", "device")]

    @property
    def restored(self) -> list[int]:
        return [restored_hit(length) for length in self.prompt_lengths]


def restored_on(
    model: Path, topology: Topology, folder: Path, env: Mapping[str, str] | None = None
) -> Run:
    specification = {
        "model": str(model),
        "storage": str(folder / "store"),
        "options": topology.options,
        "lengths": topology.lengths,
        "pair": topology.pair,
        "lives": topology.lives,
    }
    _, needed = workers(topology.tp, topology.pp, topology.partition)
    lives = run_child("restore_child", specification, folder, {**needed, **(env or {})})
    return Run(
        topology,
        {phase["name"]: Phase.of(phase) for life in lives for phase in life["phases"]},
        [problem for life in lives for problem in life["problems"]],
        lives[0]["page_bytes"],
    )


@pytest.fixture(scope="module", params=PARAMETERS)
def run(
    request: pytest.FixtureRequest,
    tiny_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder, topology = tmp_path_factory.mktemp(request.param), TOPOLOGIES[request.param]
    model = tiny_llama()
    if topology.has_experts:
        model = write_experts(folder / "experts", model)
    return restored_on(model, topology, folder)


def test_restored_answers_equal_those_of_a_device_hit_bit_for_bit(run: Run) -> None:
    for name in run.restored_phases:
        # A prompt below one page has nothing in host: all of it is computed, as when cold.
        expected = [
            run.phases["device" if length >= PAGE else "cold"].answers[i]
            for i, length in enumerate(run.topology.lengths)
        ]
        assert_same(run.phases[name].answers, expected)


def test_restored_answers_equal_cold_ones(run: Run) -> None:
    cold = run.phases["cold"]
    for name in ("device", *run.restored_phases):
        assert_same(run.phases[name].all_answers, cold.all_answers, COLD_TOLERANCE)
    for name in run.restored_phases:
        assert run.phases[name].cached == run.restored, run.explain()
    if not run.topology.has_experts:
        note_restored("Llama (GQA)", tp=run.topology.tp, pp=run.topology.pp)


def test_vllm_says_of_each_prompt_how_much_was_cached(run: Run) -> None:
    assert run.phases["cold"].cached == [0] * len(run.prompt_lengths)
    assert run.phases["device"].cached == [device_hit(length) for length in run.prompt_lengths]
    for name in run.restored_phases:
        assert run.phases[name].cached == run.restored, run.explain()


def test_the_expected_tokens_came_from_each_tier(run: Run) -> None:
    total, ours = sum(run.restored), ("served_tokens/host", "served_tokens/storage")
    served = {
        name: tuple(phase.counters[key] for key in ours) for name, phase in run.phases.items()
    }
    expected = {
        "cold": (0, 0),
        "device": (0, 0),
        "host": (total, 0),
        "file": (0, total),
        "host again": (total, 0),
    }
    assert served == {name: expected[name] for name in run.phases}, run.explain()
    assert {"host", "file"} <= served.keys()


def test_vllm_and_prometheus_count_the_same_tokens_by_tier(run: Run) -> None:
    source = "vllm:prompt_tokens_cached_by_source{{source={}}}".format
    for name, phase in run.phases.items():
        host, storage = (
            phase.counters["served_tokens/host"],
            phase.counters["served_tokens/storage"],
        )
        published = phase.published
        assert published["vllm:hicache_served_tokens{tier=host}"] == host, name
        assert published["vllm:hicache_served_tokens{tier=storage}"] == storage, name
        assert published[source("host")] == host, name
        assert published[source("disk")] == storage, name
        assert published["vllm:external_prefix_cache_hits"] == host + storage, name
        external = "vllm:prompt_tokens_by_source{source=external_kv_transfer}"
        assert published[external] == host + storage, name
        device = phase.counters["local_tokens"]
        assert published["vllm:prefix_cache_hits"] == published[source("device")] == device, name


def test_the_bytes_read_from_storage_are_those_of_the_pages(run: Run) -> None:
    page_bytes, shards = sum(run.page_bytes), run.topology.shards_per_page
    pages = sum(length // PAGE for length in run.prompt_lengths)
    for name, phase in run.phases.items():
        fetched = pages if name == "file" else 0
        counters = phase.counters
        assert counters["fetched_bytes"] == fetched * page_bytes, name
        assert counters["objects_read"] == fetched * shards, name
        assert counters["bytes_read"] == fetched * (page_bytes + shards * HEADER_BYTES), name


def test_loads_are_synchronous_and_asynchronous_as_told_and_all_are_counted(run: Run) -> None:
    page_bytes = sum(run.page_bytes)
    alone = sum(restored_hit(length) for length in run.topology.lengths)
    sync_phases = ("host", "file") if run.topology.lives is ONE_LIFE else ("host",)
    if run.topology.pp > 1:  # with several batches in flight no step waits
        sync_phases = ()
    for name, phase in run.phases.items():
        sync, later = (phase.counters[f"loaded_bytes/{mode}"] for mode in ("sync", "async"))
        served = sum(phase.counters[f"served_tokens/{tier}"] for tier in ("host", "storage"))
        assert sync + later == served * page_bytes // PAGE, name
        if name in sync_phases:
            # The second of a pair is not waited for: it would stand in line.
            first = restored_hit(run.topology.pair[0]) if run.topology.pair else 0
            assert sync == (alone + first) * page_bytes // PAGE
        else:
            assert sync == 0, name


def test_nothing_is_left_of_any_request(run: Run) -> None:
    assert run.problems == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp1", "tp2"])
def test_the_comparison_fails_when_loads_are_corrupted(
    name: str, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    topology = Topology(
        TOPOLOGIES[name].tp, 1, TOPOLOGIES[name].shards_per_page, lengths=(600,), pair=()
    )
    run = restored_on(tiny_llama(), topology, tmp_path, {"UNDER_TEST_FLIP_LOADS": "1"})
    cold = run.phases["cold"].answers
    assert_same(run.phases["device"].answers, cold, COLD_TOLERANCE)
    for restored in ("host", "file"):
        answers = run.phases[restored].answers
        assert [answer.cached for answer in answers] == [576]
        assert largest_difference(answers, cold) > 1000 * COLD_TOLERANCE
        with pytest.raises(AssertionError):
            assert_same(answers, cold, COLD_TOLERANCE)
        with pytest.raises(AssertionError):
            test_restored_answers_equal_cold_ones(run)

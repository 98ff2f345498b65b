"""Two data-parallel replicas behind one server share through storage and nothing else."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import PAGE, Answer, LiveServer, prompt_of, serving, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(1200)]

COLD_TOLERANCE = 1e-4
PAGES = 5
HIT = PAGES * PAGE
SHARDS_PER_PAGE = 2
REPLICAS = (0, 1)
STORED = "vllm:hicache_objects_written_total"
SERVED = "vllm:hicache_served_tokens_total{{tier={}}}".format


@pytest.fixture(scope="module")
def server(
    tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("replicas")
    options = ("--data-parallel-size", "2")
    storage = {"url": f"file://{folder}/store", "exists_timeout_s": 10, "operation_timeout_s": 60}
    extra = {"storage": storage}
    with serving(tiny_llama(), folder, extra, options=options, start_timeout_s=600) as server:
        yield server


def _wait_until_stored(server: LiveServer, replica: int, num_objects: float) -> None:
    def is_stored() -> bool:
        server.complete([1, 2, 3], max_tokens=1, replica=replica)  # vLLM publishes with its steps
        return server.metrics(replica)[STORED] >= num_objects

    wait_until(is_stored, timeout_s=60)


def _assert_close(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    assert all(math.isclose(a, b, abs_tol=COLD_TOLERANCE) for a, b in pairs)


@pytest.mark.parametrize(("writer", "reader"), [(0, 1), (1, 0)])
def test_what_one_replica_stored_the_other_restores(
    server: LiveServer, writer: int, reader: int
) -> None:
    prompt = prompt_of(40 + writer, HIT + 9)
    before = [server.metrics(replica) for replica in REPLICAS]
    cold = server.complete(prompt, replica=writer)
    stored = before[writer][STORED] + PAGES * SHARDS_PER_PAGE
    _wait_until_stored(server, writer, stored)
    restored = server.complete(prompt, replica=reader)
    again = server.complete(prompt, replica=reader)
    assert [a.cached_tokens for a in (cold, restored, again)] == [0, HIT, HIT]
    assert again.said == restored.said
    _assert_close(restored, cold)
    grown = _growth(server, before)
    assert [grown[reader][SERVED(tier)] for tier in ("host", "storage")] == [0, HIT]
    assert [grown[writer][SERVED(tier)] for tier in ("host", "storage")] == [0, 0]
    assert grown[reader]["vllm:external_prefix_cache_hits_total"] == HIT
    assert grown[writer]["vllm:external_prefix_cache_hits_total"] == 0


def _growth(server: LiveServer, before: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    wait_until(
        lambda: any(
            server.metrics(r)[SERVED("storage")] > before[r][SERVED("storage")] for r in REPLICAS
        )
    )
    after = [server.metrics(replica) for replica in REPLICAS]
    return [
        {name: value - old.get(name, 0.0) for name, value in new.items()}
        for new, old in zip(after, before, strict=True)
    ]


def test_each_replica_has_a_host_pool_and_a_storage_process_of_its_own(
    server: LiveServer,
) -> None:
    storage = server.storage_pids()
    assert len(storage) == len(REPLICAS)
    pools = [_mapped_pools(pid) for pid in storage]
    assert all(len(pool) == 1 for pool in pools)
    assert pools[0].isdisjoint(pools[1])
    names = set(re.findall(r"@hicache-[0-9a-f]{16}", Path("/proc/net/unix").read_text()))
    assert len(names) >= len(REPLICAS)


def _mapped_pools(pid: int) -> set[int]:
    """Inodes of the host pools that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/memfd:hicache" in line}


def test_both_replicas_serve_when_vllm_chooses(server: LiveServer) -> None:
    name = "vllm:request_success_total{finished_reason=length}"
    before = [server.metrics(replica)[name] for replica in REPLICAS]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(server.complete, [prompt_of(seed, PAGE + 9) for seed in range(60, 68)]))
    wait_until(
        lambda: sum(server.metrics(replica)[name] for replica in REPLICAS) >= sum(before) + 8
    )
    after = [server.metrics(replica)[name] for replica in REPLICAS]
    assert all(new > old for new, old in zip(after, before, strict=True)), (before, after)

"""How many workers share a host, from vLLM's own configuration of data-parallel replicas."""

import pytest
from vllm.config import ParallelConfig

from vllm_hicache.connectors.vllm_view import workers_on_host
from vllm_hicache.errors import ConfigError
from vllm_hicache.host_memory import parse_host_memory

pytestmark = pytest.mark.vllm


def _replica(rank: int, *, is_dense: bool) -> ParallelConfig:
    """The configuration of a replica in its engine's process, made as vLLM makes it there."""
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_size_local=2)
    parallel.data_parallel_rank_local = rank
    parallel.data_parallel_index = rank
    if is_dense:
        parallel.reconfigure_for_independent_dp_rank()
    else:
        parallel.data_parallel_rank = rank
    return parallel


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_of_a_mixture_of_experts_share_the_host(rank: int) -> None:
    for value in ("auto", "50%", "8GiB"):
        parallel = _replica(rank, is_dense=False)
        assert workers_on_host(parallel, parse_host_memory(value)) == 2


def test_replicas_of_a_dense_model_must_be_given_a_size() -> None:
    """vLLM makes such a replica an engine of its own: each would take what all may take."""
    parallel = _replica(1, is_dense=True)
    assert workers_on_host(parallel, parse_host_memory("8GiB")) == 1
    assert workers_on_host(parallel, parse_host_memory("2x")) == 1
    for value in ("auto", "50%"):
        with pytest.raises(ConfigError, match=r"host_memory must be a size .* data parallelism"):
            workers_on_host(parallel, parse_host_memory(value))


def test_the_first_replica_of_a_dense_model_cannot_be_told_from_a_lone_engine() -> None:
    """Why the first one does not refuse; the second does, and vLLM then starts none."""
    first, lone = _replica(0, is_dense=True), ParallelConfig()
    told = ("data_parallel_size", "data_parallel_size_local", "data_parallel_index")
    assert [getattr(first, name) for name in told] == [getattr(lone, name) for name in told]
    assert first.data_parallel_rank_local == lone.data_parallel_rank_local == 0


def test_an_engine_without_replicas_may_take_a_share() -> None:
    assert workers_on_host(ParallelConfig(), parse_host_memory("auto")) == 1

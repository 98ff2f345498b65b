"""Where a step may wait for a load before its forward."""

from types import SimpleNamespace

import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.vllm_view import sync_load_max_s

pytestmark = pytest.mark.vllm


def limit_s(num_stages: int, *, is_async: bool, is_v2: bool = False) -> float:
    """By vLLM's own count of the batches that such an engine has in flight."""
    from vllm.config import VllmConfig

    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        use_v2_model_runner=is_v2,
    )
    batches = VllmConfig.max_concurrent_batches.fget(engine)
    config = HiCacheConfig.parse({"sync_load_max_ms": 5})
    return sync_load_max_s(SimpleNamespace(max_concurrent_batches=batches), config)


def test_a_step_waits_for_short_loads_where_one_batch_is_in_flight() -> None:
    assert limit_s(1, is_async=False) == 0.005


@pytest.mark.parametrize(
    ("num_stages", "is_async", "is_v2"), [(2, False, False), (1, True, False), (2, True, True)]
)
def test_no_step_waits_for_a_load_where_the_next_batch_is_scheduled_before_it_fails(
    num_stages: int, is_async: bool, is_v2: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert limit_s(num_stages, is_async=is_async, is_v2=is_v2) == 0.0
    assert "loads run beside the steps, vLLM has" in caplog.text

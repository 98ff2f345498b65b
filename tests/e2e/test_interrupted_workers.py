"""Aborts and preemption where one of several workers is much slower than the others."""

from collections.abc import Callable
from pathlib import Path

import pytest
from child_process import run_child, workers

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]
COLD_TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("tp", "pp", "partition", "sync_ms"),
    [(2, 1, "", 0), (2, 1, "", 10_000), (1, 2, "3,1", 0), (2, 2, "", 0)],
    ids=["tp2-asynchronous", "tp2-synchronous", "pp2-uneven", "tp2-pp2"],
)
def test_one_slow_worker_leaks_nothing_and_lies_about_nothing(
    tiny_llama: Callable[..., Path], tmp_path: Path, tp: int, pp: int, partition: str, sync_ms: int
) -> None:
    options, env = workers(tp, pp, partition)
    specification = {
        "model": str(tiny_llama()),
        "extra": {"sync_load_max_ms": sync_ms},
        "options": {
            **options,
            "max_model_len": 320,
            "num_gpu_blocks_override": 17,
            "max_num_batched_tokens": 256,
        },
    }
    slow = {"UNDER_TEST_SLOW_COPIES": f"{tp * pp - 1}:0.1"}
    result = run_child("interrupt_child", specification, tmp_path, {**env, **slow})
    assert result["problems"] == []
    assert result["found"]["loads"] >= 2
    assert result["found"]["saves"] >= 1
    assert result["preemptions"] > 0
    assert result["served"] > 0
    assert max(result["differences"].values()) <= 10 * COLD_TOLERANCE

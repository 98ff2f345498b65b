"""Benchmarks run in the process of the tests leave no loggers of the connector behind."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_loggers_left() -> Iterator[None]:
    yield
    stats = sys.modules.get("vllm_hicache.connectors.stats")
    if stats is not None:
        stats.detach_loggers()

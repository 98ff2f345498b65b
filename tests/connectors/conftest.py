"""What a connector changes in its process is undone after each test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _detached_loggers() -> Iterator[None]:
    """Connectors log on vLLM's handlers; later tests read our log lines from the root logger."""
    yield
    stats = sys.modules.get("vllm_hicache.connectors.stats")
    if stats is not None:
        stats.detach_loggers()

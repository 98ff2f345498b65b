"""Scripts of benchmarks/ import one another by their bare names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _bare_names(monkeypatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    stats = sys.modules.get("vllm_hicache.connectors.stats")
    if stats is not None:
        stats.detach_loggers()

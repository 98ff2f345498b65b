"""What a connector changes in its process is undone after each test.

Support modules of these tests are imported by their bare names.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SUPPORT = str(Path(__file__).resolve().parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)


@pytest.fixture(autouse=True)
def _detached_loggers() -> Iterator[None]:
    """Connectors log on vLLM's handlers; later tests read our log lines from the root logger."""
    yield
    stats = sys.modules.get("vllm_hicache.connectors.stats")
    if stats is not None:
        stats.detach_loggers()

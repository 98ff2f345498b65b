"""Support modules are imported by their bare names, here and in child processes."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SUPPORT = (
    HERE / "support",
    HERE.parent / "e2e" / "support",
    HERE.parent / "storage_backends" / "support",
)
for folder in SUPPORT:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def control(tiny_llama, tmp_path_factory):
    """A server without storage that the others are compared with; it knows the right answers."""
    from storage_episode import Control, engine

    with engine(tiny_llama(), tmp_path_factory.mktemp("control"), None) as server:
        yield Control(server)

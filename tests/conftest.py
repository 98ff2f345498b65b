"""What every run shares: environment, installed package, result log, one engine run at a time."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
    "PYTHONSAFEPATH": "1",
}

# Tests see the installed package, and never kernels/ by its bare name (another distribution's).
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path.append(str(ROOT / "examples"))  # what engines need on a CPU lies there, for users, too
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

hypothesis.settings.register_profile("push", deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("push")


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Path]:
    """Write a tiny random-weight Llama once per set of options and return its folder.

    Options are those of ``examples/tiny_model.py``, such as ``num_layers=5``.
    """

    script = ROOT / "examples" / "tiny_model.py"
    edition = hashlib.sha256(script.read_bytes()).hexdigest()[:8]

    def write(**options: int) -> Path:
        label = "-".join(f"{key}{value}" for key, value in sorted(options.items())) or "default"
        folder = CACHE / "models" / edition / f"llama-{label}"
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        if not folder.exists():  # it appears whole
            subprocess.run([sys.executable, script, folder, *arguments], check=True)
        return folder

    return write


class ResultLog:
    """Appends one JSON line per finished test, so that a crash keeps what ran before it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._write(commit=_commit())
        self._started = time.monotonic()
        self._file_seconds: Counter[str] = Counter()

    def _write(self, **line: object) -> None:
        self._file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._record(report.nodeid, report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._file_seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "call" or not report.passed:
            self._record(report.nodeid, report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        seconds = time.monotonic() - self._started
        self._write(exit_status=int(exitstatus), seconds=seconds, files=self._file_seconds)

    def _record(self, nodeid: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        reason = ""
        if report.skipped:
            reason = getattr(report, "wasxfail", None) or str(report.longrepr[2])
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        self._write(test=nodeid, outcome=outcome, reason=reason.removeprefix("Skipped: "))


def _commit() -> str:
    """Of the checkout; changed tracked files are told."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "unknown") + (" with local changes" if changed else "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result-log", type=Path, help="write one JSON line per test to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--result-log")
    # Of several processes (-n), the one that hears of all results writes them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultLog(path), "result-log")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device; every other absence is a failure."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait until no other run in this checkout holds an engine; two would starve each other."""
    # With -n, the processes that run the tests belong to one run: tests/run.sh.
    is_part = hasattr(session.config, "workerinput")
    has_engines = any(item.get_closest_marker("e2e") for item in session.items)
    if has_engines and not is_part and not session.config.option.collectonly:
        CACHE.mkdir(exist_ok=True)
        lock = (CACHE / "engines.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.__stderr__.write("waiting for another engine run in this checkout\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        session.config.add_cleanup(lock.close)

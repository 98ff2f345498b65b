"""The suite from the command line: `examples/custom_backend.py` passes, a bad backend does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache.storage_backends.conformance import StorageBackendTests

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKS = {
    name.removeprefix("test_").replace("_", " ")
    for name in dir(StorageBackendTests)
    if name.startswith("test_")
}


def _run(*command):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def _verdicts(run):
    lines = [line.split(maxsplit=3) for line in run.stdout.splitlines() if " s  " in line]
    return {words[3]: words[0] for words in lines if words[0] in ("ok", "FAILED")}


def _suite(url):
    return _run("-P", "-m", "vllm_hicache.storage_backends.conformance_run", url)


def test_the_example_of_a_backend_of_ones_own_passes_every_check():
    program = ROOT / "examples" / "custom_backend.py"
    assert len(program.read_text().splitlines()) < 40
    run = _run(program)
    assert run.returncode == 0, run.stdout + run.stderr
    assert _verdicts(run) == dict.fromkeys(CHECKS, "ok")


def test_a_backend_that_forgets_fails_the_checks_that_ask_for_memory():
    run = _suite("vllm_hicache.testing:MemoryBackend?{place}")
    assert run.returncode == 1, run.stdout + run.stderr
    verdicts = _verdicts(run)
    assert verdicts.keys() == CHECKS
    assert verdicts["reopened store still has the object"] == "FAILED"
    assert verdicts["written object reads back"] == "ok"
    assert "AssertionError" in run.stdout


@pytest.mark.parametrize("url", ["file:///tmp", "my_module"])
def test_a_url_without_a_place_of_its_own_is_refused(url):
    run = _suite(url)
    assert run.returncode == 2
    assert "must have {place}" in run.stderr

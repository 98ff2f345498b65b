"""Two engines that differ in one option share nothing: the second is told why, once, and
``hicache doctor`` tells the same without starting an engine.
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_in_process import OPTIONS, PAGE, PATIENCE, STORAGE_OPTIONS, Engine, prompt_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.full]

OTHER_PAGE = 128
PROMPT_TOKENS = 2049
PATIENCE_S = 60.0
NOTICE = "vllm_hicache.near_miss_notice"


@dataclass(frozen=True, slots=True)
class Record:
    """What two engines on one folder said of their namespaces, and what doctor said of the first
    one's afterwards."""

    first: str
    second: str
    fields: dict[str, object]
    lines: list[str]
    first_lines: list[str]
    counters: dict[str, float]
    doctor: dict[str, Any]
    doctor_status: int


class Notices(logging.Handler):
    """Keeps what is said about near misses."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def ask_and_wait(engine: Engine, notices: Notices, prompt: list[int], *, lines: int) -> None:
    """Ask one prompt; then wait for so many lines."""
    engine.ask([prompt])
    engine.settle()
    deadline = time.monotonic() + PATIENCE_S
    while len(notices.lines) < lines and time.monotonic() < deadline:
        engine.poll_storage()
        time.sleep(0.01)


def wait_for_record(store: Path) -> dict[str, object]:
    """The first engine's record, once its storage process has written it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := list(store.glob("namespaces/*.json"))):
        assert time.monotonic() < deadline, "no record of the namespace was written"
        time.sleep(0.01)
    assert len(found) == 1
    return {"name": found[0].stem, **json.loads(found[0].read_bytes())}


def run_doctor(model: Path, extra: Mapping[str, object]) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the installed command's module, for the first engine's options."""
    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    program = "import sys; from vllm_hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", program, "doctor", "--json", "--model", str(model)]
    command += ["--kv-transfer-config", json.dumps(transfer), "--dtype", "float32"]
    command += ["--block-size", "32", "--max-model-len", "4096", "--skip-tokenizer-init"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert run.stdout.startswith("{"), run.stderr[-4000:]
    return run.returncode, json.loads(run.stdout)


@pytest.fixture(scope="module")
def record(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Record:
    store = tmp_path_factory.mktemp("near") / "store"
    notices = Notices()
    logging.getLogger(NOTICE).addHandler(notices)
    try:
        with running(tiny_llama(), store) as engine:
            for number in range(2):
                ask_and_wait(engine, notices, prompt_of(number, PROMPT_TOKENS), lines=0)
            first, fields = engine.planner.namespace, wait_for_record(store)
            first_lines, notices.lines = notices.lines, []
        with running(tiny_llama(), store, extra={"page_size": OTHER_PAGE}) as engine:
            for number in range(4):
                ask_and_wait(engine, notices, prompt_of(number, PROMPT_TOKENS), lines=1)
            second, counters = engine.planner.namespace, engine.counters()
    finally:
        logging.getLogger(NOTICE).removeHandler(notices)
    storage = {"url": f"file://{store}", **PATIENCE}
    status, doctor = run_doctor(tiny_llama(), {**OPTIONS, **STORAGE_OPTIONS, "storage": storage})
    return Record(first, second, fields, notices.lines, first_lines, counters, doctor, status)


def test_an_engine_of_another_page_size_is_told_once_what_differs(record: Record) -> None:
    assert record.lines == [
        f"HiCache storage: 0 hits so far; this engine uses page_size={OTHER_PAGE}, the store holds "
        f"objects of the same model with page_size={PAGE} (namespace {record.first})"
    ]
    assert record.counters["near_misses"] == 1


def test_the_other_page_size_was_a_miss(record: Record) -> None:
    assert record.second != record.first
    assert record.counters["served_tokens/storage"] == 0
    assert record.counters["fetched_bytes"] == 0
    assert record.counters["bytes_read"] == 0


def test_an_engine_alone_is_told_nothing(record: Record) -> None:
    assert record.first_lines == []


def test_the_record_in_the_store_is_the_engine_s_namespace(record: Record) -> None:
    assert record.fields["name"] == record.first
    assert record.fields["page_size"] == PAGE
    assert record.fields["epoch"] == ""


def test_doctor_prints_the_namespace_that_the_engine_used(record: Record) -> None:
    assert record.doctor_status == 0, record.doctor["checks"]
    assert record.doctor["namespace"]["digest"] == record.first
    found = {k: v for k, v in record.doctor["namespace"].items() if k != "digest"}
    assert found == {k: v for k, v in record.fields.items() if k != "name"}


def test_doctor_lists_the_other_namespace_with_what_differs(record: Record) -> None:
    assert record.doctor["stored_namespaces"] == [
        {
            "namespace": record.second,
            "differs": {"page_size": {"here": PAGE, "there": OTHER_PAGE}},
        }
    ]

"""Engines with workers of their own run in a child: each topology needs another environment."""

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import few_cores
from engine_in_process import ENVIRONMENT

SUPPORT = Path(__file__).resolve().parent
EXAMPLES = SUPPORT.parents[2] / "examples"  # has the worker that starts pipeline stages on a CPU
TIMEOUT_S = 800


def run_child(
    module: str,
    specification: Mapping[str, object],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> Any:
    """What ``module.answer(specification)`` returns in a child; fails with the log's end."""
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(SUPPORT), str(EXAMPLES), given]))
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    few_cores.start_server(environment)
    result, log = folder / "result.json", folder / "child.log"
    result.unlink(missing_ok=True)
    child = few_cores.Process(
        target=_write_answer,
        args=(module, dict(specification), result, log),
        environment={**os.environ, **environment, **(env or {})},
    )
    child.start()
    child.join(TIMEOUT_S)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0, log.read_text(errors="replace")[-8000:]
    return json.loads(result.read_text())


def _write_answer(module: str, specification: dict[str, Any], result: Path, log: Path) -> None:
    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    result.write_text(json.dumps(importlib.import_module(module).answer(specification)))


def workers(tp: int, pp: int, partition: str = "") -> tuple[dict[str, object], dict[str, str]]:
    """vLLM's options and the environment of an engine with these workers."""
    options = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "worker_cls": "worker_under_test.WorkerUnderTest",
    }
    return options, {"VLLM_PP_LAYER_PARTITION": partition} if partition else {}

"""Engines with workers of their own run in a child: each topology needs another environment."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_in_process import ENVIRONMENT

SUPPORT = Path(__file__).resolve().parent
EXAMPLES = SUPPORT.parents[2] / "examples"  # has the worker that starts pipeline stages on a CPU
TIMEOUT_S = 800


def run_script(
    script: str,
    specification: Mapping[str, object],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> Any:
    """What the script wrote as JSON into its result file; fails with the log's end."""
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(SUPPORT), str(EXAMPLES), given]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(env or {})}
    result, log = folder / "result.json", folder / "child.log"
    with log.open("wb") as output:
        child = subprocess.run(
            [sys.executable, "-P", SUPPORT / script, json.dumps(specification), result],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert child.returncode == 0, log.read_text(errors="replace")[-8000:]
    return json.loads(result.read_text())


def workers(tp: int, pp: int, partition: str = "") -> tuple[dict[str, object], dict[str, str]]:
    """vLLM's options and the environment of an engine with these workers."""
    options = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "worker_cls": "worker_under_test.WorkerUnderTest",
    }
    return options, {"VLLM_PP_LAYER_PARTITION": partition} if partition else {}

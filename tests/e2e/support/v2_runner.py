"""Engines with vLLM's V2 model runner on a CPU, each in a fresh interpreter.

That runner needs Triton, and vLLM takes a Triton on a CPU only if it has a CPU backend. The folder
``interpreted_triton`` is one: on the path of these processes alone, with TRITON_INTERPRET.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from child_process import EXAMPLES, SUPPORT, TIMEOUT_S
from engine_in_process import ENVIRONMENT

TRITON = SUPPORT / "interpreted_triton"
RUNNER = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
"""The V2 runner; that of V1 is vllm.v1.worker.cpu_model_runner.CPUModelRunner."""


def environment() -> dict[str, str]:
    """What turns the processes of an engine on a CPU to the V2 runner."""
    folders = (TRITON, SUPPORT, EXAMPLES, os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    # Without this vLLM would fall back to the V1 runner where it does not know better.
    asked = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return {**ENVIRONMENT, **asked, "PYTHONPATH": path}


def run_v2_child(specification: Mapping[str, object], folder: Path) -> Any:
    """What ``v2_child.answer(specification)`` returns; fails with the log's end."""
    result, log = folder / "v2.json", folder / "v2.log"
    result.unlink(missing_ok=True)
    script = SUPPORT / "v2_child.py"
    with log.open("wb") as output:
        child = subprocess.run(
            [sys.executable, "-P", script, json.dumps(specification), result],
            env={**os.environ, **environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert child.returncode == 0, log.read_text(errors="replace")[-8000:]
    return json.loads(result.read_text())

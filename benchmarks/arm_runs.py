"""Runs each engine of a comparison in a process of its own, and says what could not be run."""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_hicache.benchmarks.arms import LABELS, has_gpu, why_not
from vllm_hicache.benchmarks.engine_plan import EnginePlan

_SERVER_START_S = 60.0
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Task:
    """What every engine of a comparison is put through."""

    workload: str
    options: dict[str, Any]
    arm_options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Arm -> what is different for it."""
    repeat: int = 1
    """Passes: all arms in turn, then all again."""
    out: Path | None = None
    """Takes each engine's whole result when it is there, lest a later arm's end costs it."""
    lmcache_python: str | None = None
    lmcache_address: str = ""

    @classmethod
    def of(
        cls,
        options: argparse.Namespace,
        workload: str,
        work: dict[str, Any],
        arm_options: Mapping[str, dict[str, Any]] | None = None,
    ) -> "Task":
        """With what the command line says of passes, of LMCache and of the output."""
        return cls(
            workload=workload,
            options=work,
            arm_options=arm_options or {},
            repeat=options.repeat,
            lmcache_python=options.lmcache_python,
            lmcache_address=options.lmcache_address,
            out=options.out,
        )


@dataclass(slots=True)
class Outcome:
    """What came of a comparison."""

    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Arm -> one result for each pass."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """What -> why."""
    has_failed: bool = False
    """Whether an arm that could run here gave no result."""

    @property
    def machine(self) -> dict[str, Any]:
        """The first engine's view of the machine; it knows of GPUs."""
        found = [result["machine"] for passes in self.results.values() for result in passes]
        return found[0] if found else {}


def run_arms(plans: Sequence[EnginePlan], task: Task, folder: Path) -> Outcome:
    """All passes over all arms that can run here, in the order of the plans."""
    outcome = Outcome()
    able = []
    for plan in plans:
        reason = why_not(plan.arm, _interpreter(plan, task))
        if plan.arm == "lmcache" and plan.in_process:
            reason = "its imports break an engine in the process of its clients"
        if reason:
            outcome.not_measured[LABELS[plan.arm]] = reason
        else:
            able.append(plan)
    for number in range(task.repeat):
        for plan in able:
            if LABELS[plan.arm] in outcome.not_measured:
                continue
            print(f"pass {number + 1} of {task.repeat}: {LABELS[plan.arm]}", file=sys.stderr)
            started = time.monotonic()
            result, failure = _run_one(plan, task, folder / f"{number}-{plan.arm}")
            print(f"  {failure or 'done'}, {time.monotonic() - started:,.1f} s", file=sys.stderr)
            if failure:
                outcome.not_measured[LABELS[plan.arm]] = failure
                outcome.results.pop(plan.arm, None)
                outcome.has_failed = True
            else:
                outcome.results.setdefault(plan.arm, []).append(result)
    return outcome


def _interpreter(plan: EnginePlan, task: Task) -> str:
    return (plan.arm == "lmcache" and task.lmcache_python) or sys.executable


def _run_one(plan: EnginePlan, task: Task, folder: Path) -> tuple[dict[str, Any], str]:
    """(result, "") or ({}, why there is none)."""
    folder.mkdir(parents=True)
    asked, given, log = folder / "plan.json", folder / "result.json", folder / "log.txt"
    work = {**task.options, **task.arm_options.get(plan.arm, {})}
    table = {"plan": plan.as_json(), "workload": task.workload, "options": work}
    asked.write_text(json.dumps(table))
    interpreter = _interpreter(plan, task)
    command = [interpreter, "-P", "-m", "vllm_hicache.benchmarks.arm_process"]
    with _lmcache_server(plan, task, folder), log.open("w") as stream:
        run = subprocess.run(
            [*command, str(asked), str(given)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if run.returncode or not given.exists():
        text = log.read_text(errors="replace").strip()
        print("\n".join(text.splitlines()[-_LAST_LINES:]), file=sys.stderr)
        last = text.rpartition("\n")[2]
        return {}, f"its engine ended with status {run.returncode}: {last}"
    if task.out is not None:
        kept = task.out / "engines" / f"{task.workload}-{folder.name}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(given, kept)
    return json.loads(given.read_text()), ""


@contextmanager
def _lmcache_server(plan: EnginePlan, task: Task, folder: Path) -> Iterator[None]:
    """LMCache's server with this arm's host memory, while its engine runs; else nothing."""
    if plan.arm != "lmcache":
        yield
        return
    host, _, port = task.lmcache_address.rpartition(":")
    command = [
        str(Path(_interpreter(plan, task)).parent / "lmcache"),
        *("server", "--host", host, "--port", port, "--chunk-size", "256"),
        *("--l1-size-gb", f"{plan.host_bytes / 2**30:.3f}", "--eviction-policy", "LRU"),
        # By default it drops a fifth of its pages once 80 % of the memory is in use.
        *("--eviction-trigger-watermark", "0.95", "--eviction-ratio", "0.05"),
        *("--http-host", host, "--http-port", str(int(port) + 1), "--disable-metrics"),
    ]
    if not has_gpu():
        command += ["--max-workers", "1", "--supported-transfer-mode", "engine_driven"]
    with (folder / "server.txt").open("w") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            _wait_for_port(host, int(port), server)
            yield
        finally:
            server.terminate()
            server.wait()


def _wait_for_port(host: str, port: int, server: "subprocess.Popen[bytes]") -> None:
    import socket

    deadline = time.monotonic() + _SERVER_START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"LMCache's server did not listen at {host}:{port}")

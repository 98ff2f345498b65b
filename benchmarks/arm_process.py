"""The process of one engine: ``python -P -m vllm_hicache.benchmarks.arm_process PLAN RESULT``.

The plan is a JSON file with the engine, the name of the workload and its options.
"""

import asyncio
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm_hicache.benchmarks.arms import has_gpu
from vllm_hicache.benchmarks.engine_plan import EnginePlan
from vllm_hicache.benchmarks.run_record import machine
from vllm_hicache.benchmarks.workloads import WORKLOADS


def set_environment(plan: EnginePlan) -> None:
    """Before vLLM is imported: quiet, and on a CPU without its traps."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not has_gpu():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if plan.in_process else "1"
    os.environ.update(plan.environment)


async def run_workload(plan: EnginePlan, name: str, work: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, run one workload, end the engine; what it gave, in JSON's types."""
    workload = WORKLOADS[name]
    from vllm_hicache.benchmarks.engine_session import EngineSession

    session = EngineSession(plan)
    try:
        return await workload(session, work)
    finally:
        session.shutdown()


def first_cause(error: BaseException) -> BaseException:
    """What the first of several clients that failed at once says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> None:
    """Read the plan, run, write the result."""
    plan_path, result_path = map(Path, sys.argv[1:])
    table = json.loads(plan_path.read_text())
    plan = EnginePlan.from_json(table["plan"])
    set_environment(plan)
    try:
        result = asyncio.run(run_workload(plan, table["workload"], table["options"]))
    except ExceptionGroup as group:  # the last line of what is printed is to say why
        traceback.print_exception(group)
        error = first_cause(group)
        sys.exit(f"{type(error).__name__}: {error}")
    result_path.write_text(json.dumps({"machine": machine(), **result}))


if __name__ == "__main__":
    main()

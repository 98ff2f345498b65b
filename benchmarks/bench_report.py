"""What every benchmark of engines prints and writes: table, JSON, plot, what was not measured."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_hicache.benchmarks.arm_runs import Outcome
from vllm_hicache.benchmarks.bootstrap import Estimate
from vllm_hicache.benchmarks.run_record import describe, run_record, write_json


def publish(
    name: str,
    outcome: Outcome,
    findings: Mapping[str, Any],
    tables: list[str],
    out: Path | None,
    plot: Callable[[Path, dict[str, Any]], None],
) -> dict[str, Any]:
    """Print the tables; with ``out``, write ``NAME.json`` and ``NAME.png``. Returns the record."""
    record: dict[str, Any] = run_record()
    if outcome.machine:
        record["machine"] = outcome.machine
    record |= {"benchmark": name, **findings, "not_measured": outcome.not_measured}
    print(describe(record))
    print(*tables, sep="\n\n")
    print(not_measured_lines(outcome.not_measured))
    if out is not None:
        write_json(out / f"{name}.json", record)
        write_plot(out / f"{name}.png", record, plot)
    return record


def not_measured_lines(not_measured: Mapping[str, str]) -> str:
    """One line for each thing that is missing, with its reason."""
    if not not_measured:
        return "Not measured: nothing was left out."
    return "\n".join(["Not measured:", *(f"  {what}: {why}" for what, why in not_measured.items())])


def write_plot(
    path: Path, record: dict[str, Any], plot: Callable[[Path, dict[str, Any]], None]
) -> None:
    """The plot, or a message where matplotlib is missing."""
    try:
        plot(path, record)
    except ModuleNotFoundError as error:
        print(f"no plot: {error.name} is missing (pip install matplotlib)", file=sys.stderr)


def shown(estimate: Estimate, factor: float = 1.0, digits: int = 1) -> str:
    """Value and interval, as in ``12.3 [11.9, 12.8]``."""
    value, low, high = (
        f"{number * factor:,.{digits}f}" for number in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def tier_shares(cached: Mapping[str, int], prompt_tokens: int) -> dict[str, float]:
    """Part of all prompt tokens by where they came from; ``computed`` is the rest."""
    shares = {source: tokens / prompt_tokens for source, tokens in cached.items()}
    return {**shares, "computed": 1 - sum(shares.values())}

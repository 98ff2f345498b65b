"""What ``hicache doctor`` found: checks with advice and facts by section, as text or JSON."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "failed", "refused"]
"""``note`` is worth knowing and costs nothing; ``refused`` is a configuration that cannot be."""

_MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED", "refused": "FAILED"}
EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; needed where something failed."""


@dataclass(slots=True)
class DoctorReport:
    """Everything that was found, in the order of looking."""

    checks: list[Check] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    """By section; values are what JSON knows."""

    def add(self, name: str, status: Status, found: str, advice: str = "") -> None:
        self.checks.append(Check(name, status, found, advice))

    @property
    def exit_status(self) -> int:
        """0 all well, 1 a check failed, 2 the configuration cannot be used."""
        found = {check.status for check in self.checks}
        if "refused" in found:
            return EXIT_REFUSED
        return EXIT_FAILED if "failed" in found else EXIT_OK

    def as_json(self) -> str:
        checks = [
            {"name": c.name, "status": c.status, "found": c.found, "advice": c.advice}
            for c in self.checks
        ]
        whole = {"ok": self.exit_status == EXIT_OK, "checks": checks, **self.facts}
        return json.dumps(whole, indent=2)

    def as_text(self) -> str:
        return "\n".join([*self._fact_lines(), *self._check_lines()])

    def _fact_lines(self) -> Iterator[str]:
        for section, facts in self.facts.items():
            yield f"{section.replace('_', ' ')}:"
            yield from _lines_of(facts, "  ")
            yield ""

    def _check_lines(self) -> Iterator[str]:
        yield "checks:"
        for check in self.checks:
            first, *rest = check.found.splitlines() or [""]
            yield f"  {_MARKS[check.status]} {check.name}: {first}"
            yield from (f"         {line}" for line in rest)
            if check.advice:
                yield f"         -> {check.advice}"


def _lines_of(facts: object, indent: str) -> Iterator[str]:
    """Facts as indented lines, tables within tables one step further in."""
    if isinstance(facts, dict):
        for name, value in facts.items():
            if isinstance(value, dict | list) and value:
                yield f"{indent}{name}:"
                yield from _lines_of(value, indent + "  ")
            else:
                yield f"{indent}{name}: {_shown(value)}"
    elif isinstance(facts, list):
        for value in facts:
            if isinstance(value, dict):
                first, *rest = _lines_of(value, "")
                yield f"{indent}- {first}"
                yield from (f"{indent}  {line}" for line in rest)
            else:
                yield f"{indent}- {_shown(value)}"
    else:
        yield f"{indent}{_shown(facts)}"


def _shown(value: object) -> str:
    if value is None or value in ({}, []):
        return "none"
    if value == "":
        return '""'
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)

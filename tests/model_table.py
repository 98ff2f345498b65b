"""Make the table of restored models from what engine tests noted, and put it into README.

Usage: python tests/model_table.py [RESULTS ...]
RESULTS, ``.cache/results/models.jsonl`` by default, have one line for each engine that a test saw
restore (``tests/e2e/support/model_results.py``). Writes docs/model-results.json and README.md.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTED = ROOT / ".cache" / "results" / "models.jsonl"
KEPT = ROOT / "docs" / "model-results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- model table: tests/model_table.py -->\n", "<!-- end of model table -->\n"
FAMILIES = {
    "Llama (GQA)": "full attention",
    "DeepSeek-V2": "latents (MLA)",
    "DeepSeek-V3": "latents (MLA)",
    "Gemma 3": "windows, full attention",
    "GPT-OSS": "windows, full attention",
    "Mistral, windows": "windows alone",
    "Qwen3-Next": "states (GDN), full attention",
}
"""Rows, and the kinds of KV that a model of that family keeps."""
DRAFTERS = {
    "draft_model": "draft model",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "mtp": "MTP",
}
"""Rows of drafters that keep KV, by vLLM's names of their methods."""
STATELESS = {"n-grams": "n-grams"}
NOT_RUN = "-"

Row = Mapping[str, Any]


def cell(rows: Iterable[Row], **wanted: object) -> str:
    """What was restored by engines of which all of ``wanted`` is true."""
    found = {
        tier
        for row in rows
        if all(row[key] == value for key, value in wanted.items())
        for tier in row["tiers"]
    }
    return "yes" if len(found) > 1 else " ".join(found) or NOT_RUN


def tier_cell(rows: Iterable[Row], tier: str) -> str:
    """Whether an engine of one worker restored from this tier."""
    own = (row for row in rows if (row["tp"], row["pp"], row["runner"]) == (1, 1, "V1"))
    return "yes" if any(tier in row["tiers"] for row in own) else NOT_RUN


def table(rows: Sequence[Row]) -> str:
    """Markdown; a cell says what tests saw and nothing else."""
    lines = [
        "| model | keeps | host | file | TP 2 | PP 2 | V2 runner | speculation |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family, kinds in FAMILIES.items():
        own = [row for row in rows if row["family"] == family]
        names = {row["drafter"] for row in own}
        drafters = [shown for name, shown in (DRAFTERS | STATELESS).items() if name in names]
        plain = [row for row in own if not row["drafter"]]
        lines.append(_line(family, kinds, plain, ", ".join(drafters)))
    for name, shown in DRAFTERS.items():
        own = [row for row in rows if row["drafter"] == name]
        targets = [family for family in FAMILIES if any(row["family"] == family for row in own)]
        lines.append(_line(shown, "draft state", own, "for " + "; ".join(targets)))
    return "\n".join(lines) + "\n"


def _line(name: str, kinds: str, rows: Sequence[Row], last: str) -> str:
    cells = [
        tier_cell(rows, "host"),
        tier_cell(rows, "file"),
        cell(rows, tp=2, pp=1),
        cell(rows, tp=1, pp=2),
        cell(rows, runner="V2"),
    ]
    has_any = bool(rows) or not last.startswith("for")
    return f"| {name} | {kinds} | {' | '.join(cells)} | {last if last and has_any else NOT_RUN} |"


def read_notes(*paths: Path) -> list[Row]:
    """Rows, each once, in the order of the table; none where no test has noted anything."""
    texts = [path.read_text() for path in paths if path.exists()]
    rows = {line: json.loads(line) for text in texts for line in text.splitlines()}
    return sorted(rows.values(), key=_order)


def _order(row: Row) -> tuple[object, ...]:
    return (
        list(FAMILIES).index(row["family"]),
        *(row[key] for key in ("drafter", "runner", "tp", "pp", "test", "tiers")),
    )


def with_table(text: str, made: str) -> str:
    """README with this table between the marks; ValueError where they are missing."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{BEGIN.strip()!r} and {END.strip()!r} must be in README, in this order")
    return before + BEGIN + made + END + after


def main() -> None:
    rows = read_notes(*(map(Path, sys.argv[1:]) if len(sys.argv) > 1 else [NOTED]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    KEPT.write_text(f"[\n{lines}\n]\n")
    README.write_text(with_table(README.read_text(), table(rows)))


if __name__ == "__main__":
    main()
